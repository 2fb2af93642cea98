"""npz files of numbers, from anywhere: nothing in them is unpickled, and what is wrong is named."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from subquad_lab import UsageError
from subquad_lab.sizes import memory

BROKEN = (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, MemoryError, NotImplementedError,
          RuntimeError, SyntaxError)  # fmt: skip


def read_npz(path: Path, keys: list[str]) -> dict[str, np.ndarray]:
    """Some arrays of a file; an array of objects is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > memory():
            raise UsageError(f"--data: {path} holds {size:,} bytes, more than this machine's memory of {memory():,}")
        with np.load(path, allow_pickle=False) as content:
            missing = [key for key in keys if key not in content.files]
            if missing:
                raise UsageError(f"--data: {path} has no array {missing[0]!r}; expected {', '.join(keys)}, "
                                 f"found {', '.join(content.files) or 'none'}")  # fmt: skip
            return {key: content[key] for key in keys}
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror or error}") from error
    except BROKEN as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--data: {path} is no whole npz file of numbers: {error}") from error
