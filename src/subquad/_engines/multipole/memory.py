"""The keys that Multipole remembers, in the order in which they come, hidden ones left out; and their moments.

Padding moves no border of a block, because a hidden key has no place among the others. The tensors of a state have room
for more keys, into which the next call writes: a step costs what it reads, not a copy of everything before it. Two
calls that continue the same state must not share that room; the second one makes a copy.

Axes: b batch and key heads, m keys, d width, e value width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from subquad._calls.layout import Layout
from subquad._calls.state import State, WritePermit
from subquad._engines.finite import cleaned, poison_of
from subquad._engines.multipole.moments import Units, grown
from subquad._torch_internals import in_transform
from subquad.methods import multipole as settings
from subquad.methods.multipole import Multipole, group_sizes

SPARE_KEYS = 64  # room beyond half the length


@dataclass(frozen=True)
class Memory:
    """The keys so far, with room for more: each head has the first `filled` (b,) of them."""

    length: int  # keys seen, hidden ones included
    keys: Tensor  # (b, room, d), wide and finite
    values: Tensor  # (b, room, e), e padded to whole vectors
    filled: Tensor  # (b,)
    poison: Tensor  # (b,): 0, or NaN once a key or value was not finite
    levels: tuple[Units, ...] = ()
    permit: WritePermit | None = None  # who may write into the room


def appended(
    method: Multipole, before: Memory | None, k: Tensor, v: Tensor, keep: Tensor | None, is_growing: bool,
    is_recorded: bool,
) -> tuple[Memory, Tensor]:  # fmt: skip
    """Return the memory with new keys, and (b, m): NaN where one of them is visible and not finite, else 0.

    Args:
        method: The method.
        before: The memory before these keys.
        k: New keys (b, m, d).
        v: Their values (b, m, e).
        keep: (b, m), True = may be seen.
        is_growing: Whether to leave room for keys to come.
        is_recorded: Whether autograd records the call, so that nothing may be overwritten.
    """
    poison = poison_of(k) + poison_of(v)
    poison = poison if keep is None else torch.where(keep, poison, 0.0)
    k, v = cleaned(k), cleaned(v)
    b, m, _ = k.shape
    length = m + (0 if before is None else before.length)
    old = torch.zeros(b, dtype=torch.int64, device=k.device) if before is None else before.filled
    levels: tuple[Units, ...] = ()
    if before is None and keep is None and not is_growing:
        keys, values, filled, permit = k.contiguous(), v.contiguous(), old + m, None
    else:
        filled = old + (m if keep is None else keep.sum(1))
        keys, values, levels, permit = _room(before, k, v, length, is_growing, is_recorded)
        head = torch.arange(b, device=k.device)[:, None]
        if keep is None:
            place = old[:, None] + torch.arange(m, device=k.device)
            keys[head, place], values[head, place] = k, v
        else:
            place = old[:, None] + keep.cumsum(1) - 1
            head, token = keep.nonzero(as_tuple=True)
            keys[head, place[head, token]], values[head, place[head, token]] = k[head, token], v[head, token]
    found = []
    for i, size in enumerate([1, *group_sizes(max(0, length - method.sinks) // method.block)]):
        had = levels[i] if i < len(levels) else None
        was, now = ((x - method.sinks).clamp(min=0) // (size * method.block) for x in (old, filled))
        found.append(grown(had, method, size, keys, values, torch.zeros_like(was) if had is None else was, now))
    all_poison = poison.sum(1) + (0.0 if before is None else before.poison)
    return Memory(length, keys, values, filled, all_poison, tuple(found), permit), poison


def _room(
    before: Memory | None, k: Tensor, v: Tensor, length: int, is_growing: bool, is_recorded: bool
) -> tuple[Tensor, Tensor, tuple[Units, ...], WritePermit | None]:
    """Return keys and values with the old ones in place and room up to `length`: those of `before`, or copies."""
    if before is not None and is_growing and not is_recorded and _may_write(before) and before.keys.shape[1] >= length:
        assert before.permit is not None
        before.permit.length = length
        return before.keys, before.values, before.levels, before.permit
    room = length + length // 2 + SPARE_KEYS if is_growing else length
    keys, values = k.new_zeros(k.shape[0], room, k.shape[2]), v.new_zeros(v.shape[0], room, v.shape[2])
    levels: tuple[Units, ...] = ()
    if before is not None:
        there = min(before.length, before.keys.shape[1])
        keys[:, :there], values[:, :there] = before.keys[:, :there], before.values[:, :there]
        if not is_recorded:
            levels = tuple(Units(x.size, *(y.clone() for y in x[1:])) for x in before.levels)
    return keys, values, levels, None if is_recorded else WritePermit(length)


def _may_write(memory: Memory) -> bool:
    """Return whether no other call has continued from here, and the tensors are plain ones."""
    if memory.permit is None or memory.permit.length != memory.length:
        return False
    is_wrapped = torch.compiler.is_compiling() or in_transform()
    return not is_wrapped and (torch.is_inference_mode_enabled() or not memory.keys.is_inference())


def folded(state: State, layout: Layout) -> Memory:
    """Return the memory that a state holds."""

    def fold(x: Tensor | None) -> Tensor:
        assert x is not None
        return x.reshape(layout.rows, *x.shape[len(layout.batch) + 1 :])

    tensors = [fold(x) for x in state.moments]
    sizes = [1, *(settings.MIN_GROUP_BLOCKS << level for level in range(len(tensors) // 3 - 1))]
    levels = tuple(Units(size, *tensors[3 * i : 3 * i + 3]) for i, size in enumerate(sizes) if tensors)
    return Memory(
        state.length, fold(state.keys), fold(state.values), fold(state.filled), fold(state.poison), levels, state.permit
    )


def unfolded(memory: Memory, method: Multipole, layout: Layout, last_segment: Tensor | None, width: int) -> State:
    """Return the state that holds a memory, whose values have `width` numbers before padding."""
    return State(
        method, memory.length, poison=layout.unfold(memory.poison), keys=layout.unfold(memory.keys),
        values=layout.unfold(memory.values), filled=layout.unfold(memory.filled),
        moments=tuple(layout.unfold(x) for level in memory.levels for x in level[1:]), permit=memory.permit,
        value_width=width, segment=None if last_segment is None else layout.unfold(last_segment),
    )  # fmt: skip
