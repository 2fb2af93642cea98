"""The memory of this machine."""

import os


def memory() -> int:
    """Return the physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def room() -> int:
    """Return the limit in bytes for one data set: a quarter of the memory, because loading copies the data."""
    return memory() // 4
