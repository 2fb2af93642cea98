"""Reading files that others may have written: regular files only, up to a size, and never blocking.

    open without waiting (a named pipe would wait for a writer)  ->  fstat what was opened  ->  read at most n + 1 bytes

What was opened is what is checked, so a file cannot be exchanged in between. A symbolic link counts as its target.
All refusals are an OSError whose `strerror` says why and whose `filename` is the path.
"""

import errno
import os
import stat
from io import BufferedReader
from os import PathLike

# Windows has neither of the last two.
FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def open_regular(path: str | PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; raise OSError for anything else, without blocking.

    Example:
        >>> with open_regular("/etc/hostname") as file:  # doctest: +SKIP
        ...     file.read()
    """
    try:
        handle = os.open(path, FLAGS)
    except ValueError:  # a zero byte, or a surrogate that no file name can have
        raise OSError(errno.EINVAL, "not a possible file name", os.fspath(path)) from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # A socket cannot be opened.
            raise _refusal(path, stat.S_IFSOCK) from None
        raise
    try:
        kind = stat.S_IFMT(os.fstat(handle).st_mode)
        if kind != stat.S_IFREG:
            raise _refusal(path, kind)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _refusal(path: str | PathLike[str], kind: int) -> OSError:
    return OSError(errno.EINVAL, f"expected a regular file, got {KINDS.get(kind, 'something else')}", os.fspath(path))


def read_regular(path: str | PathLike[str], max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file; raise OSError for anything else, or if it is larger than `max_bytes`.

    Without `max_bytes`, a file that is larger than the memory raises MemoryError.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "words.txt"
        >>> path.write_bytes(b"some words")
        10
        >>> read_regular(path, max_bytes=100)
        b'some words'
    """
    with open_regular(path) as file:
        if max_bytes is None:
            return file.read()
        size = os.fstat(file.fileno()).st_size
        content = file.read(max_bytes + 1) if size <= max_bytes else b""  # A file can grow, and /proc says 0.
    if max(size, len(content)) > max_bytes:
        raise OSError(
            errno.EFBIG, f"expected at most {max_bytes:,} bytes, got {max(size, len(content)):,}", os.fspath(path)
        )
    return content
