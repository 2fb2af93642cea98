"""Logs of a run: append-only files that are hashed while they are written.

A checkpoint stores a mark of each log, its size and the SHA-256 of its content so far. Up to the last mark, a log must
be what was written; after it, a crash may have cut the last line. Resuming truncates the log to the mark. The running
hash makes a mark cost the same after every number of steps.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from subquad_lab import RunError
from subquad_lab.system.checksums import Damaged, digest
from subquad_lab.system.files import NO_LINK, append
from subquad_lab.system.regular_file import read_regular

Mark = dict[str, Any]  # {"bytes": size, "sha256": checksum of the first `size` bytes}


class Log:
    """One log; a process that continues an existing one calls `rewind` first."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._hash = path, 0, hashlib.sha256()

    def append(self, line: bytes) -> None:
        try:
            append(self.path, line)
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from error
        self.size += len(line)
        self._hash.update(line)

    def mark(self) -> Mark:
        """Sync the log to disk and return its mark."""
        if self.size:
            try:
                handle = os.open(self.path, os.O_RDONLY | NO_LINK)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            except OSError as error:
                raise RunError(f"cannot write {self.path}: {error.strerror}") from error
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}

    def rewind(self, mark: Mark | None) -> None:
        """Truncate the log to its mark in a checkpoint; later steps will be logged again.

        Args:
            mark: The mark, or None without a checkpoint: the log must then be empty.
        """
        content = content_of(self.path)
        if mark is None and content:
            raise Damaged(f"{self.path}: expected no lines without a checkpoint, got {len(content)} bytes; the "
                          "checkpoints are gone, so use a new folder")  # fmt: skip
        if mark is not None:
            check(self.path, content, mark)
            if len(content) > mark["bytes"]:
                self._truncate(mark["bytes"])
            content = content[: mark["bytes"]]
        self.size, self._hash = len(content), hashlib.sha256(content)

    def _truncate(self, size: int) -> None:
        try:
            handle = os.open(self.path, os.O_WRONLY | NO_LINK)
            try:
                os.ftruncate(handle, size)
            finally:
                os.close(handle)
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from error


def content_of(path: Path) -> bytes:
    """Return the content of a log; empty if it does not exist yet."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from error


def check(path: Path, content: bytes, mark: Mark | None) -> None:
    """Raise Damaged unless the log begins with what it held when the mark was made."""
    if not isinstance(mark, dict) or type(mark.get("bytes")) is not int or mark["bytes"] < 0:
        raise Damaged(f"{path}: the checkpoint has no checksum of it; an earlier version of subquad made this run")
    if len(content) < mark["bytes"]:
        raise Damaged(f"{path}: expected at least {mark['bytes']} bytes, got {len(content)}: the file was truncated")
    if digest(content[: mark["bytes"]]) != mark.get("sha256"):
        raise Damaged(f"{path}: the file was changed before the last checkpoint: it does not match its checksum there")
