"""Cache: keys and values of a batch in preallocated tensors, whole or in pages.

    whole    sequence s at position p is cache[rows[s], p]
    paged    sequence s at position p is cache[table[s, p // size], p mod size]

Axes: s sequences of the batch, m positions, g key heads, d width.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.integrations.flash.checks import check_integers
from subquad.integrations.flash.pages import places_in_pages


class Cache(NamedTuple):
    """The tensors of a cache, and where its sequences are."""

    keys: Tensor  # (rows or pages, capacity or page size, g, d)
    values: Tensor
    rows: Tensor  # (s,), of a whole cache
    table: Tensor | None  # (s, pages of a sequence)
    is_in_order: bool  # whether sequence s is row s

    @property
    def capacity(self) -> int:
        """How many positions a sequence has."""
        return self.keys.shape[1] * (1 if self.table is None else self.table.shape[1])

    def write(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write new keys and values (s, m, g, d) at positions (s, m), in place."""
        places = (self.rows[:, None], positions)
        if self.table is not None:
            places = places_in_pages(self.table, positions, self.keys)
        self.keys[places], self.values[places] = keys, values

    def read(self, spans: list[tuple[int, int]]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield sequences with their keys and values from a first to an end position; copy only what is in pages."""
        if self.is_in_order and len(set(spans)) == 1:
            whole = slice(0, len(spans)), slice(*spans[0])
            yield whole[0], self.keys[whole], self.values[whole]
            return
        for s, (start, end) in enumerate(spans):
            places: tuple[slice, slice] | tuple[Tensor, Tensor]
            if self.table is None:
                places = slice(int(self.rows[s]), int(self.rows[s]) + 1), slice(start, end)
            else:
                positions = torch.arange(start, end, device=self.keys.device)[None]
                places = places_in_pages(self.table[s : s + 1], positions, self.keys)
            yield slice(s, s + 1), self.keys[places], self.values[places]


def cache_of(keys: Tensor, values: Tensor, batch: int, rows: Tensor | None, table: Tensor | None) -> Cache:
    """Check the arguments of a cache and return them as one value."""
    if batch == 0:
        raise ValueError("q: expected at least one sequence, got a batch of 0")
    if table is not None:
        if rows is not None:
            raise ValueError("cache_batch_idx: expected None with block_table, which names the pages of each sequence")
        table = check_integers("block_table", table, (batch, None)).to(keys.device)
    is_in_order = rows is None and table is None
    rows = torch.arange(batch) if rows is None else check_integers("cache_batch_idx", rows, (batch,))
    if table is None and not 0 <= int(rows.min()) <= int(rows.max()) < len(keys):
        name = "q" if is_in_order else "cache_batch_idx"
        raise ValueError(f"{name}: expected sequences 0 to {len(keys) - 1}, as the cache has, got {rows.tolist()}")
    return Cache(keys, values, rows.to(keys.device), table, is_in_order)
