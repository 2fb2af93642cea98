"""Which keys each query of a window sees: two ranges, first keys and near keys.

    query i sees    first_i <= j < first_end_i    and    near_i <= j < near_end_i,    in this order, without overlap

Hidden keys inside a range are left out by the mask of keys. Sinks are the first `sinks` visible keys of a sequence or
of a packed segment; the range of the first keys ends behind the last of them.

Axes: b batch and key heads (1 if all are the same), n queries, m keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.methods.window import Window


class Places(NamedTuple):
    """Where the queries of a call stand among its keys."""

    queries: int
    keys: int
    first: int  # place of the first query
    is_causal: bool
    prefix: int = 0  # keys before the first place: sinks from a state, whose own places are far before
    keep: Tensor | None = None  # (b, m), True = visible
    segments: Tensor | None = None  # (b, m), numbered in order


def bounds_of(method: Window, places: Places, device: torch.device) -> Tensor:
    """Return (b, 4, n), int32: first, first_end, near and near_end of each query."""
    n, m = places.queries, places.keys
    row = torch.arange(places.first, places.first + n, device=device)[None]  # (1, n): the place of each query
    begin, end = torch.zeros_like(row), torch.full_like(row, m)  # of the query's sequence
    if places.segments is not None:
        own = places.segments.gather(1, row.clamp(0, max(0, m - 1)).expand(places.segments.shape[0], -1))
        begin, end = (torch.searchsorted(places.segments, own, right=right) for right in (False, True))
    near = torch.maximum(row - (method.reach - 1), torch.maximum(begin, torch.full_like(row, places.prefix)))
    near_end = torch.minimum(row + (1 if places.is_causal else method.reach), end).clamp(min=0)
    sinks_end = _end_of_sinks(method.sinks, places, begin, end) if method.sinks or places.prefix else begin
    if not places.is_causal:  # Sinks may lie behind the window: one range holds both.
        near_end = torch.where(near <= sinks_end, torch.maximum(near_end, sinks_end), near_end)
    sinks_end = torch.minimum(torch.minimum(sinks_end, near), near_end)
    parts = (begin, torch.maximum(begin, sinks_end), torch.minimum(near, near_end), near_end)
    return torch.stack(torch.broadcast_tensors(*parts), 1).to(torch.int32)


def _end_of_sinks(sinks: int, places: Places, begin: Tensor, end: Tensor) -> Tensor:
    """Return (b, n): the place behind the last sink of each query's sequence."""
    if places.keep is None:
        return torch.minimum(begin + sinks, end)
    counts = places.keep.cumsum(1)  # (b, m): visible keys up to each
    if places.segments is None:
        return torch.minimum((counts < sinks).sum(1, keepdim=True) + 1, end)
    before = torch.nn.functional.pad(counts, (1, 0)).gather(1, begin)
    return torch.minimum(torch.searchsorted(counts, before + sinks) + 1, end)
