"""One more token from a state, in place: a single call of the native kernel.

Everything that does not change from token to token is prepared once, and kept with the permission to write into the
room of the state. Other calls, and every token that finishes a segment, take the general way.
"""

import ctypes
from dataclasses import dataclass, replace

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
from subquad.native.loader import FOUND


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
    """Return the result of one more token, or None if the call is another, or has to take the general way."""
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
    assert permit is not None and state.filled is not None and FOUND.library is not None
    query = (widen(call.query) * call.logit_scale).contiguous()
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
    own.keep, own.threads = address(keep), torch.get_num_threads()
    code = FOUND.library.multipole_step(ctypes.byref(own))
    if code == SEGMENT_DUE and keep is None:
        memory = with_next_segment(method, prepared.memory_of(state))
        return None if memory is None else unfolded(memory, method, layout, None, layout.value_width)
    if code in (SEGMENT_DUE, POISONED):
        return None
    check_result(code)
    output = output if output.shape[-1] == layout.value_width else output[..., : layout.value_width]
    output = output if output.dtype == call.dtype else output.to(call.dtype)
    after = replace(state, length=state.length + 1, filled=filled)
    return Result(output[0] if call.is_headless else output, after, "fused")


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
