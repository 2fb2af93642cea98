"""Checkpoints on the disk: whole or not there, checked before they are believed, and nothing in them is executed.

    checkpoints/00000012/tensors.safetensors    every tensor
                         state.json             everything else
                         SHA256SUMS             of both, as `sha256sum -c` reads it

A checkpoint is made in a hidden folder, brought to the disk, and renamed: after a crash it is there or it is not. Each
has the next number, so that none is ever replaced; those that are no longer needed are removed once it is there.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from subquad_lab import RunError, UsageError
from subquad_lab.system.files import sync_folder, write_synced

TENSORS, STATE, SUMS = "tensors.safetensors", "state.json", "SHA256SUMS"


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on: tensors by name, and the rest as JSON."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    path: Path | None = None


class Damaged(UsageError):
    """A checkpoint that is not what was written."""


def save(folder: Path, number: int, checkpoint: Checkpoint, keep: Iterable[int] = ()) -> None:
    """Put it into `folder`, or leave everything as it was and say why.

    Of the earlier ones the last stays, and those whose numbers are in `keep`.
    """
    hidden = folder / ".new"  # Of one process: a run is locked while it is trained.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
        contents = {
            TENSORS: safetensors.torch.save(tensors),
            STATE: json.dumps(checkpoint.state, allow_nan=False).encode(),
        }
        for name, content in contents.items():
            write_synced(hidden / name, content)
        write_synced(hidden / SUMS, _sums(contents))
        sync_folder(hidden)
        before = numbers(folder)
        hidden.rename(folder / _name(number))
        sync_folder(folder)
    except OSError as error:
        why = error.strerror or error
        raise RunError(f"cannot write a checkpoint into {folder}: {why}; earlier ones are kept") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    for old in set(before[:-1]) - set(keep):
        _remove(folder / _name(old))


def load(path: Path) -> Checkpoint:
    """Read one checkpoint; `Damaged` if a single bit is not as it was written."""
    try:
        contents = {name: (path / name).read_bytes() for name in (TENSORS, STATE)}
        sums = (path / SUMS).read_bytes()
    except OSError as error:
        raise Damaged(f"checkpoint {path}: {Path(error.filename or path).name}: {error.strerror}") from error
    if sums != _sums(contents):
        raise Damaged(f"checkpoint {path}: its contents do not have the checksums in {SUMS}")
    # Whoever can write the checksums can write anything: the formats are checked too, and both are only data.
    try:
        tensors = safetensors.torch.load(contents[TENSORS])
        state = json.loads(contents[STATE])
    except (SafetensorError, ValueError, RecursionError) as error:
        raise Damaged(f"checkpoint {path}: {error}") from error
    if not isinstance(state, dict):
        raise Damaged(f"checkpoint {path}: expected an object in {STATE}, got {type(state).__name__}")
    return Checkpoint(tensors, state, path)


def newest(folder: Path) -> Checkpoint | None:
    """The last checkpoint that is whole; of each later one that is not, a line on the standard error. None: no folder.

    Where there are checkpoints and none of them is whole, there is nothing to go on with.
    """
    found = numbers(folder)
    for number in reversed(found):
        try:
            return load(folder / _name(number))
        except Damaged as error:
            print(f"subquad: warning: {error}; the one before it is used", file=sys.stderr)
    if found:
        raise Damaged(f"checkpoints in {folder}: expected at least one that is whole, got {len(found)} damaged")
    return None


def best(folder: Path, number: int) -> Checkpoint:
    """The one with this number, or, where it is damaged, the newest; a line on the standard error says so."""
    try:
        return load(folder / _name(number))
    except Damaged as error:
        print(f"subquad: warning: {error}; the newest is used, not the best", file=sys.stderr)
        found = newest(folder)
        if found is None:
            raise
        return found


def numbers(folder: Path) -> list[int]:
    """Of the checkpoints in a folder, the last one last."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def next_number(folder: Path) -> int:
    return max(numbers(folder), default=0) + 1


def _remove(path: Path) -> None:
    """First out of sight, by one rename, so that a crash in between leaves nothing that looks like a checkpoint."""
    hidden = path.with_name(".old")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _name(number: int) -> str:
    return f"{number:08d}"


def _sums(contents: dict[str, bytes]) -> bytes:
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items())
    return "".join(lines).encode()
