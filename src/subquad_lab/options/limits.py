"""Checks for sizes given on the command line."""

from subquad_lab import UsageError


def positive(option: str, value: str | int) -> int:
    """Return a positive integer, or raise an error that names the option."""
    if str(value).strip().isdecimal() and int(value) > 0:
        return int(value)
    raise UsageError(f"--{option}: expected positive integers, got {str(value)!r}")
