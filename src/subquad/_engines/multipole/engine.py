"""The engine of Multipole: sequences and segments, from the call to the meeting of queries with keys.

    keys of the call -> memory of all keys and their moments -> which keys and blocks each query sees -> meet

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, p segments,
l tokens of a segment.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.call import Call
from subquad._engines.finite import cleaned, poison_of, widen
from subquad._engines.multipole.meet import is_served, meet
from subquad._engines.multipole.memory import Memory, appended, folded, unfolded
from subquad._engines.result import Result
from subquad._torch_internals import in_vmap
from subquad.methods.multipole import Multipole
from subquad.native.calls import padded


class Mode(NamedTuple):
    """How a call is computed."""

    is_causal: bool
    is_growing: bool  # room is left for keys to come
    is_recorded: bool  # autograd records the call, so nothing may be overwritten
    by_torch: bool  # by torch's operations, also where the kernels would serve


def run(method: Multipole, call: Call, form: str | None = None) -> Result:
    """Compute the call; the form "dense" or "chunked" asks for torch's operations."""
    call = call.factored()
    # The choice of blocks decides what is computed: nothing that a compiled graph could hold.
    attend = torch.compiler.disable(_attend) if torch.compiler.is_compiling() else _attend
    wide: AbstractContextManager[Any] = nullcontext()
    if call.is_autocast:
        wide = torch.autocast(call.layout.device.type, enabled=False)
    with wide:
        result: Result = attend(method, call, form in ("dense", "chunked"))
        return result._replace(output=call.unfolded(result.output))


def _attend(method: Multipole, call: Call, by_torch: bool) -> Result:
    """Return the output (b, g, n, e), wide, and the new state."""
    if in_vmap():
        raise ValueError(
            "method: Multipole selects blocks from data, which torch.func.vmap hides; expected tensors with batch "
            "dimensions, of which it takes any number"
        )
    q, k, v = call.folded()
    q = widen(q) * call.logit_scale
    k, v, width = widen(k), widen(v), v.shape[-1]
    poison = poison_of(q)
    q = cleaned(q)
    v = F.pad(v, (0, padded(width) - width))
    before = None if call.state is None or call.state.keys is None else folded(call.state, call.layout)
    given = (q, k, v) if before is None else (q, k, v, before.keys, before.values)
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    mode = Mode(call.is_causal, call.return_state, is_recorded, by_torch)
    memory: Memory | None
    if call.segments is None:
        output, memory = _in_order(method, q, k, v, call.keep(), before, mode)
    else:
        output, memory = _in_segments(method, q, k, v, call.keep(), call.segments, before, mode)
    output = output[..., :width] + poison[..., None]
    state = None
    if call.return_state and memory is not None:
        state = unfolded(memory, method, call.layout, call.last_segment, width)
    return Result(output, state, "fused" if is_served(q, k, v, is_recorded or by_torch) else "dense")


def _in_order(
    method: Multipole, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, before: Memory | None, mode: Mode
) -> tuple[Tensor, Memory]:
    """Compute queries and keys of one sequence per row; return the output and the new memory."""
    n, m = q.shape[2], k.shape[1]
    memory, poison = appended(method, before, k, v, keep, mode.is_growing, mode.is_recorded)
    old = torch.zeros_like(memory.filled) if before is None else before.filled
    if mode.is_causal:  # The last of the new keys that a query sees; without a state, row i has key i.
        last = torch.arange(n, device=k.device) + (0 if before is None else m - n)
        upto = (last + 1).clamp(0, m)
        counted = upto if keep is None else F.pad(keep.cumsum(1), (1, 0))[:, upto]
        sees, row_poison = old[:, None] + counted, F.pad(poison.cumsum(1), (1, 0))[:, upto]
    else:
        sees, row_poison = memory.filled[:, None].expand(-1, n), poison.sum(1, keepdim=True).expand(-1, n)
    if before is not None:
        row_poison = row_poison + before.poison[:, None]
    far = far_blocks(method, sees, mode.is_causal)
    output = meet(method, q, memory, sees, far, mode.by_torch)
    return output + row_poison[:, None, :, None], memory


def far_blocks(method: Multipole, sees: Tensor, is_causal: bool) -> Tensor:
    """Return how many blocks are far for a query that sees `sees` keys: whole ones, and before the window."""
    return (sees - method.sinks - (method.window if is_causal else 0)).clamp(min=0) // method.block


def _in_segments(
    method: Multipole, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, segments: Tensor, before: Memory | None,
    mode: Mode,
) -> tuple[Tensor, Memory | None]:  # fmt: skip
    """Compute each segment as a sequence of its own; those of about the same length are computed together."""
    if before is not None and not bool(segments.any()):  # The common case: all continue the state's segment.
        return _in_order(method, q, k, v, keep, before, mode)
    keep = torch.ones_like(segments, dtype=torch.bool) if keep is None else keep
    output = q.new_zeros(*q.shape[:3], v.shape[-1])
    alone = mode._replace(is_growing=False)
    if before is not None:  # Segment 0 continues it.
        own, _ = _in_order(method, q, k, v, keep & (segments == 0), before, alone)
        output = torch.where((segments == 0)[:, None, :, None], own, output)
    for head, first, size in _segments_by_length(segments, before is not None):  # (p, 1) each
        offset = torch.arange(int(size.max()), device=k.device)
        token, inside = (first + offset).clamp(max=segments.shape[1] - 1), offset < size  # (p, l)
        own_q, own_keep = q.transpose(1, 2)[head, token].transpose(1, 2), keep[head, token] & inside
        own, _ = _in_order(method, own_q, k[head, token], v[head, token], own_keep, None, alone)
        part, place = inside.nonzero(as_tuple=True)
        rows = own[part, :, place]  # (tokens, g, e)
        output = output.transpose(1, 2).index_put((head[part, 0], token[part, place]), rows).transpose(1, 2)
    memory = _last_segment(method, k, v, keep, segments, before, mode) if mode.is_growing else None
    return output, memory


def _segments_by_length(segments: Tensor, is_resumed: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return head, first token and length, (p, 1) each, of all segments of about the same length; one entry per length.

    Segment 0 of a resumed sequence, which continues its state, is left out.
    """
    b, m = segments.shape
    marks = segments + torch.arange(b, device=segments.device)[:, None] * (m + 1)
    _, lengths = torch.unique_consecutive(marks.flatten(), return_counts=True)
    first = lengths.cumsum(0) - lengths
    head, first = first // max(1, m), first % max(1, m)
    fresh = segments[head, first] > 0 if is_resumed else torch.ones_like(head, dtype=torch.bool)
    head, first, lengths = head[fresh], first[fresh], lengths[fresh]
    kinds = lengths.float().log2().ceil().long()
    picked = (kinds == kind for kind in kinds.unique().tolist())
    return [(head[kind, None], first[kind, None], lengths[kind, None]) for kind in picked]


def _last_segment(
    method: Multipole, k: Tensor, v: Tensor, keep: Tensor, segments: Tensor, before: Memory | None, mode: Mode
) -> Memory:
    """Return the memory of the segment that the next call may continue."""
    if segments.shape[1]:
        last = segments[:, -1:]
        keep = keep & (segments == last)
        if before is not None:
            continues = last[:, 0] == 0
            before = Memory(
                before.length, before.keys, before.values, torch.where(continues, before.filled, 0),
                torch.where(continues, before.poison, 0.0),
            )  # fmt: skip
    return appended(method, before, k, v, keep, True, mode.is_recorded)[0]
