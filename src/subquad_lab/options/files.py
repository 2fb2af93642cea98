"""Checks for files given on the command line."""

from collections.abc import Sequence

from subquad_lab import UsageError
from subquad_lab.system.text import warn


def refuse_files(argument: str, reasons: Sequence[ValueError], total: int) -> None:
    """Raise UsageError if some of `total` files could not be used; call it after the others are done.

    Args:
        argument: Name of the argument.
        reasons: One error for each unusable file, which names it.
        total: Number of files given.
    """
    if not reasons:
        return
    if total == 1:
        raise UsageError(reasons[0]) from reasons[0]
    for reason in reasons:
        warn(reason)
    raise UsageError(f"{argument}: {len(reasons)} of {total} files cannot be used")
