"""Key shifts: a constant vector that is subtracted from all keys, as part of a method's value."""

from math import isfinite
from typing import cast

from torch import Tensor

from subquad.methods.method import Shift


def as_shift(shift: object) -> Shift | None:
    """Return the vector as tuples of numbers, so that methods stay values: comparable, hashable, of no device."""
    if shift is None:
        return None
    rows = shift.tolist() if isinstance(shift, Tensor) else shift
    if isinstance(rows, list | tuple):
        nested = [row if isinstance(row, list | tuple) else [row] for row in rows]
        numbers = [number for row in nested for number in row]
        flat = all(not isinstance(row, list | tuple) for row in rows)
        regular = flat or len({len(row) for row in nested}) == 1
        if regular and all(isinstance(number, int | float) and isfinite(number) for number in numbers):
            return tuple(rows) if flat else cast(Shift, tuple(map(tuple, rows)))
    raise ValueError(f"key_shift: expected finite numbers of shape (width,) or (heads, width), got {shift!r}")


def shift_suffix(shift: Shift | None) -> str:
    """Return what a label says about a shift."""
    return "" if shift is None else ", keys centered"
