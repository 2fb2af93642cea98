"""Sizes from the command line."""

from subquad_lab import UsageError


def positive(option: str, value: str | int) -> int:
    """Read a whole number above zero, or say which option was wrong."""
    if str(value).strip().isdecimal() and int(value) > 0:
        return int(value)
    raise UsageError(f"--{option}: expected whole numbers above 0, found {str(value)!r}")
