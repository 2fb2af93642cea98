"""Atomic files: complete or absent, even after a crash or on a full disk."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subquad_lab import UsageError
from subquad_lab.system.regular_file import read_regular

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


MAX_JSON_BYTES = 1 << 26


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: the old content stays until the new one is complete."""
    with made_whole(path) as temporary:
        write_synced(temporary, content)


@contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; at the end, sync that file to disk and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
        content = json.loads(read_regular(path, max_bytes))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a valid JSON file: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected an object, got {type(content).__name__}")
    return content
