"""Decoding: token after token from a state, whose sums are updated in place.

    S <- S + phi(k) [v, 1],    out = phi(q) S

`attention(..., state=..., return_state=True)` computes the same with states that are values: each call writes a new
one. Here the sums stay where they are, and everything that does not change from token to token is prepared once.
"""

import ctypes
from dataclasses import replace
from math import prod, sqrt

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._calls.state import State
from subquad._engines import engine_of, run
from subquad._engines.features.choose_form import is_fusable
from subquad._engines.features.fused import numbers_of, turned
from subquad._engines.features.kernel import feature_kernel
from subquad._engines.features.native_call import Operands, Results, packed_call
from subquad._torch_internals import is_transformed
from subquad.methods.method import feature_method
from subquad.native.calls import FeatureCall, address, check_result
from subquad.native.loader import FOUND


class Decoder:
    """Continue a sequence from its state, one token per call, without gradients.

    The decoder has a copy of the state: neither the given one nor another decoder's changes.

    Args:
        state: What `attention(..., return_state=True)` returned.
        scale: As for `attention`.
        enable_gqa: As for `attention`.

    Example:
        >>> from subquad import Taylor, attention
        >>> q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
        >>> _, state = attention(
        ...     q[:, :, :8], k[:, :, :8], v[:, :, :8], is_causal=True, method=Taylor(2), return_state=True
        ... )
        >>> decoder = Decoder(state)
        >>> last = decoder(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:])  # (batch, heads, 1, width)
        >>> whole = attention(q, k, v, is_causal=True, method=Taylor(2))
        >>> torch.allclose(last, whole[:, :, 8:], atol=1e-5), decoder.state.length
        (True, 9)
    """

    def __init__(self, state: State, *, scale: float | None = None, enable_gqa: bool = False) -> None:
        if not isinstance(state, State):
            raise TypeError(
                f"state: expected the result of attention(..., return_state=True), got {type(state).__name__}"
            )
        self._state, self._scale, self._gqa = state.detach(), scale, enable_gqa
        self._steps = 0  # since the state was last brought up to date
        self._call: FeatureCall | None = None  # of the kernels, once they are known to serve
        self._shapes: tuple[object, ...] = ()

    @property
    def state(self) -> State:
        """A copy of the state after the last token, as `attention` would have returned it."""
        state = replace(self._state, length=self._state.length + self._steps)
        return state if self._call is None else state._map(Tensor.clone)

    @torch.no_grad()
    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return (..., heads, 1, e) for the next token.

        Args:
            query: (..., heads, 1, d).
            key: (..., key heads, 1, d).
            value: (..., key heads, 1, e).
        """
        given = (query, key, value)
        shapes = (*(x.shape for x in given), *(x.dtype for x in given), *(x.device for x in given))
        if self._call is None or shapes != self._shapes or torch.is_autocast_enabled("cpu"):
            self._state, self._steps, self._shapes = self.state, 0, shapes
            self._call = self._prepared(query, key, value)
        if self._call is None:
            call = Call.of(query, key, value, is_causal=True, scale=self._scale, enable_gqa=self._gqa,
                           state=self._state, return_state=True)  # fmt: skip
            output, state, _ = run(self._state.method, call)
            assert state is not None
            self._state = state
            return output
        native_call, self._steps = self._call, self._steps + 1
        q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
        output = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=self._poison.dtype)
        native_call.q.data, native_call.k.data, native_call.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        native_call.output = output.data_ptr()
        code = self._step(self._address)
        if code:
            check_result(code)
            output += self._poison.reshape(query.shape[:-1])[..., None]
        return output.to(query.dtype)

    def _prepared(self, query: Tensor, key: Tensor, value: Tensor) -> FeatureCall | None:
        """Return a call whose sums are the decoder's own; None if the kernels do not serve, or `run` is to raise."""
        state = self._state
        if engine_of(state.method) != "features" or state.sums is None or state.poison is None:
            return None
        method = feature_method(state.method)
        if method.is_learned or method.key_shift is not None or not self._fits(state, query, key, value):
            return None
        rows, group = prod(state.poison.shape), query.shape[-3] // max(1, state.poison.shape[-1])
        d, e = key.shape[-1], value.shape[-1]
        layout = Layout((), rows, group, 1, 1, d, e, query.device)
        if not is_fusable(method, layout, query.dtype, is_causal=True, is_stateful=True):
            return None
        q, k, v = (x.contiguous() for x in (query, key, value))
        q, k, v = q.view(rows, group, 1, d), k.view(rows, 1, d), v.view(rows, 1, e)
        if is_transformed(q, k, v):
            return None
        # The kernels keep features contiguous: sums become (..., e + 1, r), seen transposed.
        sums = state.sums.mT.clone(memory_format=torch.contiguous_format)
        kernel, _, _ = feature_kernel(method, q, k, 1 / sqrt(d) if self._scale is None else self._scale)
        log_scale = None if state.log_scale is None else state.log_scale.clone(memory_format=torch.contiguous_format)
        poison = state.poison.clone(memory_format=torch.contiguous_format)
        self._poison, self._normalizer = sums.new_empty(2, rows, group).unbind()  # live as long as the call
        self._state = replace(state, sums=sums.mT, poison=poison, log_scale=log_scale)
        operands = Operands(q, k, v, None, kernel.table, turned(method, kernel.table), sums, poison, log_scale)
        self._operands = operands.contiguous()
        results = Results(
            address(sums), address(poison), address(log_scale), 0, address(self._normalizer), address(self._poison)
        )
        packed = packed_call("step", self._operands, numbers_of(method, kernel, True), results)
        call = FeatureCall.from_buffer_copy(packed)
        assert FOUND.library is not None  # or the kernels would not serve
        self._step, self._address = FOUND.library.step, ctypes.byref(call)
        return call

    def _fits(self, state: State, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether the token has the shapes and the dtype of the state."""
        assert state.sums is not None and state.poison is not None
        if state.segment is not None or not query.dim() == key.dim() > 2 or torch.is_autocast_enabled("cpu"):
            return False
        lead, d, e = state.poison.shape, key.shape[-1], state.sums.shape[-1] - 1
        is_wide = torch.promote_types(query.dtype, torch.float32) == state.sums.dtype
        if not query.dtype == key.dtype == value.dtype or not is_wide:
            return False
        fits = key.shape == (*lead, 1, d) and value.shape == (*lead, 1, e) and query.shape[:-3] == lead[:-1]
        fits = fits and query.shape[-2:] == (1, d) and query.shape[-3] % max(1, lead[-1]) == 0
        fits = fits and (self._gqa or query.shape[-3] == lead[-1])
        return fits and state.sums.shape[-2] == feature_method(state.method).size(d)
