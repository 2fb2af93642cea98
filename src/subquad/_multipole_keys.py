"""The keys of Multipole, in the order in which they come, hidden ones left out; and their moments, kept as they grow.

Padding moves no border of a block, because a hidden key has no place among the others. What a state remembers has room
for more, into which the next call writes: a step costs what it reads, not a copy of all that came before. Two calls
that go on from the same state must not share that room; the one that comes second makes a copy.

Axes as in _multipole.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._kernel import cleaned, poison_of, widen
from subquad._layout import Layout
from subquad._multipole import LEAST, Multipole, Units, far_blocks, grown, meet, sizes_of
from subquad._state import Claim, State
from subquad.native._library import WHOLE


@dataclass(frozen=True)
class Memory:
    """What is kept of the keys so far, with room for more: of each head the first `filled` (b,) are there."""

    length: int  # the keys that have come, hidden ones too
    keys: Tensor  # (b, room, d), wide and finite
    values: Tensor  # (b, room, e), e made up to whole vectors
    filled: Tensor  # (b,)
    poison: Tensor  # (b,): 0, or NaN once a key or value was not finite
    levels: tuple[Units, ...] = ()
    claim: Claim | None = None  # who may write into the room


def multipole_attention(
    method: Multipole, layout: Layout, q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None, runs: Tensor | None,
    last_segment: Tensor | None, state: State | None, is_causal: bool, scale: float, return_state: bool, twin: bool,
) -> tuple[Tensor, State | None]:  # fmt: skip
    """q (b, g, n, d), k (b, m, d), v (b, m, e), keep and runs (b, m) -> (b, g, n, e), wide, and the new state."""
    if torch._C._are_functorch_transforms_active() and _in_vmap():
        raise ValueError("method: Multipole reads which blocks were chosen, which torch.func.vmap does not show; "
                         "expected tensors with batch dimensions, of which it takes any number")  # fmt: skip
    q = widen(q) * scale
    k, v, width = widen(k), widen(v), v.shape[-1]
    poison = poison_of(q)
    q = cleaned(q)
    v = F.pad(v, (0, -width % WHOLE))
    before = None if state is None or state.keys is None else _folded(state, layout)
    given = (q, k, v) if before is None else (q, k, v, before.keys, before.values)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    memory: Memory | None
    if runs is None:
        output, memory = _in_order(method, q, k, v, keep, before, is_causal, return_state, twin, recorded)
    else:
        output, memory = _in_segments(method, q, k, v, keep, runs, before, is_causal, return_state, twin, recorded)
    output = output[..., :width] + poison[..., None]
    if not return_state or memory is None:
        return output, None
    return output, _unfolded(memory, method, layout, last_segment, width)


def _in_vmap() -> bool:
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def _in_order(
    method: Multipole, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, before: Memory | None, is_causal: bool,
    growing: bool, twin: bool, recorded: bool,
) -> tuple[Tensor, Memory]:  # fmt: skip
    """Queries and keys of one sequence a row, and what is remembered then."""
    n, m = q.shape[2], k.shape[1]
    memory, told = appended(method, before, k, v, keep, growing, recorded)
    old = torch.zeros_like(memory.filled) if before is None else before.filled
    if is_causal:  # The last of the new keys that a query sees; without a state, row i has key i.
        last = torch.arange(n, device=k.device) + (0 if before is None else m - n)
        upto = (last + 1).clamp(0, m)
        counted = upto if keep is None else F.pad(keep.cumsum(1), (1, 0))[:, upto]
        sees, sick = old[:, None] + counted, F.pad(told.cumsum(1), (1, 0))[:, upto]
    else:
        sees, sick = memory.filled[:, None].expand(-1, n), told.sum(1, keepdim=True).expand(-1, n)
    if before is not None:
        sick = sick + before.poison[:, None]
    far = far_blocks(method, sees, is_causal)
    output = meet(method, q, memory.keys, memory.values, memory.levels, sees, far, twin)
    return output + sick[:, None, :, None], memory


def appended(
    method: Multipole, before: Memory | None, k: Tensor, v: Tensor, keep: Tensor | None, growing: bool, recorded: bool
) -> tuple[Memory, Tensor]:
    """The memory with new keys, and (b, m): NaN where one of them is not finite and may be seen, else 0.

    growing: room is left for those that will come. recorded: somebody will differentiate, so nothing may be written to.
    """
    told = poison_of(k) + poison_of(v)
    told = told if keep is None else torch.where(keep, told, 0.0)
    k, v = cleaned(k), cleaned(v)
    b, m, _ = k.shape
    length = m + (0 if before is None else before.length)
    old = torch.zeros(b, dtype=torch.int64, device=k.device) if before is None else before.filled
    levels: tuple[Units | None, ...] = ()
    claim = None if recorded else Claim(length)
    if before is None and keep is None and not growing:
        keys, values, filled = k.contiguous(), v.contiguous(), old + m
    else:
        filled = old + (m if keep is None else keep.sum(1))
        if before is not None and growing and not recorded and _may_write(before) and before.keys.shape[1] >= length:
            keys, values, levels, claim = before.keys, before.values, before.levels, before.claim
            assert claim is not None
            claim.length = length
        else:
            room = length + length // 2 + 64 if growing else length
            keys, values = k.new_zeros(b, room, k.shape[2]), v.new_zeros(b, room, v.shape[2])
            if before is not None:
                there = min(before.length, before.keys.shape[1])
                keys[:, :there], values[:, :there] = before.keys[:, :there], before.values[:, :there]
                if not recorded:
                    levels = tuple(Units(x.size, *(y.clone() for y in x[1:])) for x in before.levels)
        head = torch.arange(b, device=k.device)[:, None]
        if keep is None:
            place = old[:, None] + torch.arange(m, device=k.device)
            keys[head, place], values[head, place] = k, v
        else:
            place = old[:, None] + keep.cumsum(1) - 1
            head, token = keep.nonzero(as_tuple=True)
            keys[head, place[head, token]], values[head, place[head, token]] = k[head, token], v[head, token]
    most = max(0, length - method.sinks) // method.block
    found = []
    for i, size in enumerate([1, *sizes_of(most)]):
        had = levels[i] if i < len(levels) else None
        keys_of_unit = size * method.block
        was, now = ((x - method.sinks).clamp(min=0) // keys_of_unit for x in (old, filled))
        found.append(grown(had, method, size, keys, values, torch.zeros_like(was) if had is None else was, now))
    sick = told.sum(1) + (0.0 if before is None else before.poison)
    return Memory(length, keys, values, filled, sick, tuple(found), claim), told


def _may_write(memory: Memory) -> bool:
    """Whether nobody has gone on from here, and nothing stands between us and the tensors."""
    if memory.claim is None or memory.claim.length != memory.length:
        return False
    wrapped = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return not wrapped and (torch.is_inference_mode_enabled() or not memory.keys.is_inference())


def _in_segments(
    method: Multipole, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, runs: Tensor, before: Memory | None,
    is_causal: bool, growing: bool, twin: bool, recorded: bool,
) -> tuple[Tensor, Memory | None]:  # fmt: skip
    """Each segment is a sequence of its own; those of about the same length are computed together."""
    if before is not None and not bool(runs.any()):  # As a step mostly does: all go on with the segment of the state.
        return _in_order(method, q, k, v, keep, before, is_causal, growing, twin, recorded)
    b, m = runs.shape
    keep = torch.ones_like(runs, dtype=torch.bool) if keep is None else keep
    output = q.new_zeros(*q.shape[:3], v.shape[-1])
    if before is not None:  # Run 0 goes on from it.
        own, _ = _in_order(method, q, k, v, keep & (runs == 0), before, is_causal, False, twin, recorded)
        output = torch.where((runs == 0)[:, None, :, None], own, output)
    # (p,): head, first token and length of each segment
    marks = runs + torch.arange(b, device=k.device)[:, None] * (m + 1)
    _, lengths = torch.unique_consecutive(marks.flatten(), return_counts=True)
    first = lengths.cumsum(0) - lengths
    head, first = first // max(1, m), first % max(1, m)
    fresh = torch.ones_like(head, dtype=torch.bool) if before is None else runs[head, first] > 0
    head, first, lengths = head[fresh], first[fresh], lengths[fresh]
    kinds = lengths.float().log2().ceil().long()
    for kind in kinds.unique().tolist():
        alike = kinds == kind
        h, f, size = head[alike, None], first[alike, None], lengths[alike, None]
        offset = torch.arange(int(size.max()), device=k.device)
        token, inside = (f + offset).clamp(max=m - 1), offset < size  # (p, l)
        own_q, own_keep = q.transpose(1, 2)[h, token].transpose(1, 2), keep[h, token] & inside
        own, _ = _in_order(
            method, own_q, k[h, token], v[h, token], own_keep, None, is_causal, False, twin, recorded
        )  # fmt: skip
        part, place = inside.nonzero(as_tuple=True)
        rows = own[part, :, place]  # (tokens, g, e)
        output = output.transpose(1, 2).index_put((h[part, 0], token[part, place]), rows).transpose(1, 2)
    memory = None
    if growing:
        last = runs[:, -1:] if m else runs[:, :0]
        if before is not None and m:
            goes_on = last[:, 0] == 0
            before = Memory(before.length, before.keys, before.values, torch.where(goes_on, before.filled, 0),
                            torch.where(goes_on, before.poison, 0.0))  # fmt: skip
        memory, _ = appended(method, before, k, v, keep & (runs == last) if m else keep, True, recorded)
    return output, memory


def _folded(state: State, layout: Layout) -> Memory:
    def fold(x: Any) -> Tensor:
        return x.reshape(layout.rows, *x.shape[len(layout.batch) + 1 :])  # type: ignore[no-any-return]

    tensors = [fold(x) for x in state.moments]
    sizes = [1, *(LEAST << level for level in range(len(tensors) // 3 - 1))]
    levels = tuple(Units(size, *tensors[3 * i : 3 * i + 3]) for i, size in enumerate(sizes) if tensors)
    return Memory(state.length, fold(state.keys), fold(state.values), fold(state.filled), fold(state.poison), levels,
                  state.claim)  # fmt: skip


def _unfolded(memory: Memory, method: Multipole, layout: Layout, last_segment: Tensor | None, width: int) -> State:
    moments = tuple(layout.unfold(x) for level in memory.levels for x in level[1:])
    return State(
        method, memory.length, poison=layout.unfold(memory.poison), keys=layout.unfold(memory.keys),
        values=layout.unfold(memory.values), filled=layout.unfold(memory.filled), moments=moments, claim=memory.claim,
        value_width=width,
        segment=None if last_segment is None else layout.unfold(last_segment),
    )  # fmt: skip
