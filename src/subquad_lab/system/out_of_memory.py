"""Out of memory: one line that says what was being done, and what to make smaller.

Python and numpy raise MemoryError; torch raises RuntimeError with a text of its allocator, and OutOfMemoryError, a
RuntimeError too, on a GPU; the system reports ENOMEM. torch is not imported here, because `subquad --help` does not
wait for it.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from subquad_lab import RunError

# In lower case. The first is of torch's allocator on Linux, the second of the one on Windows, the last of cuBLAS.
PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "alloc_failed")


class OutOfMemory(RunError):
    """A command that needs more memory than there is."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception of Python, numpy or torch means that memory ran out.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    (True, True)
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, RunError):
        return False  # It has been explained.
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return type(error).__name__ == "OutOfMemoryError" or any(phrase in str(error).lower() for phrase in PHRASES)
    return isinstance(error, MemoryError)


@contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turn an exception about memory inside the block into OutOfMemory with this explanation."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory while {what}; {remedy}") from error
