"""The memory of this machine."""

from subquad.methods.memory_limit import MEMORY_BYTES


def memory() -> int:
    """Return the physical memory of this machine in bytes."""
    return MEMORY_BYTES


def room() -> int:
    """Return the limit in bytes for one data set: a quarter of the memory, because loading copies the data."""
    return memory() // 4
