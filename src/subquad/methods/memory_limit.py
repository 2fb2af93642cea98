"""Refuse a method whose features do not fit into memory, before anything is computed."""

import os
from math import log10

from subquad.methods.method import FeatureMethod

__all__ = ["MEMORY_BYTES"]

FLOAT_BYTES = 4
MAX_PAIR_DEGREE = 1000  # of a polynomial of the logits, which needs no features
UNKNOWN_MEMORY_BYTES = 1 << 40  # assumed where the system does not tell


def _memory_bytes() -> int:
    """Return the size of this machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return UNKNOWN_MEMORY_BYTES


MEMORY_BYTES = _memory_bytes()


def needs_features(method: FeatureMethod, form: str) -> bool:
    """Return whether a form makes features, or would take forever without them."""
    return form != "dense" or method.of_logits is None or method.degree > MAX_PAIR_DEGREE


def fits_memory(method: FeatureMethod, width: int, sums_per_feature: int) -> bool:
    """Return whether this machine has memory for the sums and the table of a method; arguments as `check_memory`."""
    return FLOAT_BYTES * method.size(width) * (sums_per_feature + width) <= MEMORY_BYTES


def check_memory(method: FeatureMethod, width: int, sums_per_feature: int) -> None:
    """Raise ValueError if the sums and the table of a method need more memory than this machine has.

    Args:
        method: The method.
        width: The width of queries and keys.
        sums_per_feature: The number of sums kept for each feature: value width + 1, for each head that is kept.
    """
    if fits_memory(method, width, sums_per_feature):
        return
    size = method.size(width)
    needed = FLOAT_BYTES * size * (sums_per_feature + width)
    raise ValueError(
        f"method: {method.label} has {_shown(size)} features at width {width}; with their sums they need "
        f"{_shown(needed)} bytes, but this machine has {_shown(MEMORY_BYTES)}. Use fewer features or a lower degree."
    )


def _shown(number: int) -> str:
    return f"{number:,}" if number < 10**15 else f"about 10^{int(number.bit_length() * log10(2))}"
