"""Decoding with a window: one more token, written into the room of the state and computed by one call of the kernel."""

import ctypes

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._calls.state import State, WritePermit, check_state
from subquad._engines.sparse.memory import Buffers, held, longer, may_write
from subquad._engines.sparse.native_call import is_served, native_call
from subquad._engines.sparse.pattern import Pattern
from subquad.methods.window import Window
from subquad.native.calls import POISONED, check_result
from subquad.native.loader import kernels


class WindowSteps:
    """The steps that follow a state; `prepared` makes them. The buffers are shared with the state."""

    def __init__(self, method: Window, state: State, layout: Layout, scale: float, query: Tensor) -> None:
        assert state.permit is not None and state.keys is not None
        self._state, self._layout, self._permit = state, layout, state.permit
        self._buffers: Buffers = state.permit.prepared
        self._tail, self._count, self._reach = state.keys.shape[-2], 0, method.reach
        tokens, _ = held(state)
        q = layout.fold_query(query)
        sinks = method.logits_of_sinks(layout.key_heads * layout.group, q.dtype)
        sinks = None if sinks is None else sinks.unflatten(0, (layout.key_heads, layout.group)).contiguous()
        self._bounds = torch.zeros(1, 4, 1, dtype=torch.int32)
        keep = None if self._buffers.is_open else self._buffers.keep
        pattern = Pattern(self._bounds, keep, key_heads=layout.key_heads)
        self._rows = q.new_empty(2, *q.shape[:3])
        call, self._alive = native_call(
            q, tokens.keys, tokens.values, pattern, scale, method.softcap, sinks, (self._rows[0], *self._rows)
        )
        self._call, self._address, self._run = call, ctypes.byref(call), kernels().sparse
        self._places = (ctypes.c_int32 * 4).from_address(self._bounds.data_ptr())
        # Sinks that are not in front of the tail are its first keys.
        self._sinks_end = self._buffers.front + method.sinks - int(self._buffers.keep[0, : self._buffers.front].sum())

    @property
    def state(self) -> State:
        """The state after the last token: later steps write behind its keys."""
        return longer(self._state, self._layout, self._count) if self._count else self._state

    @property
    def oldest(self) -> tuple[Tensor, Tensor]:
        """The key (b, d) and the value (b, e) that the next token no longer sees."""
        place = self._buffers.front + self._tail + self._count - self._reach
        return self._buffers.keys[:, place], self._buffers.values[:, place]

    @property
    def level(self) -> Tensor:
        """(b, g, 1): the logarithm of the sum of weights of the last token."""
        return self._rows[0]

    def release(self) -> State:
        """Return the state after the last token."""
        return self.state

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Return (..., heads, 1, e) for the next token; None if the buffers are full, or another call took the room."""
        buffers, tail = self._buffers, self._tail + self._count
        if tail == buffers.room or not self._permit.claim(self._state.length + self._count):
            return None
        place = buffers.front + tail
        buffers.keys[:, place].copy_(key.reshape(len(buffers.keys), -1))
        buffers.values[:, place].copy_(value.reshape(len(buffers.keys), -1))
        query = query.contiguous()
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        call = self._call
        call.q.data, call.output, call.keys = query.data_ptr(), output.data_ptr(), place + 1
        near = max(buffers.front, place + 1 - self._reach)
        self._places[1], self._places[2], self._places[3] = min(self._sinks_end, near), near, place + 1
        code = self._run(self._address)
        check_result(code)
        self._count += 1
        if code == POISONED:
            output.masked_fill_(self._rows[1].reshape(query.shape[:-1])[..., None].isnan(), float("nan"))
        return output


def prepared(state: State, scale: float | None, query: Tensor, key: Tensor, value: Tensor) -> WindowSteps | None:
    """Return the steps for tokens like this one; None if the kernels do not serve them as they are."""
    method, permit = state.method, state.permit
    if not isinstance(method, Window) or not isinstance(permit, WritePermit) or permit.prepared is None:
        return None
    if state.length < method.sinks or (state.keep is not None and method.sinks) or state.segment is not None:
        return None
    call = Call.of(query, key, value, is_causal=True, scale=scale, enable_gqa=True, state=state, return_state=True)
    check_state(state, method, call.layout, False, key.dtype, call.logit_scale)
    layout, wide = call.layout, (torch.float32, torch.float64)
    lead = (*layout.batch, layout.key_heads)
    fits = query.shape[:-2] == (*layout.batch, layout.key_heads * layout.group) and key.shape[:-2] == lead
    if not fits or value.shape[:-2] != lead or layout.queries != 1 or layout.keys != 1 or query.dtype not in wide:
        return None
    if not may_write(permit.prepared) or not is_served(*call.folded(), method.sink_logits):
        return None
    return WindowSteps(method, state, layout, call.logit_scale, query.contiguous())
