"""Multipole: near and important keys exactly, all others by the moments of their blocks. For trained models.

Feature maps expand exp around zero, where the logits of a trained model are not. Blocks of keys are expanded around
their own centres. A block of n keys with centre mu has offsets k_j - mu; P are the main directions of the offsets,
c_j = P (k_j - mu) their coordinates, S the second moments of c, X the cross moments of c and v, u the mean value.
A scaled query q, with y = P q, sees the block's logits spread around

    m = q.mu    with variance    s = y' S y

and takes it for n keys of weight exp(m + s/2) and value u + X'y: exact if the logits were Gaussian. s is cut at 4.

Read one by one are: the first `sinks` keys, the last `window` keys before the query, what lies between them and the
last whole block, and the `top` blocks that are likely to hold the largest logit, m + sqrt(2 s ln n), chosen by each
query for itself, of equal ones the first. Only whole blocks of the past have moments, so nothing of the future enters.

Where there are many blocks they are put into groups of G, whose number grows like the square root of the length;
groups have moments too, of twice the rank, and only the best are opened and seen block by block.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, u units (blocks or
groups), r directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import log, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._kernel import cleaned
from subquad._recompute import Recomputed
from subquad.native import _multipole as native

WIDEST = 4.0  # Variances beyond it say little: a few keys stand out, and a Gaussian does not know them.
GROUPED = 1024  # far blocks from which on there are groups
LEAST = 16  # blocks of a group, at least
OPENED = 16  # groups that a query opens
ROUNDS = 2  # of subspace iteration
TILE = 64  # queries whose weights are made at once
NEVER = float("-inf")
MOST = 1 << 31  # of a setting


@dataclass(frozen=True)
class Multipole:
    """Exact near by, in the first keys and in the best blocks; the moments of the other blocks ("fast multipole").

    window: the last keys, in a causal call. sinks: the first keys. block: keys of a block. top: blocks that a query
    reads key by key. rank: directions in which a block's spread is known.

    Good where neighbouring keys are alike, as in a trained model; keys that are drawn at random have no blocks to speak
    of. Its gradient takes the choice of blocks and the directions of their spread for constants.

    >>> from subquad import attention
    >>> q, k, v = torch.randn(3, 1, 2, 300, 16).unbind()
    >>> exact = attention(q, k, v, is_causal=True)
    >>> float((attention(q, k, v, is_causal=True, method=Multipole()) - exact).norm() / exact.norm()) < 0.05
    True
    """

    window: int = 128
    sinks: int = 4
    block: int = 16
    top: int = 32
    rank: int = 2

    def __post_init__(self) -> None:
        least = {"window": 1, "sinks": 0, "block": 2, "top": 0, "rank": 0}
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or not least[field.name] <= value <= MOST:
                raise ValueError(
                    f"{field.name}: expected a whole number from {least[field.name]} to {MOST}, got {value!r}"
                )
        if self.rank >= self.block:
            raise ValueError(f"rank: {self.block} keys of a block span fewer than {self.block} directions around their "
                             f"centre, got {self.rank}")  # fmt: skip


class Units(NamedTuple):
    """Moments of blocks, or of groups of `size` blocks. The last axis of the first two, and the second last of the
    third, have room for more units than there are."""

    size: int
    keys: Tensor  # (b, 1 + r, d, u): the centre, and the directions
    spread: Tensor  # (b, r (r + 1) / 2, u): the second moments, those of two different directions doubled
    values: Tensor  # (b, 1 + r, u, e): the mean, and the cross moments

    @property
    def rank(self) -> int:
        return self.keys.shape[1] - 1

    @property
    def room(self) -> int:
        return self.keys.shape[-1]


def group_size(far: int) -> int:
    """Blocks in a group, for a query with so many far blocks; 1: there are no groups."""
    if far < GROUPED:
        return 1
    size = LEAST
    while OPENED * 4 * size * size <= far:
        size *= 2
    return size


def sizes_of(far: int) -> list[int]:
    """The sizes of all groups that queries with up to so many far blocks use."""
    return [LEAST << level for level in range((group_size(far) // LEAST).bit_length())]


def main_directions(offsets: Tensor, rank: int) -> Tensor:
    """(p, rank, d): orthonormal, spanning most of offsets (p, n, d); zeros where there are not so many directions."""
    found = _signs(rank, offsets.shape[1]).to(offsets) @ offsets
    for round in range(ROUNDS + 1):
        found = _orthonormal(found)
        if round < ROUNDS:
            found = (found @ offsets.mT) @ offsets
    return found


@lru_cache
def _signs(rank: int, count: int) -> Tensor:
    """Where the iteration begins: +1 and -1, drawn once and for all."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (rank, count), generator=draw, device="cpu").mul_(2).sub_(1)


def _orthonormal(rows: Tensor) -> Tensor:
    done: list[Tensor] = []
    for row in rows.unbind(-2):
        rest = row
        for other in done:
            rest = rest - (rest * other).sum(-1, keepdim=True) * other
        before, after = row.norm(dim=-1, keepdim=True), rest.norm(dim=-1, keepdim=True)
        done.append(torch.where(after > 1e-4 * before, rest / after, 0.0))
    return torch.stack(done, -2)


def moments(k: Tensor, v: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of units (p, n, d) and their values (p, n, e): (p, 1 + r, d), (p, r (r + 1) / 2), (p, 1 + r, e)."""
    centre, mean = k.mean(1, keepdim=True), v.mean(1, keepdim=True)
    if rank == 0:
        return cleaned(centre), k.new_zeros(len(k), 0), cleaned(mean)
    offsets = k - centre
    directions = main_directions(offsets.detach(), rank)  # constants in the backward
    places = offsets @ directions.mT  # (p, n, r)
    second, cross = places.mT @ places / k.shape[1], places.mT @ v / k.shape[1]
    rows, columns = torch.triu_indices(rank, rank, device=k.device)
    spread = second[:, rows, columns] * torch.where(rows == columns, 1.0, 2.0)
    # What overflows must not meet a weight of 0: rows that do not see the unit would be NaN.
    return cleaned(torch.cat([centre, directions], 1)), cleaned(spread), cleaned(torch.cat([mean, cross], 1))


def grown(units: Units | None, method: Multipole, size: int, k: Tensor, v: Tensor, old: Tensor, new: Tensor) -> Units:
    """Units of keys (b, m, d) and values (b, m, e), of which each head had (b,) `old` ones, and has `new` ones now.

    What was there is written beside, not copied, where there is room for it; so it is the caller's alone.
    """
    b, m, d = k.shape
    keys, rank = size * method.block, method.rank * (1 if size == 1 else 2)
    count = max(0, m - method.sinks) // keys
    if units is None or units.room < native.padded(count):
        room = native.padded(2 * count if units is not None else count)
        fresh = Units(size, k.new_zeros(b, 1 + rank, d, room), k.new_zeros(b, rank * (rank + 1) // 2, room),
                      k.new_zeros(b, 1 + rank, room, v.shape[-1]))  # fmt: skip
        if units is not None:
            fresh.keys[..., : units.room], fresh.spread[..., : units.room] = units.keys, units.spread
            fresh.values[:, :, : units.room] = units.values
        units = fresh
    place = torch.arange(count, device=k.device)
    head, unit = ((old[:, None] <= place) & (place < new[:, None])).nonzero(as_tuple=True)
    if len(head):
        tokens = method.sinks + unit[:, None] * keys + torch.arange(keys, device=k.device)
        centres, spread, means = moments(k[head[:, None], tokens], v[head[:, None], tokens], rank)
        units.keys[head, :, :, unit], units.spread[head, :, unit], units.values[head, :, unit] = centres, spread, means
    return units


def far_blocks(method: Multipole, sees: Tensor, is_causal: bool) -> Tensor:
    """How many blocks are far for a query that sees so many keys: whole ones, and before the window."""
    return (sees - method.sinks - (method.window if is_causal else 0)).clamp(min=0) // method.block


def meet(
    method: Multipole, q: Tensor, k: Tensor, v: Tensor, levels: Sequence[Units], sees: Tensor, far: Tensor,
    twin: bool = False,
) -> Tensor:  # fmt: skip
    """(b, g, n, e): scaled queries that see the first `sees` (b, n) keys, the first `far` (b, n) blocks as far ones.

    twin: in torch's operations, also where the kernels would serve.
    """
    if q.numel() == 0 or k.shape[1] == 0:  # Nobody asks, or there is nothing to see.
        nothing = q[..., :0].sum(-1, keepdim=True) + v[:, :0].sum((1, 2))[:, None, None, None]
        return nothing.expand(*q.shape[:3], v.shape[-1])
    inputs = [q, k, v, *(x for level in levels for x in level[1:])]
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if not (needed or twin) and native.serves(q, k, v):
        return native.meet(method, q, k, v, levels, sees, far, (GROUPED, LEAST, OPENED))
    sizes = [level.size for level in levels]

    def body(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *moments, sees, far = rest
        own = [Units(size, *moments[3 * i : 3 * i + 3]) for i, size in enumerate(sizes)]
        return (_tile(method, q, k, v, own, sees, far),)

    outputs = []
    for first in range(0, q.shape[2], TILE):
        rows = slice(first, first + TILE)
        tensors = (q[:, :, rows], *inputs[1:], sees[:, rows], far[:, rows])
        if needed:
            outputs.append(Recomputed.apply(body, len(inputs), *tensors)[0])  # type: ignore[no-untyped-call]
        else:
            outputs.append(body(*tensors)[0])
    return torch.cat(outputs, 2)


def _tile(
    method: Multipole, q: Tensor, k: Tensor, v: Tensor, levels: Sequence[Units], sees: Tensor, far: Tensor
) -> Tensor:
    """`meet` for a few queries, in torch's own operations: the slow twin of native/multipole.h."""
    b, g, n, _ = q.shape
    blocks, *groups = levels
    most = int(far.max())
    place = torch.arange(most, device=q.device)
    candidate = (place < far[..., None])[:, None].expand(-1, g, -1, -1)  # (b, g, n, u)
    sums: list[tuple[Tensor, Tensor, Tensor]] = []
    group = torch.tensor([[group_size(x) for x in row] for row in far.tolist()], device=q.device).reshape(b, n)
    for level in groups:
        count = most // level.size
        if count == 0 or not bool((group == level.size).any()):
            continue
        mine = group == level.size
        whole = torch.where(mine, far // level.size, 0)  # (b, n)
        mean, along, variance = _described(q, level, count)
        there = (torch.arange(count, device=q.device) < whole[..., None])[:, None].expand(-1, g, -1, -1)
        is_open = _best(_likely_most(mean, variance, level.size * method.block), there, OPENED)
        sums.append((_log_weights(mean, variance, level.size * method.block, there & ~is_open), along, level.values))
        in_open = F.pad(is_open.repeat_interleave(level.size, -1), (0, most - count * level.size))
        beyond = place >= (whole * level.size)[..., None]
        candidate = torch.where(mine[:, None, :, None], candidate & (in_open | beyond[:, None]), candidate)
    mean, along, variance = _described(q, blocks, most)
    chosen = _best(_likely_most(mean, variance, method.block), candidate, method.top)
    sums.append((_log_weights(mean, variance, method.block, candidate & ~chosen), along, blocks.values))

    # Keys that are read one by one: the first, the near ones, and the blocks that any of the rows chose.
    begin = method.sinks + far * method.block
    low = begin.amin(1, keepdim=True)  # (b, 1)
    span = max(0, int((sees - low).max()))
    near = low + torch.arange(span, device=q.device)  # (b, c)
    union = chosen.any(2).any(1)  # (b, u)
    width = int(union.sum(1).max()) if union.numel() else 0
    picked = union.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    of_blocks = method.sinks + (picked[..., None] * method.block + torch.arange(method.block, device=q.device)).flatten(
        1
    )
    first = torch.arange(min(method.sinks, k.shape[1]), device=q.device).expand(b, -1)
    tokens = torch.cat([first, near.clamp(max=max(0, k.shape[1] - 1)), of_blocks], 1)
    seen = torch.cat([
        (first[:, None] < sees[..., None])[:, None].expand(-1, g, -1, -1),
        ((near[:, None] >= begin[..., None]) & (near[:, None] < sees[..., None]))[:, None].expand(-1, g, -1, -1),
        chosen.gather(-1, picked[:, None, None].expand(-1, g, n, -1)).repeat_interleave(method.block, -1),
    ], -1)  # fmt: skip
    read_k, read_v = (x.gather(1, tokens[..., None].expand(-1, -1, x.shape[-1])) for x in (k, v))
    pairs = torch.where(seen, torch.einsum("bgnd,bcd->bgnc", q, read_k), NEVER)
    logs = [pairs, *(part for part, _, _ in sums)]
    top = torch.cat([x.detach() for x in logs], -1)
    top = F.pad(top, (1, 0), value=NEVER).amax(-1, keepdim=True)
    top = torch.where(top == NEVER, 0.0, top)
    weights = (pairs - top).exp()
    total, output = weights.sum(-1, keepdim=True), torch.einsum("bgnc,bce->bgne", weights, read_v)
    for part, along, means in sums:
        weights, count = (part - top).exp(), part.shape[-1]
        total = total + weights.sum(-1, keepdim=True)
        output = output + torch.einsum("bgnu,bue->bgne", weights, means[:, 0, :count])
        output = output + torch.einsum("bgnu,bgnru,brue->bgne", weights, along, means[:, 1:, :count])
    empty = total == 0
    return torch.where(empty, 0.0, output / torch.where(empty, 1.0, total))


def _described(q: Tensor, units: Units, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means (b, g, n, u), coordinates (b, g, n, r, u) and variances (b, g, n, u) of the logits of the first units."""
    keys, rank = units.keys[..., :count], units.rank
    mean = torch.einsum("bgnd,bdu->bgnu", q, keys[:, 0])
    along = torch.einsum("bgnd,brdu->bgnru", q, keys[:, 1:])
    rows, columns = torch.triu_indices(rank, rank, device=q.device)
    variance = (along[..., rows, :] * along[..., columns, :] * units.spread[:, None, None, :, :count]).sum(-2)
    return mean, along, variance.clamp(min=0.0)


def _likely_most(mean: Tensor, variance: Tensor, keys: int) -> Tensor:
    """The largest of so many Gaussian logits, about."""
    return mean.detach() + sqrt(2 * log(keys)) * variance.detach().sqrt()


def _log_weights(mean: Tensor, variance: Tensor, keys: int, seen: Tensor) -> Tensor:
    return torch.where(seen, mean + variance.clamp(max=WIDEST) / 2 + log(keys), NEVER)


def _best(scores: Tensor, candidate: Tensor, count: int) -> Tensor:
    """(b, g, n, u): the candidates with the highest scores, of equal ones the first."""
    order = torch.where(candidate, scores, NEVER).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(candidate).scatter(-1, order, True) & candidate
