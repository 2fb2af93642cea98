"""Numbers as people read them."""

from math import inf, log10

__all__ = ["duration", "many", "mebibytes", "rounded", "short"]


def duration(seconds: float) -> str:
    """Return a time in seconds or milliseconds."""
    return f"{short(seconds)} s" if seconds >= 1 else f"{short(seconds * 1000)} ms"


def mebibytes(count: int) -> str:
    """Return a number of bytes in MiB."""
    return f"{count / 2**20:,.1f} MiB"


def short(number: float) -> str:
    """Return two digits, never as a power of ten."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def many(count: float) -> str:
    """Return a number, or its power of ten if it is large."""
    if count == inf:
        return "more than 10^300"
    return f"{int(count):,}" if count < 1e6 else f"10^{round(log10(count))}"


def rounded(length: int | None) -> int | None:
    """Return a predicted length with two digits."""
    return None if length is None else int(float(f"{length:.1e}"))
