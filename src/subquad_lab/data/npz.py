"""Safe reading of npz files from untrusted sources: nothing is unpickled."""

import zipfile
from pathlib import Path

import numpy as np

from subquad_lab import UsageError
from subquad_lab.system.memory import room


def read_npz(path: Path, keys: list[str]) -> dict[str, np.ndarray]:
    """Read arrays of numbers from a file; arrays of objects raise an error."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > room():
            raise UsageError(f"--data: {path}: expected at most {room():,} bytes on this machine, got {size:,}")
        with np.load(path, allow_pickle=False) as content:
            missing = [key for key in keys if key not in content.files]
            if missing:
                raise UsageError(f"--data: {path} has no array {missing[0]!r}; expected {', '.join(keys)}, "
                                 f"got {', '.join(content.files) or 'none'}")  # fmt: skip
            found = {key: content[key] for key in keys}
    except UsageError:
        raise
    except Exception as error:  # For a malformed file, numpy can raise anything.
        raise UsageError(
            f"--data: {path} is not a valid .npz file of numbers: {error or type(error).__name__}"
        ) from error
    for key, array in found.items():
        if not isinstance(array, np.ndarray):
            raise UsageError(f"--data: {path}: {key} is not an array")
    return found
