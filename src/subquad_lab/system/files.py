"""Atomic files: complete or absent, even after a crash or on a full disk.

A file is written under a random hidden name next to its final one, synced to disk and renamed:

    .report.html.4f1c9a0b7d2e8356  ->  report.html

The temporary file is created exclusively, and symbolic links are not followed: a link that someone has put under the
temporary or the final name is replaced or refused, and the file that it points to stays as it is.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from subquad_lab import UsageError
from subquad_lab.system.regular_file import read_regular

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # missing on Windows
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}")


MAX_JSON_BYTES = 1 << 26


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: the old content stays until the new one is complete."""
    with made_whole(path) as temporary:
        write_synced(temporary, content)


@contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """Yield an empty temporary file next to `path`; at the end, sync it to disk and rename it to `path`.

    Raises:
        OSError: If that fails; its `filename` is `path`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666))  # The umask applies.
        try:
            yield temporary
            handle = os.open(temporary, os.O_RDONLY | NO_LINK)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:  # A write to a full disk names no file, and the temporary name means nothing to users.
        error.filename = os.fspath(path)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes from a folder in which no other process writes now."""
    for path in folder.iterdir():
        if LEFTOVER.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
            with suppress(OSError):  # They are harmless.
                path.unlink()


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that only this process knows, and sync it to disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_LINK, 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append(path: Path, content: bytes) -> None:
    """Append to a file, which is created if missing; a symbolic link raises OSError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK, 0o666), "ab") as file:
        file.write(content)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk; without it, new names in the folder may not survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock a folder for this process during the block. The lock is released even if the process is killed.

    Raises:
        UsageError: If another process holds the lock and `wait` is False.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise UsageError(f"{folder} is in use by another process") from None
        yield
    finally:
        os.close(handle)


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read an object from a JSON file; errors name the file."""
    try:
        content = read_regular(path, max_bytes)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    return json_object(content, path)


def json_object(content: bytes, path: Path) -> dict[str, Any]:
    """Parse the object in a JSON file; errors name the file."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a valid JSON file: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected an object, got {type(found).__name__}")
    return found
