"""npz files of numbers, from anywhere: nothing in them is unpickled, and what is wrong is named."""

import zipfile
from pathlib import Path

import numpy as np

from subquad_lab import UsageError
from subquad_lab.system.memory import room


def read_npz(path: Path, keys: list[str]) -> dict[str, np.ndarray]:
    """Some arrays of a file; an array of objects is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > room():
            raise UsageError(f"--data: {path} holds {size:,} bytes; this machine has room for {room():,}")
        with np.load(path, allow_pickle=False) as content:
            missing = [key for key in keys if key not in content.files]
            if missing:
                raise UsageError(f"--data: {path} has no array {missing[0]!r}; expected {', '.join(keys)}, "
                                 f"got {', '.join(content.files) or 'none'}")  # fmt: skip
            found = {key: content[key] for key in keys}
    except UsageError:
        raise
    except Exception as error:  # Such a file can be wrong in any way, and numpy's reader then fails in any way.
        raise UsageError(f"--data: {path} is no whole npz file of numbers: {error or type(error).__name__}") from error
    for key, array in found.items():
        if not isinstance(array, np.ndarray):
            raise UsageError(f"--data: {path}: {key} is no array")
    return found
