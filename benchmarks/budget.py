"""The work that one query may do: what `Multipole` does for it, so that other rules can be compared at equal work.

The unit is one key read, 2 (d + e) operations: a score and a share of a value. A product with one summary vector of a
block reads no value and costs half of it, as d = e in the models that are measured here.
"""

from functools import lru_cache

import torch
from torch import Tensor

from subquad import Multipole
from subquad.planning.multipole_cost import met
from subquad.planning.shape import Shape

WIDTH = 64  # of a head; the count of keys does not depend on it


def total_work(method: Multipole, length: int) -> int:
    """Return the keys and pseudo-keys that all queries of one head meet in a causal call.

    This is the only function that asks the library for Multipole's work.
    """
    return met(method, Shape(length, length, WIDTH, WIDTH, is_causal=True))


def share_of_exact(method: Multipole, length: int) -> float:
    """Return Multipole's work as a share of that of exact causal attention."""
    return total_work(method, length) / (length * (length + 1) / 2)


def budget(method: Multipole, positions: Tensor) -> Tensor:
    """Return the work that Multipole does for the query at each position, which sees `position + 1` keys."""
    length = 1 << int(positions.max() + 1).bit_length()  # rounded up, so that few tables are computed
    return _table(method, length)[positions]


@lru_cache
def _table(method: Multipole, length: int) -> Tensor:
    return torch.tensor([total_work(method, seen) for seen in range(length + 1)]).diff()
