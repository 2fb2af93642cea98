"""A journal: records of several processes in one file, each verified when it is read.

    line = checksum of (checksum of the line before, record), a space, the record as JSON

The checksums form a chain, so a line that was changed, removed, inserted or moved is noticed. Processes append one at
a time, under a lock that the system releases when a process ends. A last line cut by a crash is not a record; the next
process removes it. A journal cut between two lines has lost its last records: their authors append them again.

The methods are those that optuna's `JournalStorage` calls.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subquad_lab import RunError
from subquad_lab.system.checksums import Damaged
from subquad_lab.system.files import NO_LINK, json_object

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Record = dict[str, Any]


class Journal:
    """The records of a file, which is created if missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: list[Record] = []
        self._size, self._checksum = 0, ""  # of the records read so far
        with self._opened():
            pass

    def read_logs(self, log_number_from: int) -> Iterable[Record]:
        """Return the records from this number on."""
        with self._opened() as handle:
            self._read_on(handle)
        return self._records[log_number_from:]

    def append_logs(self, logs: list[Record]) -> None:
        """Append records and sync them to disk.

        Raises:
            RunError: If they cannot be written.
        """
        with self._opened() as handle:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX)
            self._read_on(handle)
            lines, checksum = [], self._checksum
            for record in logs:
                text = json.dumps(record)
                checksum = _chained(checksum, text)
                lines.append(f"{checksum} {text}\n")
            try:
                os.ftruncate(handle, self._size)  # a line cut by a crash
                with os.fdopen(os.dup(handle), "ab") as file:
                    file.write("".join(lines).encode())
                    file.flush()
                    os.fsync(handle)
            except OSError as error:
                raise RunError(f"cannot write {self.path}: {error.strerror}") from error

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_LINK, 0o666)
        except OSError as error:
            raise RunError(f"cannot open {self.path}: {error.strerror}") from error
        try:
            yield handle
        finally:
            os.close(handle)

    def _read_on(self, handle: int) -> None:
        """Read and verify the lines that other processes have added."""
        with os.fdopen(os.dup(handle), "rb") as file:
            if file.seek(0, os.SEEK_END) < self._size:
                raise Damaged(f"{self.path}: expected at least {self._size} bytes; the file was truncated")
            file.seek(self._size)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                checksum, _, text = line[:-1].decode(errors="replace").partition(" ")
                if checksum != _chained(self._checksum, text):
                    raise Damaged(f"{self.path}: line {len(self._records) + 1} does not match its checksum: the file "
                                  "was changed, or made by an earlier version; use a new folder")  # fmt: skip
                self._records.append(json_object(text.encode(), self.path))
                self._size, self._checksum = self._size + len(line), checksum


def _chained(before: str, text: str) -> str:
    return hashlib.sha256(f"{before}{text}".encode()).hexdigest()
