"""Moments of blocks of keys, and of groups of blocks: centers, main directions, spread and values.

The mathematics is in `methods/multipole.py`.

Axes: b batch and key heads, m keys, d width, e value width, u units (blocks or groups), r directions, p units that are
made at once, n keys of a unit.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from subquad._engines.finite import cleaned
from subquad.methods.multipole import Multipole
from subquad.native.calls import PADDING, padded

ITERATIONS = 2  # of the subspace iteration


class Units(NamedTuple):
    """Moments of blocks, or of groups of `size` blocks, with room for more units than there are."""

    size: int
    keys: Tensor  # (b, 1 + r, d, u): the center, and the directions
    spread: Tensor  # (b, r (r + 1) / 2, u): the second moments, those of two different directions doubled
    values: Tensor  # (b, 1 + r, u, e): the mean, and the cross moments

    @property
    def rank(self) -> int:
        return self.keys.shape[1] - 1

    @property
    def room(self) -> int:
        return self.keys.shape[-1]


def main_directions(offsets: Tensor, rank: int) -> Tensor:
    """Return (p, rank, d): orthonormal, spanning most of offsets (p, n, d); zeros where they span fewer directions."""
    found = _signs(rank, offsets.shape[1]).to(offsets) @ offsets
    for iteration in range(ITERATIONS + 1):
        found = _orthonormal(found)
        if iteration < ITERATIONS:
            found = (found @ offsets.mT) @ offsets
    return found


@lru_cache
def _signs(rank: int, count: int) -> Tensor:
    """Return the start of the iteration: +1 and -1, always the same draw."""
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
    """Return (p, 1 + r, d), (p, r (r + 1) / 2) and (p, 1 + r, e) of units (p, n, d) and their values (p, n, e)."""
    center, mean = k.mean(1, keepdim=True), v.mean(1, keepdim=True)
    if rank == 0:
        return cleaned(center), k.new_zeros(len(k), 0), cleaned(mean)
    offsets = k - center
    directions = main_directions(offsets.detach(), rank)  # constants in the backward pass
    places = offsets @ directions.mT  # (p, n, r)
    second, cross = places.mT @ places / k.shape[1], places.mT @ v / k.shape[1]
    rows, columns = torch.triu_indices(rank, rank, device=k.device)
    spread = second[:, rows, columns] * torch.where(rows == columns, 1.0, 2.0)
    # An overflow must not meet a weight of 0: rows that do not see the unit would be NaN.
    return cleaned(torch.cat([center, directions], 1)), cleaned(spread), cleaned(torch.cat([mean, cross], 1))


def grown(units: Units | None, method: Multipole, size: int, k: Tensor, v: Tensor, old: Tensor, new: Tensor) -> Units:
    """Return the units of keys (b, m, d) and values (b, m, e), of which each head had (b,) `old` and now has `new`.

    New units are written beside the old ones where there is room; so `units` must be the caller's alone.
    """
    b, m, d = k.shape
    keys, rank = size * method.block, method.rank * (1 if size == 1 else 2)
    count = max(0, m - method.sinks) // keys
    if units is None or units.room < room_for(count):
        room = room_for(2 * count if units is not None else count)
        fresh = Units(
            size, k.new_zeros(b, 1 + rank, d, room), k.new_zeros(b, rank * (rank + 1) // 2, room),
            k.new_zeros(b, 1 + rank, room, v.shape[-1]),
        )  # fmt: skip
        if units is not None:
            fresh.keys[..., : units.room], fresh.spread[..., : units.room] = units.keys, units.spread
            fresh.values[:, :, : units.room] = units.values
        units = fresh
    place = torch.arange(count, device=k.device)
    head, unit = ((old[:, None] <= place) & (place < new[:, None])).nonzero(as_tuple=True)
    if len(head):
        tokens = method.sinks + unit[:, None] * keys + torch.arange(keys, device=k.device)
        centers, spread, means = moments(k[head[:, None], tokens], v[head[:, None], tokens], rank)
        units.keys[head, :, :, unit], units.spread[head, :, unit], units.values[head, :, unit] = centers, spread, means
    return units


def room_for(count: int) -> int:
    """Return room for `count` units: whole vectors, and one more that the kernels may read beyond them."""
    return padded(count) + PADDING
