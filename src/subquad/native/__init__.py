"""Fused CPU kernels: features are made in the cache and multiplied there, so that the arithmetic is all that is left.

The kernels are C++ behind a plain C interface (`call.h`). They are compiled when subquad is installed where there is a
compiler, and chosen at run time by the machine's instructions. A call that they do not serve goes the way of torch's
own operations, whose meaning is the same. SUBQUAD_NATIVE=0 turns them off.
"""

from typing import NamedTuple

from subquad.native._library import FOUND


class Status(NamedTuple):
    """Which path calls take on the CPU."""

    available: bool
    instructions: str | None  # the instruction set that was chosen
    reason: str

    def __str__(self) -> str:
        return f"native kernels, {self.instructions} ({self.reason})" if self.available else f"torch ({self.reason})"


def status() -> Status:
    """Which path calls take on the CPU, and why.

    >>> path = status()
    >>> path.available == (path.instructions is not None)
    True
    """
    library, reason = FOUND
    return Status(library is not None, None if library is None else library.instructions, reason)
