"""Checkpoints: written atomically, verified when loaded, and free of executable content.

    checkpoints/00000012/tensors.safetensors    every tensor
                         state.json             everything else
                         SHA256SUMS             checksums of both, in the format of `sha256sum -c`

A checkpoint is written to a hidden folder, synced to disk and renamed, so that after a crash it exists either
completely or not at all. Numbers only increase, so no checkpoint is ever replaced; old ones are removed once the new
one exists.
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
    """Everything needed to resume a run: tensors by name, and the rest as JSON."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    path: Path | None = None


class Damaged(UsageError):
    """A checkpoint whose content has changed since it was written."""


def save(folder: Path, number: int, checkpoint: Checkpoint, keep: Iterable[int] = ()) -> None:
    """Write a checkpoint into `folder` and remove old ones.

    The previous checkpoint and those whose numbers are in `keep` stay.

    Raises:
        RunError: If it cannot be written. Earlier checkpoints are unchanged.
    """
    hidden = folder / ".new"  # Only one process writes here: a run is locked during training.
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
    """Load one checkpoint.

    Raises:
        Damaged: If a single bit differs from what was written.
    """
    try:
        contents = {name: (path / name).read_bytes() for name in (TENSORS, STATE)}
        sums = (path / SUMS).read_bytes()
    except OSError as error:
        raise Damaged(f"checkpoint {path}: {Path(error.filename or path).name}: {error.strerror}") from error
    if sums != _sums(contents):
        raise Damaged(f"checkpoint {path}: the contents do not match the checksums in {SUMS}")
    # An attacker could write matching checksums, so the formats are checked too. Both formats hold data only.
    try:
        tensors = safetensors.torch.load(contents[TENSORS])
        state = json.loads(contents[STATE])
    except (SafetensorError, ValueError, RecursionError) as error:
        raise Damaged(f"checkpoint {path}: {error}") from error
    if not isinstance(state, dict):
        raise Damaged(f"checkpoint {path}: expected an object in {STATE}, got {type(state).__name__}")
    return Checkpoint(tensors, state, path)


def newest(folder: Path) -> Checkpoint | None:
    """Return the latest intact checkpoint, or None if there are none; warn about each damaged one that is skipped.

    Raises:
        Damaged: If there are checkpoints and all of them are damaged.
    """
    found = numbers(folder)
    for number in reversed(found):
        try:
            return load(folder / _name(number))
        except Damaged as error:
            print(f"subquad: warning: {error}; falling back to the previous checkpoint", file=sys.stderr)
    if found:
        raise Damaged(f"checkpoints in {folder}: expected at least one intact checkpoint, got {len(found)} damaged")
    return None


def best(folder: Path, number: int) -> Checkpoint:
    """Return the checkpoint with this number, or the latest one, with a warning, if it is damaged."""
    try:
        return load(folder / _name(number))
    except Damaged as error:
        print(f"subquad: warning: {error}; using the latest instead of the best", file=sys.stderr)
        found = newest(folder)
        if found is None:
            raise
        return found


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the checkpoints in a folder in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def next_number(folder: Path) -> int:
    return max(numbers(folder), default=0) + 1


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a crash leaves nothing that looks like a checkpoint."""
    hidden = path.with_name(".old")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _name(number: int) -> str:
    return f"{number:08d}"


def _sums(contents: dict[str, bytes]) -> bytes:
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items())
    return "".join(lines).encode()
