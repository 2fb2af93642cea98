"""Queries meet keys and the moments of blocks, with torch's operations: the slow twin of native/src/multipole.h.

Axes: b batch and key heads, g query heads per key head, n queries, d width, e value width, u units (blocks or
segments), t keys of a block, c keys that are read one by one.
"""

from math import log, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.sums import NEVER
from subquad._engines.finite import cleaned
from subquad._engines.multipole.memory import Memory, far_segments, rows_of
from subquad._engines.multipole.records import Blocks, Roots, unpacked, unpacked_roots
from subquad._engines.recompute import Recomputed
from subquad.methods import multipole as settings
from subquad.methods.multipole import BLOCKS_PER_SEGMENT as FAN
from subquad.methods.multipole import Multipole

TILE_ROWS = 64  # queries whose weights are made at once


def meet(method: Multipole, q: Tensor, memory: Memory, sees: Tensor) -> Tensor:
    """Return (b, g, n, e): scaled queries (b, g, n, d) that see the first `sees` (b, n) keys."""
    if q.shape[:3].numel() == 0 or memory.length == 0:  # no query, or nothing to see
        nothing = q[..., :0].sum(-1, keepdim=True) + memory.raw_values[:, :0].sum((1, 2))[:, None, None, None]
        return nothing.expand(*q.shape[:3], memory.raw_values.shape[-1])
    record = memory.record(method)
    records = torch.cat(memory.pages or (q.new_zeros(len(q), 0, record.size),), 1)
    blocks, roots = unpacked(records, record), unpacked_roots(memory.roots, memory.segments, record.d, record.e)
    keys = (rows_of(memory.sink_keys), memory.sink_values, rows_of(memory.raw_keys), memory.raw_values)
    inputs, constants = (*keys, *blocks[:5], *roots), (memory.base, *blocks[5:])

    def body(q: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        base, look, scale, sees = rest[12:]
        near, roots = Near._make((*rest[:4], base)), Roots._make(rest[9:12])
        return (_tile(method, q, View(near, Blocks._make((*rest[4:9], look, scale)), roots), sees),)

    outputs = []
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, *inputs))
    for first in range(0, q.shape[2], TILE_ROWS):
        rows = slice(first, first + TILE_ROWS)
        tensors = (q[:, :, rows], *inputs, *constants, sees[:, rows])
        if is_recorded:
            outputs.append(Recomputed.apply(body, 1 + len(inputs), *tensors)[0])  # type: ignore[no-untyped-call]
        else:
            outputs.append(body(*tensors)[0])
    return torch.cat(outputs, 2)


class Near(NamedTuple):
    """The keys that are not in finished segments: sinks, and raw keys after the first `base` (b,) segments."""

    sink_keys: Tensor
    sink_values: Tensor
    raw_keys: Tensor
    raw_values: Tensor
    base: Tensor


class View(NamedTuple):
    near: Near
    blocks: Blocks
    roots: Roots


class Part(NamedTuple):
    """What rows see: units by their moments, or keys."""

    log_weights: Tensor  # (b, g, n, u)
    values: Tensor  # (b, u, e); or of each row (b, g, n, u, e)


def _tile(method: Multipole, q: Tensor, view: View, sees: Tensor) -> Tensor:
    """Compute `meet` for a few queries."""
    far = far_segments(method, sees)
    candidate, parts = _open_segments(method, q, view.roots, far)
    mean, variance = _described(q, view.blocks.centers, view.blocks.radius)
    chosen = _chosen(method, q, view.blocks, mean, variance, candidate)
    parts.append(Part(_log_weights(mean, variance, method.block, candidate & ~chosen), view.blocks.means))
    parts.append(_read_near(method, q, view.near, sees, far))
    parts.append(_read_blocks(q, view.blocks, chosen, method.top))
    return _combined(parts)


def _open_segments(method: Multipole, q: Tensor, roots: Roots, far: Tensor) -> tuple[Tensor, list[Part]]:
    """Return the blocks (b, g, n, u) that each row considers, and the segments that it sees by their moments."""
    group, count = q.shape[1], roots.radius.shape[1]
    seen = (torch.arange(count, device=q.device) < far[..., None])[:, None].expand(-1, group, -1, -1)
    grouped = (far >= settings.GROUPED_FROM_SEGMENTS)[:, None, :, None]
    if not bool(grouped.any()):
        return seen.repeat_interleave(FAN, -1), []
    mean, variance = _described(q, roots.centers, roots.radius)
    is_open = _best(_likely_most(mean, variance, method.segment), seen, settings.OPENED_SEGMENTS) | ~grouped
    part = Part(_log_weights(mean, variance, method.segment, seen & ~is_open), roots.means)
    return (seen & is_open).repeat_interleave(FAN, -1), [part]


@torch.no_grad()
def _chosen(method: Multipole, q: Tensor, blocks: Blocks, mean: Tensor, variance: Tensor, candidate: Tensor) -> Tensor:
    """Return (b, g, n, u): the blocks that each row reads."""
    looked = _best(_likely_most(mean, variance, method.block), candidate, method.looks)
    scale = q.abs().amax(-1, keepdim=True) / 127
    coarse = cleaned(q * torch.where(scale > 0, 1 / scale, 0.0)).round()
    above = torch.einsum("bgnd,butd->bgnut", coarse, blocks.look).amax(-1)
    return _best(mean + above * (scale * blocks.scale[:, None, None]), looked, method.top)


def _read_near(method: Multipole, q: Tensor, near: Near, sees: Tensor, far: Tensor) -> Part:
    """Return the sinks and the keys after the finished segments, (b, g, n, c)."""
    first = torch.arange(near.sink_keys.shape[1], device=q.device)
    is_first = first < sees.clamp(max=method.sinks)[..., None]  # (b, n, c)
    low = far.amin(1, keepdim=True) * method.segment  # (b, 1)
    width = max(0, int((sees - method.sinks - low).max()))
    place = low + torch.arange(width, device=q.device)  # (b, c), counted after the sinks
    is_near = (place[:, None] >= (far * method.segment)[..., None]) & (
        place[:, None] < (sees - method.sinks)[..., None]
    )
    token = (place - near.base[:, None] * method.segment).clamp(max=max(0, near.raw_keys.shape[1] - 1))[..., None]
    keys, values = (
        torch.cat([own, raw.gather(1, token.expand(-1, -1, raw.shape[-1]))], 1)
        for own, raw in ((near.sink_keys, near.raw_keys), (near.sink_values, near.raw_values))
    )
    seen = torch.cat([is_first, is_near], -1)[:, None]
    return Part(torch.where(seen, torch.einsum("bgnd,bcd->bgnc", q, keys), NEVER), values)


def _read_blocks(q: Tensor, blocks: Blocks, chosen: Tensor, top: int) -> Part:
    """Return the keys of the blocks that each row chose, (b, g, n, c).

    Each row has its own, in the order of time: what other rows chose must not change the order of its sums.
    """
    picked = chosen.int().argsort(dim=-1, descending=True, stable=True)[..., :top]  # (b, g, n, top)
    seen = chosen.gather(-1, picked).repeat_interleave(blocks.keys.shape[2], -1)
    head = torch.arange(len(q), device=q.device)[:, None, None, None]
    keys, values = (x[head, picked].flatten(3, 4) for x in (blocks.keys, blocks.values))
    return Part(torch.where(seen, torch.einsum("bgnd,bgncd->bgnc", q, keys), NEVER), values)


def _combined(parts: list[Part]) -> Tensor:
    """Return (b, g, n, e)."""
    top = torch.cat([part.log_weights.detach() for part in parts], -1)
    top = F.pad(top, (1, 0), value=NEVER).amax(-1, keepdim=True)
    top = torch.where(top == NEVER, 0.0, top)
    total: Tensor | float = 0.0
    output: Tensor | float = 0.0
    for log_weights, values in parts:
        weights = (log_weights - top).exp()
        total = total + weights.sum(-1, keepdim=True)
        output = output + torch.einsum("bgnc,bce->bgne" if values.dim() == 3 else "bgnc,bgnce->bgne", weights, values)
    assert isinstance(total, Tensor)
    empty = total == 0
    return torch.where(empty, 0.0, output / torch.where(empty, 1.0, total))


def _described(q: Tensor, centers: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances (b, g, n, u) of the logits of units."""
    squares = q.square().sum(-1, keepdim=True) * radius.square()[:, None, None]
    return torch.einsum("bgnd,bud->bgnu", q, centers), squares


def _likely_most(mean: Tensor, variance: Tensor, keys: int) -> Tensor:
    """Return the likely maximum of `keys` Gaussian logits."""
    return mean.detach() + sqrt(2 * log(keys)) * variance.detach().sqrt()


def _log_weights(mean: Tensor, variance: Tensor, keys: int, seen: Tensor) -> Tensor:
    return torch.where(seen, mean + variance.clamp(max=settings.MAX_VARIANCE) / 2 + log(keys), NEVER)


def _best(scores: Tensor, candidate: Tensor, count: int) -> Tensor:
    """Return (b, g, n, u): the candidates with the highest scores, ties going to the first."""
    order = torch.where(candidate, scores, NEVER).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(candidate).scatter(-1, order, True) & candidate
