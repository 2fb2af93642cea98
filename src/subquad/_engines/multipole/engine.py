"""The engine of Multipole: sequences and segments, from the call to the meeting of queries with keys.

    keys of the call -> memory of all keys, far ones in blocks -> how many keys each query sees -> meet

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, p segments,
l tokens of a segment.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.call import Call
from subquad._engines.finite import cleaned, poison_of, widen
from subquad._engines.multipole.gradient import differentiable
from subquad._engines.multipole.meet import meet
from subquad._engines.multipole.memory import Memory, appended, poison_of_keys, settled
from subquad._engines.multipole.native_call import is_served, meet_natively
from subquad._engines.multipole.state import folded, unfolded
from subquad._engines.multipole.step import stepped
from subquad._engines.result import Result
from subquad._torch_internals import has_numbers, in_vmap, outside_graph
from subquad.methods.multipole import Multipole
from subquad.native.calls import PADDING, padded

DATA_DEPENDENT = (
    "method: Multipole selects blocks from data, which a fixed graph cannot do (torch.export, torch.jit.trace, "
    "torch.compile with fullgraph=True); expected a feature method or Window there"
)


class Mode(NamedTuple):
    """How a call is computed."""

    is_causal: bool
    first_row: int  # position of the first query among the keys of a call without a state
    is_growing: bool  # the memory is wanted
    use_kernels: bool
    is_recorded: bool  # by autograd
    is_finite: bool  # nothing has to be cleaned
    scale: float  # factor of the queries that the kernels apply


def run(method: Multipole, call: Call, form: str | None = None) -> Result:
    """Compute the call; the form "dense" or "chunked" asks for torch's operations."""
    call = call.factored()
    attend = outside_graph(_attend, DATA_DEPENDENT)
    if not has_numbers(call.query):
        return _shape_alone(call)
    by_torch = form in ("dense", "chunked")
    if not by_torch and not call.is_autocast and (done := stepped(method, call)) is not None:
        return done
    wide: AbstractContextManager[Any] = nullcontext()
    if call.is_autocast:
        wide = torch.autocast(call.layout.device.type, enabled=False)
    with wide:
        result: Result = attend(method, call, by_torch)
        return result._replace(output=call.unfolded(result.output))


def _shape_alone(call: Call) -> Result:
    """Return an output without numbers, for tensors that have none."""
    if call.return_state:
        raise ValueError("return_state: the state of Multipole depends on numbers, which these tensors do not have")
    layout = call.layout
    shape = (layout.rows, layout.group, layout.queries, layout.value_width)
    return Result(call.unfolded(call.query.new_empty(shape)), None, "dense")


def _attend(method: Multipole, call: Call, by_torch: bool) -> Result:
    """Return the output (b, g, n, e), wide, and the new state."""
    if in_vmap():
        raise ValueError(
            "method: Multipole selects blocks from data, which torch.func.vmap hides; expected tensors with batch "
            "dimensions, of which it takes any number"
        )
    q, k, v = call.folded()
    q, k, v, width = widen(q), widen(k), widen(v), v.shape[-1]
    before = None if call.state is None or not call.state.parts else folded(call.state, call.layout)
    parts = () if call.state is None else call.state.parts
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *parts))
    given = (q, k, v) if before is None else (q, k, v, before.raw_keys)
    is_whole = not call.is_stateful and not call.is_empty
    use_kernels = not by_torch and is_served(*given) and (is_whole or not is_recorded)
    v = v if width % PADDING == 0 else F.pad(v, (0, padded(width) - width))
    is_plain = use_kernels and not is_recorded
    # The kernels scale queries as they read them; a factor above 1 could make them infinite.
    scale = call.logit_scale if is_plain and abs(call.logit_scale) <= 1 else 1.0
    q = q if scale == call.logit_scale else q * call.logit_scale
    is_finite = is_plain and bool(torch.stack([x.sum() for x in (q, k, v)]).isfinite().all())
    is_finite = is_finite and (before is None or not bool(before.poison.isnan().any()))
    mode = Mode(call.is_causal, call.first_row or 0, call.return_state, use_kernels, is_recorded, is_finite, scale)
    output, memory = _computed(method, call, q, k, v, before, mode)
    state = None
    if call.return_state and memory is not None:
        state = unfolded(memory, method, call)
    output = output if width == v.shape[-1] else output[..., :width]
    return Result(output, state, "fused" if use_kernels else "dense")


def _computed(
    method: Multipole, call: Call, q: Tensor, k: Tensor, v: Tensor, before: Memory | None, mode: Mode
) -> tuple[Tensor, Memory | None]:
    """Return the output (b, g, n, e), with poison, and the new memory."""
    if call.segments is None:
        return _in_order(method, q, k, v, call.keep(), before, mode)
    return _in_segments(method, q, k, v, call.keep(), call.segments, before, mode)


def _in_order(
    method: Multipole, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, before: Memory | None, mode: Mode
) -> tuple[Tensor, Memory | None]:
    """Compute queries and keys of one sequence per row; return the output and the new memory."""
    n, m = q.shape[2], k.shape[1]
    poison = query_poison = None
    if not mode.is_finite:
        poison, query_poison, q = poison_of_keys(k, v, keep), poison_of(q), cleaned(q)
    # The number of new keys up to the last one that a query sees.
    upto = torch.full((n,), m, device=k.device)
    if mode.is_causal:
        first = mode.first_row if before is None else m - n
        upto = (torch.arange(n, device=k.device) + first + 1).clamp(0, m)
    counted = upto.expand(len(k), -1) if keep is None else F.pad(keep.cumsum(1), (1, 0))[:, upto]
    counted = counted if before is None else counted + before.filled[:, None]
    memory = None
    if mode.use_kernels and mode.is_recorded:
        output = differentiable(method, q, _in_front(cleaned(k), keep), _in_front(cleaned(v), keep), counted)
    else:
        memory = before if before is not None and m == 0 else appended(
            method, before, k, v, keep, poison, mode.use_kernels)  # fmt: skip
        if mode.use_kernels:
            output = meet_natively(method, q, memory, counted, mode.scale)
        else:
            output = meet(method, q, memory, counted)
        memory = settled(method, memory) if mode.is_growing else None
    if poison is None or query_poison is None:
        return output, memory
    row_poison = F.pad(poison.cumsum(1), (1, 0))[:, upto]
    row_poison = row_poison if before is None else row_poison + before.poison[:, None]
    is_poisoned = (row_poison[:, None] + query_poison).isnan() & (counted > 0)[:, None]
    return output.masked_fill(is_poisoned[..., None], float("nan")), memory  # Adding 0 would turn -0.0 into 0.0.


def _in_front(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return x (b, m, d) with the visible tokens before the hidden ones, each in their order."""
    if keep is None:
        return x
    order = keep.int().argsort(dim=1, descending=True, stable=True)
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def _in_segments(
    method: Multipole, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, segments: Tensor, before: Memory | None,
    mode: Mode,
) -> tuple[Tensor, Memory | None]:  # fmt: skip
    """Compute each segment as a separate sequence; those of similar length are computed together."""
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
            before = replace(
                before, filled=torch.where(continues, before.filled, 0), base=torch.where(continues, before.base, 0),
                poison=torch.where(continues, before.poison, 0.0),
            )  # fmt: skip
    poison = None if mode.is_finite else poison_of_keys(k, v, keep)
    return settled(method, appended(method, before, k, v, keep, poison, mode.use_kernels))
