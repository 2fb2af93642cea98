"""Pattern: which pairs of a call are seen, as both the kernels and torch's operations read it.

A pair (i, j) of query head h is seen if j lies in one of the two ranges of row i, the key is not hidden, and, where
there is a layout of blocks, layout[h, i // query_block, j // key_block].

Axes: b batch and key heads, g query heads per key head, h query heads, n queries, m keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Pattern(NamedTuple):
    """The pairs that are seen."""

    bounds: Tensor  # (b or 1, 4, n), int32: first, first_end, near, near_end
    keep: Tensor | None = None  # (b, m), True = visible
    layout: Tensor | None = None  # (h or 1, query blocks, key blocks)
    query_block: int = 1
    key_block: int = 1
    key_heads: int = 1
    # For torch's operations: a window, in which query i stands at key i of a single sequence. Other patterns reach 0.
    reach: int = 0
    sinks: int = 0
    is_causal: bool = False

    def seen(self, rows: slice, keys: slice, heads: int, group: int) -> Tensor:
        """Return (b or 1, g or 1, n, m), True = seen, of some rows and keys; `heads` is b and `group` is g."""
        seen: Tensor
        place = torch.arange(keys.start, keys.stop, device=self.bounds.device)
        first, first_end, near, near_end = self.bounds[:, :, rows, None].unbind(1)  # (b or 1, n, 1)
        seen = ((first <= place) & (place < first_end)) | ((near <= place) & (place < near_end))
        if self.keep is not None:
            seen = seen & self.keep[:, None, keys]
        seen = seen[:, None]
        if self.layout is None:
            return seen
        row = torch.arange(rows.start, rows.stop, device=place.device)
        blocks = self.layout[:, row[:, None] // self.query_block, place // self.key_block]  # (h or 1, n, m)
        if len(blocks) > 1:
            of_group: Tensor = blocks.unflatten(0, (self.key_heads, group))
            blocks = of_group.repeat(heads // self.key_heads, 1, 1, 1)
        return seen & blocks

    def hull(self, rows: slice) -> list[tuple[int, int]]:
        """Return up to two ranges of keys that contain all that these rows see."""
        first, first_end, near, near_end = self.bounds[:, :, rows].unbind(1)
        ranges = []
        for low, high in ((first, first_end), (near, near_end)):
            some = high > low
            if bool(some.any()):
                ranges.append((int(low[some].min()), int(high[some].max())))
        if len(ranges) == 2 and ranges[1][0] <= ranges[0][1]:
            return [(min(ranges[0][0], ranges[1][0]), max(ranges[0][1], ranges[1][1]))]
        return ranges
