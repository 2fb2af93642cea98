"""Paged keys: where a block table puts the tokens of a sequence.

    position p of sequence s    is token p mod size    of page table[s, p // size]

Axes: s sequences, m positions.
"""

import torch
from torch import Tensor


def places_in_pages(table: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the page and the place in it of each position, (s, m) each: an index of the cache.

    Args:
        table: Pages of each sequence, (s, pages of a sequence).
        positions: (s, m).
        cache: (pages, page size, ...).
    """
    pages, size = cache.shape[:2]
    longest = int(positions.max()) + 1 if positions.numel() else 0
    if longest > table.shape[1] * size:
        raise ValueError(
            f"block_table: expected pages for {longest} keys, got {table.shape[1]} pages of {size}; add columns to it"
        )
    found = table.gather(1, torch.div(positions, size, rounding_mode="floor"))
    if bool(((found < 0) | (found >= pages)).any()):
        raise ValueError(f"block_table: expected numbers from 0 to {pages - 1}, got {found.min()} to {found.max()}")
    return found, positions % size
