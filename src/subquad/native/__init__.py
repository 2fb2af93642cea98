"""Fused CPU kernels: features are made in the cache and multiplied there, so that little but the arithmetic is left.

The kernels are C++ behind a plain C interface (`src/call.h`). They are compiled when subquad is installed, if there is
a compiler, and choose the instruction set at run time. A call that they do not serve is computed by torch's own
operations, with the same meaning. SUBQUAD_NATIVE=0 turns them off; SUBQUAD_NATIVE=path loads another build.
"""

from typing import NamedTuple

from subquad.native.loader import FOUND

__all__ = ["Status", "available", "status"]


class Status(NamedTuple):
    """How calls on the CPU are computed."""

    available: bool
    instructions: str | None  # the instruction set in use
    reason: str

    def __str__(self) -> str:
        return f"native kernels, {self.instructions} ({self.reason})" if self.available else f"torch ({self.reason})"


def available() -> bool:
    """Return whether the kernels can be used. Everything asks here; tests replace this one function."""
    return FOUND.library is not None


def status() -> Status:
    """Return how calls on the CPU are computed, and why.

    Example:
        >>> found = status()
        >>> found.available == (found.instructions is not None)
        True
    """
    library, reason = FOUND
    return Status(library is not None, None if library is None else library.instructions, reason)
