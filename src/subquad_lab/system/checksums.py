"""SHA256SUMS: the checksums of the files in a folder, in the format of `sha256sum -c`.

The list also says which files are complete. Each arrow is one atomic write, so a crash leaves no intact file that
looks damaged, and no incomplete file that looks intact:

    remove the names from the list  ->  write the files  ->  add the names with their checksums

    listed, and equal to its checksum    intact
    listed, but missing or different     damaged
    not listed                           not written completely; it is written again

The last line of the list is a comment with the checksum of the lines before it, because a list that was cut would name
fewer files. A folder whose list is missing is damaged too. The sums detect damage; they are not a signature.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from subquad_lab import RunError, UsageError
from subquad_lab.system.files import json_object, write_whole
from subquad_lab.system.regular_file import read_regular

SUMS = "SHA256SUMS"
MAX_SUMS_BYTES, MAX_LISTED_BYTES = 1 << 20, 1 << 32
LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)", re.ASCII)


class Damaged(UsageError):
    """Something that has changed, or is gone, since it was written."""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def as_lines(sums: Mapping[str, str]) -> bytes:
    """Return the content of SHA256SUMS for checksums by name."""
    return "".join(f"{checksum}  {name}\n" for name, checksum in sums.items()).encode()


def closed(lines: bytes) -> bytes:
    """Return the lines of a list, followed by the line with their own checksum."""
    return lines + f"# {digest(lines)}\n".encode()


def read_sums(folder: Path) -> dict[str, str]:
    """Return the checksums of a folder by name.

    Raises:
        Damaged: If the list is missing or malformed, or names a missing file.
    """
    path = folder / SUMS
    try:
        content = read_regular(path, MAX_SUMS_BYTES)
    except FileNotFoundError:
        raise Damaged(
            f"{folder}: {SUMS} is missing: it was deleted, or an earlier version of subquad made this folder; see "
            "'Checksums' in docs/lab.md"
        ) from None
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from error
    last = content.rfind(b"\n", 0, -1) + 1
    if content != closed(content[:last]):
        raise Damaged(
            f"{path}: the list was changed or cut: its last line is not the checksum of the lines before it; see "
            "'Checksums' in docs/lab.md"
        )
    sums: dict[str, str] = {}
    for number, line in enumerate(content[:last].decode("ascii", errors="replace").split("\n")[:-1], 1):
        found = LINE.fullmatch(line)
        if found is None or found[2] in sums:
            raise Damaged(f"{path}: line {number} is not a checksum and a name")
        sums[found[2]] = found[1]
    for name in sums:
        if not (folder / name).is_file():
            raise Damaged(f"{folder / name}: the file is missing, but {SUMS} lists it")
    return sums


def is_listed(folder: Path, name: str) -> bool:
    """Return whether a file was written completely; raise Damaged if the list is missing but the file is not."""
    if not (folder / SUMS).is_file() and not (folder / name).is_file():
        return False
    return name in read_sums(folder)


def read_listed(folder: Path, name: str) -> bytes:
    """Return the content of a listed file.

    Raises:
        Damaged: If a single bit differs from what was written.
    """
    expected, path = read_sums(folder).get(name), folder / name
    if expected is None:
        raise Damaged(f"{path}: expected a line for it in {SUMS}, got none")
    try:
        content = read_regular(path, MAX_LISTED_BYTES)
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from error
    if digest(content) != expected:
        raise Damaged(f"{path}: the file was changed or cut: it does not match its checksum in {SUMS}")
    return content


def read_listed_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a listed JSON file."""
    return json_object(read_listed(folder, name), folder / name)


def verify_if_listed(path: Path) -> None:
    """Raise Damaged if a SHA256SUMS next to a file lists it with another checksum; other files are fine."""
    try:
        lines = read_regular(path.parent / SUMS, MAX_SUMS_BYTES).splitlines()
        content = read_regular(path, MAX_LISTED_BYTES)
    except OSError:
        return
    for line in lines:
        if line.endswith(f"  {path.name}".encode()) and line != f"{digest(content)}  {path.name}".encode():
            raise Damaged(f"{path}: the file was changed or cut: it does not match its checksum in {SUMS}")


def write_listed(folder: Path, contents: Mapping[str, bytes], others: Mapping[str, str] | None = None) -> None:
    """Write files and list them, all at once.

    Args:
        folder: Folder of the files.
        contents: Files to write, by name.
        others: Checksums of files that exist already, by name.

    Raises:
        RunError: If a file cannot be written. None of them is listed then.
    """
    sums = read_sums(folder) if (folder / SUMS).is_file() else None
    kept = {name: checksum for name, checksum in (sums or {}).items() if name not in contents}
    if kept != sums:
        _write(folder / SUMS, closed(as_lines(kept)))
    for name, content in contents.items():
        _write(folder / name, content)
    added = {name: digest(content) for name, content in contents.items()}
    _write(folder / SUMS, closed(as_lines(kept | dict(others or {}) | added)))


def unlist(folder: Path, names: Iterable[str]) -> None:
    """Remove files from the list, because they are going to change."""
    sums = read_sums(folder)
    if names := set(names) & sums.keys():
        _write(folder / SUMS, closed(as_lines({name: sums[name] for name in sums if name not in names})))


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
