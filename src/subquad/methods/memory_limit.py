"""Refuse a method whose features do not fit into memory, before anything is computed."""

import os
from functools import lru_cache

from subquad.methods.method import FeatureMethod

FLOAT_BYTES = 4
UNKNOWN_MEMORY_BYTES = 1 << 40  # assumed where the system does not tell


def check_memory(method: FeatureMethod, width: int, sums_per_feature: int) -> None:
    """Raise ValueError if the sums and the table of a method need more memory than this machine has.

    Args:
        method: The method.
        width: The width of queries and keys.
        sums_per_feature: How many sums are kept for each feature: (value width + 1) for each batch and head.
    """
    size = method.size(width)
    needed = FLOAT_BYTES * size * (sums_per_feature + width)
    if needed <= memory_bytes():
        return
    raise ValueError(
        f"method: {method.label} has {_shown(size)} features at width {width}; with their sums they need "
        f"{_shown(needed)} bytes, but this machine has {_shown(memory_bytes())}. Use fewer features or a lower degree."
    )


@lru_cache(maxsize=1)
def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return UNKNOWN_MEMORY_BYTES


def _shown(number: int) -> str:
    return f"{number:,}" if number < 10**15 else f"about 10^{len(str(number)) - 1}"
