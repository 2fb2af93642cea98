"""Safe reading of npz files from untrusted sources: nothing is unpickled, and sizes are checked before memory is used.

An npz file is a zip archive with one .npy file per array: a header with type and shape, then the numbers. The sizes in
the archive's directory bound what is unpacked, and the shape in each header must fit the size of its file.
"""

import math
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from subquad_lab import UsageError
from subquad_lab.system.memory import room
from subquad_lab.system.regular_file import open_regular

MAX_ENTRIES = 1000
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those that numpy writes; others can ask for gigabytes


def read_npz(path: Path, keys: list[str]) -> dict[str, np.ndarray]:
    """Read arrays of numbers from a file; arrays of objects raise an error."""
    try:
        with open_regular(path) as file, _archive(file) as archive:
            if (count := len(archive.infolist())) > MAX_ENTRIES:
                raise UsageError(f"--data: {path}: expected at most {MAX_ENTRIES:,} arrays, got {count:,}")
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            if (size := sum(entry.file_size for entry in archive.infolist())) > room():
                raise UsageError(f"--data: {path}: expected at most {room():,} bytes on this machine, got {size:,}")
            missing = [key for key in keys if key not in entries]
            if missing:
                raise UsageError(f"--data: {path} has no array {missing[0]!r}; expected {', '.join(keys)}, "
                                 f"got {_listed(list(entries))}")  # fmt: skip
            return {key: _array(archive, entries[key]) for key in keys}
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # For a malformed file, zipfile and numpy can raise anything.
        raise UsageError(
            f"--data: {path} is not a valid .npz file of numbers: {str(error) or type(error).__name__}"
        ) from error


def _archive(file: BinaryIO) -> zipfile.ZipFile:
    """Open an archive that begins where the file does: other content in front of it would be hidden."""
    if file.read(4) != b"PK\x03\x04":
        raise ValueError("it does not begin as a zip archive")
    return zipfile.ZipFile(file)


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """Return one array, after its header was compared with the size of its file."""
    if entry.compress_type not in METHODS:
        raise ValueError(f"{entry.filename}: expected no compression or deflate, got method {entry.compress_type}")
    with archive.open(entry) as file:
        shape, dtype = _header(file)
        promised, found = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
        if dtype.hasobject:
            raise ValueError(f"{entry.filename}: Object arrays cannot be loaded")
        if min(shape, default=0) < 0 or promised != found:
            raise ValueError(f"{entry.filename}: expected {promised:,} bytes for {dtype} {shape}, got {found:,}")
    with archive.open(entry) as file:
        made: np.ndarray = npy.read_array(file, allow_pickle=False)
    return made


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type from the header of a .npy file."""
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"expected version 1.0 or 2.0 of the .npy format, got {version[0]}.{version[1]}")
    shape, _, dtype = readers[version](file)
    return shape, dtype


def _listed(names: list[str]) -> str:
    return ", ".join(name[:80] if name.isidentifier() else repr(name[:80]) for name in names[:20]) or "none"
