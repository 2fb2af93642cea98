"""One more token from a state, in place: a single call of the native kernel.

Everything that does not change from token to token is prepared once, and kept with the permission to write into the
room of the state. `MultipoleSteps` keeps even more, for a decoder. Other calls, and every token that finishes a
segment, take the general path.
"""

import ctypes
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad import native
from subquad._calls.call import Call
from subquad._calls.state import State
from subquad._engines.finite import widen
from subquad._engines.multipole.memory import Memory, with_next_segment
from subquad._engines.multipole.native_call import is_served, native_call
from subquad._engines.multipole.state import folded, unfolded
from subquad._engines.result import Result
from subquad._torch_internals import in_transform
from subquad.methods.multipole import Multipole
from subquad.native.calls import PADDING, POISONED, SEGMENT_DUE, MultipoleCall, address, check_result
from subquad.native.loader import kernels


@dataclass
class Prepared:
    """The call of the kernel, and the tensors to which it points."""

    memory: Memory
    table: Tensor
    call: MultipoleCall

    def memory_of(self, state: State) -> Memory:
        """Return the memory of a later state."""
        assert state.filled is not None
        return replace(self.memory, length=state.length, filled=state.filled.reshape(-1))


def stepped(method: Multipole, call: Call) -> Result | None:
    """Return the result of one more token, or None if the call is another, or has to take the general path."""
    state, layout = call.state, call.layout
    if state is None or state.permit is None or not call.return_state or call.segments is not None:
        return None
    if layout.queries != 1 or layout.keys != 1 or not _is_plain(call, state):
        return None
    permit = state.permit
    if not permit.claim(state.length):
        return None
    result = None
    try:
        result = _stepped(method, call, state)
    finally:
        if result is None:
            permit.give_back()
    if isinstance(result, State):  # A segment was finished.
        permit.give_back()
        return stepped(method, call._replace(state=result))
    return result


def _stepped(method: Multipole, call: Call, state: State) -> Result | State | None:
    """Call the kernel. Return a state with one more finished segment if that has to be done first and can be."""
    layout, permit = call.layout, state.permit
    assert permit is not None and state.filled is not None
    query, scale = _scaled(widen(call.query).contiguous(), call.logit_scale)
    key, value = widen(call.key).contiguous(), widen(call.value)
    value = (F.pad(value, (0, -value.shape[-1] % PADDING)) if value.shape[-1] % PADDING else value).contiguous()
    prepared: Prepared | None = permit.prepared
    if prepared is None or prepared.call.group != layout.group:
        prepared = permit.prepared = _prepared(method, call, state, query, value)
    if prepared is None:
        return None
    filled, keep = state.filled.clone(), call.keep()
    keep = None if keep is None else keep.contiguous()
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    own = MultipoleCall.from_buffer_copy(prepared.call)
    own.q, own.key, own.value, own.output = query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()
    own.filled = own.sees = filled.data_ptr()
    own.keep, own.threads, own.scale = address(keep), torch.get_num_threads(), scale
    code = kernels().multipole_step(ctypes.byref(own))
    if code == SEGMENT_DUE and keep is None:
        memory = with_next_segment(method, prepared.memory_of(state))
        return None if memory is None else unfolded(memory, method, call)
    if code in (SEGMENT_DUE, POISONED):
        return None
    check_result(code)
    output = output if output.shape[-1] == layout.value_width else output[..., : layout.value_width]
    output = output if output.dtype == call.dtype else output.to(call.dtype)
    after = replace(state, length=state.length + 1, filled=filled)
    return Result(output[0] if call.is_headless else output, after, "fused")


def _scaled(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return queries, and the factor that is left to the kernel: one above 1 could make finite queries infinite."""
    return (query, scale) if abs(scale) <= 1 else (query * scale, 1.0)


def _is_plain(call: Call, state: State) -> bool:
    """Return whether nothing records or transforms the call, and the tensors have the shapes and dtype of the state."""
    given = (call.query, call.key, call.value)
    if not native.available() or torch.compiler.is_compiling() or in_transform() or not state.parts:
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*given, *state.parts)):
        return False
    assert state.filled is not None
    lead, dtype = state.filled.shape, state.parts[1].dtype
    is_wide = all(x.dtype == dtype or torch.promote_types(x.dtype, torch.float32) == dtype for x in given)
    if not is_wide or call.layout.device.type != "cpu":
        return False
    heads = (*lead[:-1], call.layout.key_heads * call.layout.group)
    return call.key.shape[:-2] == call.value.shape[:-2] == lead and call.query.shape[:-2] == heads


def _prepared(method: Multipole, call: Call, state: State, query: Tensor, value: Tensor) -> Prepared | None:
    memory = replace(folded(state, call.layout), permit=None)  # or permit and memory would keep each other alive
    if not is_served(query, memory.raw_keys) or bool(memory.poison.isnan().any()):
        return None
    table = memory.table()
    rows = query.reshape(call.layout.rows, call.layout.group, 1, call.layout.width)
    output = value.new_empty(call.layout.rows, call.layout.group, 1, value.shape[-1])
    return Prepared(memory, table, native_call(method, rows, memory, memory.filled, table, output))


class MultipoleSteps:
    """The steps that follow a state; `prepared` makes them. Only the count of keys is their own: room is shared."""

    def __init__(self, state: State, shared: Prepared, scale: float) -> None:
        assert state.permit is not None and state.filled is not None
        self._state, self._permit, self._shared = state, state.permit, shared
        self._filled = state.filled.clone(memory_format=torch.contiguous_format)
        self._call = MultipoleCall.from_buffer_copy(shared.call)
        self._call.filled = self._call.sees = self._filled.data_ptr()
        self._call.scale, self._call.threads = scale, torch.get_num_threads()
        self._length, self._step, self._address = state.length, kernels().multipole_step, ctypes.byref(self._call)

    @property
    def state(self) -> State:
        """The state after the last token: later steps write behind its keys."""
        return replace(self._state, length=self._length, filled=self._filled.clone())

    def release(self) -> State:
        """Return the state after the last token."""
        return self.state

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Return (..., heads, 1, e) for the next token; None if it has to take the general path."""
        if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        if not self._permit.claim(self._length):
            return None
        call, output = self._call, query.new_empty((*query.shape[:-1], value.shape[-1]))
        call.q, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.output = output.data_ptr()
        if code := self._step(self._address):
            self._permit.give_back()
            check_result(code)
            return None
        self._length += 1
        return output


def prepared(state: State, scale: float | None, query: Tensor, key: Tensor, value: Tensor) -> MultipoleSteps | None:
    """Return the steps for tokens like this one; None if the kernels do not serve them as they are."""
    if state.permit is None or not state.parts or state.widths != (key.shape[-1], value.shape[-1]):
        return None
    scale = 1 / sqrt(max(1, key.shape[-1])) if scale is None else scale
    wide = state.parts[1].dtype
    if not query.dtype == key.dtype == value.dtype == wide or value.shape[-1] % PADDING or abs(scale) > 1:
        return None
    assert isinstance(state.method, Multipole)
    call = Call.of(query, key, value, is_causal=True, enable_gqa=True, state=state, return_state=True)
    if call.layout.queries != 1 or call.layout.keys != 1 or not _is_plain(call, state):
        return None
    # Steps pass contiguous tokens; the strides of this one must be theirs.
    shared = _prepared(state.method, call, state, query.contiguous(), value.contiguous())
    return None if shared is None else MultipoleSteps(state, shared, scale)
