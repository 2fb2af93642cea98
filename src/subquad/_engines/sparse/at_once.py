"""Sparse attention by torch's operations without looking at numbers: for recorded programs, and for shapes alone.

torch.export, torch.compile and torch.jit.trace record a program before bounds and sizes are known, so tiles cannot
choose their keys by them. The rows of a plain window are computed in tiles of fixed size, all at once, each with the
keys that its window can reach and with the sinks; any other pattern meets all keys.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, s tiles, t rows of a
tile, w keys of a tile.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._engines.finite import cleaned, poison_of
from subquad._engines.sparse.by_torch import met
from subquad._engines.sparse.pattern import Pattern

BAND_ROWS = 128


def attend_at_once(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, softcap: float | None, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output (b, g, n, e) and the level (b, g, n); arguments as for `attend_by_torch`."""
    row_poison, key_poison = poison_of(q), poison_of(k, v)
    q, k, v = cleaned(q), cleaned(k), cleaned(v)
    if not pattern.reach:
        seen = pattern.seen(slice(0, q.shape[2]), slice(0, k.shape[1]), *q.shape[:2])
        return met(q, k[:, None], v[:, None], seen, row_poison, key_poison[:, None, None], softcap, sink_logits)
    return _banded(q, k, v, pattern, row_poison, key_poison, softcap, sink_logits)


def _banded(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, row_poison: Tensor, key_poison: Tensor, softcap: float | None,
    sink_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, _, n, _ = q.shape
    m, reach, device = k.shape[1], pattern.reach, q.device
    tiles = (n + 2 * BAND_ROWS - 1) // BAND_ROWS  # One in excess: sizes of 1 would be special to torch.
    missing = tiles * BAND_ROWS - n
    cut = (tiles, BAND_ROWS)
    q = F.pad(q, (0, 0, 0, missing)).unflatten(2, cut)
    row_poison = F.pad(row_poison, (0, missing)).unflatten(2, cut)
    bounds = F.pad(pattern.bounds, (0, missing)).unflatten(2, cut)[..., None]  # Rows in excess see nothing.
    start = torch.arange(tiles, device=device)[:, None] * BAND_ROWS - (reach - 1)
    width = BAND_ROWS + (reach - 1) * (1 if pattern.is_causal else 2)
    places = (start + torch.arange(width, device=device)).expand(b, -1, -1)  # (b, s, w)
    fresh = torch.ones_like(places, dtype=torch.bool)
    if pattern.sinks:
        sinks = _sink_places(pattern.sinks, pattern.keep, b, device)[:, None].expand(-1, tiles, -1)
        places = torch.cat([sinks, places], -1)
        fresh = torch.cat([(sinks < start) | (sinks >= start + width), fresh], -1)
    first, first_end, near, near_end = bounds.unbind(1)  # (b or 1, s, t, 1)
    at = places[:, :, None]
    seen = (((first <= at) & (at < first_end)) | ((near <= at) & (at < near_end))) & fresh[:, :, None]
    index = places.clamp(min=0).clamp(max=m - 1).flatten(1)  # (b, s*w)

    def picked(x: Tensor) -> Tensor:
        of = index[..., None].expand(-1, -1, x.shape[-1])
        found: Tensor = x.gather(1, of).unflatten(1, (tiles, places.shape[-1]))
        return found

    if pattern.keep is not None:
        seen = seen & picked(pattern.keep[..., None])[..., 0][:, :, None]
    poison = picked(key_poison[..., None])[..., 0][:, None, :, None]  # (b, 1, s, 1, w)
    found = met(q, picked(k)[:, None], picked(v)[:, None], seen[:, None], row_poison, poison, softcap, sink_logits)
    output, level = (x.flatten(2, 3).index_select(2, torch.arange(n, device=device)) for x in found)
    return output, level


def _sink_places(count: int, keep: Tensor | None, b: int, device: torch.device) -> Tensor:
    """Return (b, count): the places of the first visible keys; m where there are fewer."""
    number = torch.arange(count, device=device)
    if keep is None:
        return number.expand(b, -1)
    return (keep.cumsum(1)[:, None] <= number[:, None]).sum(-1)
