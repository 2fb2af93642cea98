"""The memory of this machine."""

import os


def memory() -> int:
    """Of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def room() -> int:
    """For data of one kind, in bytes: a quarter of the memory, as they are copied on their way."""
    return memory() // 4
