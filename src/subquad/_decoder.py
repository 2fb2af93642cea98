"""Decoding: token after token from a state, whose sums are changed in place.

    S <- S + phi(k) [v, 1],    out = phi(q) S

`attention(..., state=..., return_state=True)` does the same with states that are values: each call writes a new one.
Here the sums stay where they are, and all that does not change from token to token is prepared once.
"""

import ctypes
from dataclasses import replace
from math import prod, sqrt
from typing import cast

import torch
from torch import Tensor

from subquad._attention import attend
from subquad._features import Linear, RandomFeatures, Taylor
from subquad._methods import Method, kernel_of, recipe_of
from subquad._state import State
from subquad.native import _fused as native
from subquad.native._library import FOUND, Call, pointer
from subquad.native._operators import filled

NO_MEMORY, POISONED = 1, 2  # what the kernel answers; the second where a number was not finite


class Decoder:
    """Continues a sequence from its state, without gradients; `state` of another call or of `attention` is not changed.

    scale, enable_gqa: as for `attention`.

    >>> from subquad import Taylor, attention
    >>> q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    >>> _, state = attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], is_causal=True, method=Taylor(2), return_state=True)
    >>> decoder = Decoder(state)
    >>> last = decoder(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:])  # (batch, heads, 1, width)
    >>> whole = attention(q, k, v, is_causal=True, method=Taylor(2))
    >>> torch.allclose(last, whole[:, :, 8:], atol=1e-5), decoder.state.length
    (True, 9)
    """

    def __init__(self, state: State, *, scale: float | None = None, enable_gqa: bool = False) -> None:
        if not isinstance(state, State):
            raise TypeError(
                f"state: expected what attention(..., return_state=True) returned, got {type(state).__name__}"
            )
        self._state, self._scale, self._gqa = state.detach(), scale, enable_gqa
        self._steps = 0  # since the state was last made up to date
        self._call: Call | None = None  # for the kernels, once they are known to serve
        self._shapes: tuple[object, ...] = ()

    @property
    def state(self) -> State:
        """What `attention` would have returned: a copy, which the next token does not change."""
        state = replace(self._state, length=self._state.length + self._steps)
        return state if self._call is None else state._map(Tensor.clone)

    @torch.no_grad()
    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (..., heads, 1, d), key (..., key heads, 1, d), value (..., key heads, 1, e) -> (..., heads, 1, e)."""
        given = (query, key, value)
        shapes = (*(x.shape for x in given), *(x.dtype for x in given), *(x.device for x in given))
        if self._call is None or shapes != self._shapes or torch.is_autocast_enabled("cpu"):
            self._state, self._steps, self._shapes = self.state, 0, shapes
            self._call = self._prepared(query, key, value)
        if self._call is None:
            method = cast(Method, self._state.method)
            output, state = attend(
                query, key, value, None, 0.0, True, self._scale, self._gqa, method, None, None, self._state, True
            )
            self._state = cast(State, state)
            return output
        call, self._steps = self._call, self._steps + 1
        q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
        output = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=self._poison.dtype)
        call.q.data, call.k.data, call.v.data, call.output = q.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr()
        code = self._step(self._address)
        if code == NO_MEMORY:
            raise MemoryError("subquad: not enough memory for the buffers of the native kernels")
        if code == POISONED:
            output += self._poison.reshape(query.shape[:-1])[..., None]
        return output.to(query.dtype)

    def _prepared(self, query: Tensor, key: Tensor, value: Tensor) -> Call | None:
        """A call whose sums are the decoder's own; None where the kernels do not serve, or `attend` has to complain."""
        state, method = self._state, self._state.method
        if state.sums is None or state.poison is None or state.segment is not None or key.dim() < 3:
            return None
        if not query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled("cpu"):
            return None
        if not isinstance(method, Taylor | RandomFeatures | Linear) or getattr(method, "key_shift", None) is not None:
            return None
        recipe = recipe_of(method)
        lead, d, e = state.poison.shape, key.shape[-1], state.sums.shape[-1] - 1
        fits = key.shape == (*lead, 1, d) and value.shape == (*lead, 1, e) and query.shape[:-3] == lead[:-1]
        fits = fits and query.shape[-2:] == (1, d) and query.shape[-3] % max(1, lead[-1]) == 0
        fits = fits and (self._gqa or query.shape[-3] == lead[-1]) and state.sums.shape[-2] == method.size(d)
        if not fits or recipe is None:
            return None
        rows, group = prod(lead), query.shape[-3] // max(1, lead[-1])
        q, k, v = (x.contiguous() for x in (query, key, value))
        q, k, v = q.view(rows, group, 1, d), k.view(rows, 1, d), v.view(rows, 1, e)
        if not native.serves(recipe, q, k, v, None) or torch.promote_types(q.dtype, torch.float32) != state.sums.dtype:
            return None
        # The kernels have a feature beside the next: sums become (..., e + 1, r), seen the other way round.
        sums = state.sums.mT.clone(memory_format=torch.contiguous_format)
        kernel, _, _ = kernel_of(method, q, k, 1 / sqrt(d) if self._scale is None else self._scale)
        log_scale = None if state.log_scale is None else state.log_scale.clone(memory_format=torch.contiguous_format)
        poison = state.poison.clone(memory_format=torch.contiguous_format)
        self._poison = sums.new_empty(rows, group)
        self._normalizer = torch.empty_like(self._poison)  # Nobody reads it; it lives as long as the call.
        self._state = replace(state, sums=sums.mT, poison=poison, log_scale=log_scale)
        tensors = (q, k, v, None, kernel.table, native.turned(recipe, kernel.table), sums, poison, log_scale)
        normalized = getattr(kernel, "normalized", True)
        numbers = (*recipe, sums.shape[-1], *kernel.root_scale, True, normalized, 0)
        call = filled(
            tensors, numbers, after=sums.data_ptr(), after_poison=poison.data_ptr(), after_scale=pointer(log_scale),
            poison=self._poison.data_ptr(), normalizer=self._normalizer.data_ptr(),
        )  # fmt: skip
        library = FOUND.library
        assert library is not None  # or the kernels would not serve
        self._step, self._address = library.step, ctypes.byref(call)
        return call
