"""The cost per query of `Multipole`, so that other rules can be compared at equal cost.

The unit is one key read, 2 (d + e) operations: a score and a weighted value. A product with one summary vector of a
block reads no value and costs half of that, as d = e in the models used here.
"""

from functools import lru_cache

import torch
from torch import Tensor

from subquad import Multipole
from subquad.planning.multipole_cost import met
from subquad.planning.shape import Shape

WIDTH = 64  # of a head; the count of keys does not depend on it


def total_work(method: Multipole, length: int) -> int:
    """Return the number of keys and pseudo-keys read by all queries of one head in a causal call.

    This is the only function that gets Multipole's cost from the library.
    """
    return met(method, Shape(length, length, WIDTH, WIDTH, is_causal=True))


def share_of_exact(method: Multipole, length: int) -> float:
    """Return Multipole's cost as a fraction of that of exact causal attention."""
    return total_work(method, length) / (length * (length + 1) / 2)


def budget(method: Multipole, positions: Tensor) -> Tensor:
    """Return Multipole's cost for the query at each position, which attends to `position + 1` keys."""
    length = 1 << int(positions.max() + 1).bit_length()  # rounded up, so that few tables are computed
    return _table(method, length)[positions]


@lru_cache
def _table(method: Multipole, length: int) -> Tensor:
    return torch.tensor([total_work(method, seen) for seen in range(length + 1)]).diff()
