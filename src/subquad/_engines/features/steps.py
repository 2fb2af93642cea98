"""Decoding by a feature method: sums that the step kernel updates in place.

S <- S + phi(k) [v, 1],    out = phi(q) S
"""

import ctypes
from dataclasses import replace
from math import prod, sqrt

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._calls.state import State
from subquad._engines.features.alignment import Coordinates
from subquad._engines.features.choose_form import is_fusable
from subquad._engines.features.fused import numbers_of, turned
from subquad._engines.features.kernel import feature_kernel
from subquad._engines.features.mapped import mapped
from subquad._engines.features.native_call import Operands, Results, packed_call
from subquad._torch_internals import is_transformed
from subquad.methods.method import FeatureMethod, feature_method
from subquad.native.calls import FeatureCall, address, check_result
from subquad.native.loader import kernels


class FeatureSteps:
    """The steps that follow a state, on a copy of its sums; `prepared` makes them."""

    def __init__(self, state: State, operands: Operands, packed: bytes, rows: tuple[Tensor, Tensor]) -> None:
        self._state, self._count = state, 0
        self._operands, self._poison, self.normalizer = operands, *rows  # They live as long as the call.
        self._call = FeatureCall.from_buffer_copy(packed)
        self._step, self._address = kernels().step, ctypes.byref(self._call)

    @property
    def state(self) -> State:
        """A copy of the state after the last token."""
        return self.release()._map(Tensor.clone)

    def release(self) -> State:
        """Return the state itself, whose tensors another step would change."""
        return replace(self._state, length=self._state.length + self._count)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Return (..., heads, 1, e) for the next token."""
        call = self._call
        q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
        output = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=self._poison.dtype)
        call.q.data, call.k.data, call.v.data, call.output = (x.data_ptr() for x in (q, k, v, output))
        self._count += 1
        if code := self._step(self._address):
            check_result(code)
            output += self._poison.reshape(query.shape[:-1])[..., None]
        return output if output.dtype == query.dtype else output.to(query.dtype)


class MappedSteps:
    """The steps of a learned map: its features take the place of query and key."""

    def __init__(self, state: State, call: Call, steps: FeatureSteps) -> None:
        self._state, self._call, self._steps = state, call, steps

    @property
    def normalizer(self) -> Tensor:
        """(rows, group): the sums of weights of the last token."""
        return self._steps.normalizer

    @property
    def state(self) -> State:
        """A copy of the state after the last token."""
        return replace(self._steps.state, method=self._state.method, scale=self._state.scale)

    def release(self) -> State:
        """Return the state itself, whose tensors another step would change."""
        return replace(self._steps.release(), method=self._state.method, scale=self._state.scale)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Return (..., heads, 1, e) for the next token."""
        call = mapped(self._state.method, self._call._replace(query=query, key=key, value=value)).call
        return self._steps(call.query, call.key, call.value)


def prepared(
    state: State, scale: float | None, query: Tensor, key: Tensor, value: Tensor
) -> FeatureSteps | MappedSteps | None:
    """Return the steps for tokens like this one; None if the general path must serve them, or raise."""
    if state.sums is None or state.poison is None:
        return None
    method = feature_method(state.method)
    if method.is_learned:
        return _prepared_map(state, scale, query, key, value)
    return _prepared(method, state, scale, query, key, value)


def _prepared_map(state: State, scale: float | None, query: Tensor, key: Tensor, value: Tensor) -> MappedSteps | None:
    """Return the steps of a map without a log-scale."""
    if state.log_scale is not None or not state.sums.dtype == query.dtype == value.dtype:  # type: ignore[union-attr]
        return None
    call = Call.of(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    given = mapped(state.method, call)
    own = replace(state, method=given.method, scale=1.0)
    steps = _prepared(given.method, own, 1.0, given.call.query, given.call.key, given.call.value)
    return None if steps is None else MappedSteps(state, call, steps)


def _prepared(
    method: FeatureMethod, state: State, scale: float | None, query: Tensor, key: Tensor, value: Tensor
) -> FeatureSteps | None:
    assert state.sums is not None and state.poison is not None
    if not _fits(state, query, key, value):
        return None
    rows, group = prod(state.poison.shape), query.shape[-3] // max(1, state.poison.shape[-1])
    d, e = key.shape[-1], value.shape[-1]
    layout = Layout(tuple(state.poison.shape[:-1]), state.poison.shape[-1], group, 1, 1, d, e, query.device)
    if not is_fusable(method, layout, query.dtype, is_causal=True, is_stateful=True):
        return None
    q, k, v = (x.contiguous() for x in (query, key, value))
    q, k, v = q.view(rows, group, 1, d), k.view(rows, 1, d), v.view(rows, 1, e)
    if is_transformed(q, k, v):
        return None
    factor = 1 / sqrt(d) if scale is None else scale
    coordinates = Coordinates.of(method, layout, factor, k).packed(d) if method.is_aligned else None
    # The kernels keep features contiguous: sums become (..., e + 1, r), seen transposed.
    sums = state.sums.mT.clone(memory_format=torch.contiguous_format)
    kernel, _, _ = feature_kernel(method, q, k, factor)
    log_scale = None if state.log_scale is None else state.log_scale.clone(memory_format=torch.contiguous_format)
    poison = state.poison.clone(memory_format=torch.contiguous_format)
    row_poison, normalizer = sums.new_empty(2, rows, group).unbind()
    operands = Operands(q, k, v, None, kernel.table, turned(method, kernel.table), sums, poison, log_scale,
                        coordinates)  # fmt: skip
    operands = operands.contiguous()
    results = Results(address(sums), address(poison), address(log_scale), 0, address(normalizer), address(row_poison))
    packed = packed_call("step", operands, numbers_of(method, kernel, True, 0, coordinates is not None), results)
    own = replace(state, sums=sums.mT, poison=poison, log_scale=log_scale)
    return FeatureSteps(own, operands, packed, (row_poison, normalizer))


def _fits(state: State, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the token has the shapes and the dtype of the state."""
    assert state.sums is not None and state.poison is not None
    if state.segment is not None or not query.dim() == key.dim() > 2:
        return False
    lead, d, e = state.poison.shape, key.shape[-1], state.sums.shape[-1] - 1
    is_wide = torch.promote_types(query.dtype, torch.float32) == state.sums.dtype
    if not query.dtype == key.dtype == value.dtype or not is_wide:
        return False
    fits = key.shape == (*lead, 1, d) and value.shape == (*lead, 1, e) and query.shape[:-3] == lead[:-1]
    fits = fits and query.shape[-2:] == (1, d) and query.shape[-3] % max(1, lead[-1]) == 0
    return fits and state.sums.shape[-2] == feature_method(state.method).size(d)
