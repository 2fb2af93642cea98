"""Checkpoints: written atomically, verified when loaded, and free of executable content.

    checkpoints/00000012/tensors.safetensors    every tensor
                         state.json             everything else
                         SHA256SUMS             checksums of both, in the format of `sha256sum -c`

A checkpoint is written to a hidden folder with a random name, synced to disk and renamed, so that after a crash it
exists either completely or not at all. Numbers only increase, so no checkpoint is ever replaced; old ones are removed
once the new one exists.
"""

import json
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from subquad_lab import RunError
from subquad_lab.system.checksums import SUMS, Damaged, as_lines, digest
from subquad_lab.system.files import sync_folder, write_synced
from subquad_lab.system.regular_file import read_regular
from subquad_lab.system.text import warn

TENSORS, STATE = "tensors.safetensors", "state.json"
NAME = re.compile(r"[0-9]{8}|[1-9][0-9]{8,17}", re.ASCII)  # of a checkpoint's folder; other names are not ours
HIDDEN = (".new", ".old")  # how the names of folders begin that are being written or removed


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume a run: tensors by name, and the rest as JSON."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    path: Path | None = None


def save(folder: Path, number: int, checkpoint: Checkpoint, keep: Iterable[int] = ()) -> None:
    """Write a checkpoint into `folder` and remove old ones.

    The previous checkpoint and those whose numbers are in `keep` stay.

    Raises:
        RunError: If it cannot be written. Earlier checkpoints are unchanged.
    """
    hidden = _hidden(folder, ".new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
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
        *both, sums = (read_regular(path / name) for name in (TENSORS, STATE, SUMS))
        contents = dict(zip((TENSORS, STATE), both, strict=True))
    except OSError as error:
        raise Damaged(f"checkpoint {path}: {Path(error.filename or path).name}: {error.strerror}") from error
    if sums != _sums(contents):
        raise Damaged(f"checkpoint {path}: the contents do not match the checksums in {SUMS}")
    # An attacker could write matching checksums, so the formats are checked too. Both formats hold data only.
    try:
        tensors = safetensors.torch.load(contents[TENSORS])
    except (SafetensorError, ValueError) as error:
        raise Damaged(f"checkpoint {path}: {error}") from error
    return Checkpoint(tensors, _parsed(path, contents[STATE]), path)


def newest_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of the latest checkpoint whose state is intact, or None if there are none.

    The tensors are not read. Another process may save and remove checkpoints meanwhile.
    """
    while found := numbers(folder):
        for number in reversed(found):
            path = folder / _name(number)
            try:
                content, sums = read_regular(path / STATE), read_regular(path / SUMS)
            except OSError:
                continue
            if f"{digest(content)}  {STATE}".encode() in sums.splitlines():
                return _parsed(path, content)
        if numbers(folder) == found:
            raise Damaged(f"checkpoints in {folder}: expected an intact {STATE}, got {len(found)} damaged checkpoints")
    return None


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"checkpoint {path}: {error}") from error
    if not isinstance(state, dict):
        raise Damaged(f"checkpoint {path}: expected an object in {STATE}, got {type(state).__name__}")
    return state


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
            warn(f"{error}; falling back to the previous checkpoint")
    if found:
        raise Damaged(f"checkpoints in {folder}: expected at least one intact checkpoint, got {len(found)} damaged")
    return None


def best(folder: Path, number: int) -> Checkpoint:
    """Return the checkpoint with this number, or the latest one, with a warning, if it is damaged."""
    try:
        return load(folder / _name(number))
    except Damaged as error:
        warn(f"{error}; using the latest instead of the best")
        found = newest(folder)
        if found is None:
            raise
        return found


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the checkpoints in a folder in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if NAME.fullmatch(path.name))


def next_number(folder: Path) -> int:
    return max(numbers(folder), default=0) + 1


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a crash leaves nothing that looks like a checkpoint."""
    hidden = _hidden(path.parent, ".old")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left. Only one process writes here: a run is locked during training."""
    for path in folder.iterdir():
        if path.name.startswith(HIDDEN):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def _hidden(folder: Path, begin: str) -> Path:
    return folder / f"{begin}.{secrets.token_hex(8)}"


def _name(number: int) -> str:
    return f"{number:08d}"


def _sums(contents: dict[str, bytes]) -> bytes:
    return as_lines({name: digest(content) for name, content in contents.items()})
