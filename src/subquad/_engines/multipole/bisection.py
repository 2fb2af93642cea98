"""Finish segments with torch's operations: the slow twin of native/src/segments.h.

A segment is cut in two along the main direction of its keys, and so are its halves, until blocks of similar keys are
left. Both halves keep their keys in the order of time.

Axes: p segments, or parts of them, n keys, d width, e value width, u units.
"""

import torch
from torch import Tensor

from subquad._engines.finite import cleaned
from subquad._engines.multipole.records import Blocks, Roots
from subquad.native.calls import ROUNDS

TINY = 1e-20


def main_direction(offsets: Tensor) -> Tensor:
    """Return (p, d, 1): about the direction in which offsets (p, n, d) spread most."""
    signs = torch.ones(offsets.shape[1], dtype=offsets.dtype, device=offsets.device)
    signs[1::2] = -1
    found = _normalized(offsets.mT @ signs[:, None])
    for _ in range(ROUNDS):
        found = _normalized(offsets.mT @ (offsets @ found))
    return found


def _normalized(direction: Tensor) -> Tensor:
    return cleaned(direction / direction.norm(dim=1, keepdim=True).clamp(min=TINY))


@torch.no_grad()
def like_order(k: Tensor, block: int) -> Tensor:
    """Return (p, n): where to find the keys of segments (p, n, d) so that each `block` of them are similar."""
    p, n, d = k.shape
    order = torch.arange(n, device=k.device).expand(p, n)
    size = n
    while size > block:
        own = k.gather(1, order[..., None].expand(-1, -1, d)).reshape(p * n // size, size, d)
        offsets = own - own.mean(1, keepdim=True)
        places = cleaned((offsets @ main_direction(offsets))[..., 0])
        ranked = places.argsort(dim=1, stable=True)
        halves = torch.cat([part.sort(1).values for part in ranked.split(size // 2, 1)], 1)
        order = order.reshape(-1, size).gather(1, halves).reshape(p, n)
        size //= 2
    return order


def finished(k: Tensor, v: Tensor, block: int) -> tuple[Blocks, Roots]:
    """Return the blocks and the roots of segments (p, n, d) with values (p, n, e): p heads with one segment each."""
    order = like_order(k.detach(), block)[..., None]
    k, v = k.gather(1, order.expand(-1, -1, k.shape[-1])), v.gather(1, order.expand(-1, -1, v.shape[-1]))
    keys, values = k.unflatten(1, (-1, block)), v.unflatten(1, (-1, block))
    centers, means, radius = _moments(keys, values)
    with torch.no_grad():
        offsets = keys - centers[:, :, None]
        scale = cleaned(offsets.abs().amax((2, 3)) / 127)
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        look = cleaned(offsets * inverse[..., None, None]).round()
    whole = _moments(k[:, None], v[:, None])
    return Blocks(keys, values, centers, means, radius, look, scale), Roots(*whole)


def _moments(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return centers (p, u, d), mean values (p, u, e) and radii (p, u) of keys (p, u, n, d) and values (p, u, n, e).

    An overflow becomes 0: an infinity would be NaN in the rows that do not see the unit.
    """
    centers = cleaned(keys.mean(2))
    squares = cleaned((keys - centers[:, :, None]).square().mean((2, 3)))
    is_point = squares == 0  # The root has no derivative there; the variance has 0.
    return centers, cleaned(values.mean(2)), torch.where(is_point, 0.0, torch.where(is_point, 1.0, squares).sqrt())
