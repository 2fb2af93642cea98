"""Features of speech clips, computed once and kept in the cache folder.

The name of a cache file depends on everything that the features depend on, and a checksum of its content is stored next
to it. Damaged or deleted files are computed again. Above MAX_CACHED_BYTES, the least recently used files are removed.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from subquad.planning import cache_folder
from subquad_lab import UsageError
from subquad_lab.data.sound import MELS, STEP, features
from subquad_lab.data.sound import RATE as SAMPLES
from subquad_lab.system.cache import SPEECH, trim_speech
from subquad_lab.system.files import locked, made_whole, write_whole
from subquad_lab.system.regular_file import open_regular, read_regular

PARTS = ("train", "valid", "test")
VERSION = 1  # of the features
MAX_NAMED_CLIPS = 3  # in a warning
MAX_CACHED_BYTES = 8 << 30  # of all features together; those of LJSpeech (24 hours) take 1.4 GB
MAX_SUM_BYTES = 1 << 10
MAX_CLIP_SECONDS = 60  # A batch holds whole clips.


class Utterance(NamedTuple):
    """A clip that is not loaded yet. `sound` returns samples at 16 kHz or raises ValueError."""

    name: str
    text: str
    sound: Callable[[], Tensor]
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Part:
    """The concatenated features of all clips, (frames, 80) in half precision, and the end of each clip."""

    frames: Tensor
    ends: Tensor
    texts: list[str]
    names: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> Tensor:
        return self.frames[self.ends[i - 1] if i else 0 : self.ends[i]].float()

    @property
    def lengths(self) -> Tensor:
        """Number of frames of each clip."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))


@dataclass(frozen=True)
class Clips:
    name: str
    checksum: str  # SHA-256 of all features and texts
    train: Part
    valid: Part
    test: Part
    skipped: list[str] = field(default_factory=list)  # the reason for each skipped clip


def featured(name: str, parts: dict[str, list[Utterance]], how: object) -> Clips:
    """Return the features of all usable clips; warn about the others.

    Args:
        name: Name of the data set.
        parts: Clips of each part.
        how: Everything else that the audio depends on, for the cache key.
    """
    known: dict[Path, str] = {}
    described = [
        [part, u.name, u.text, [_checksum(file, known) for file in u.files]] for part in PARTS for u in parts[part]
    ]
    key = hashlib.sha256(json.dumps([VERSION, how, described]).encode()).hexdigest()
    try:
        path = cache_folder() / SPEECH / f"{key[:32]}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # such as a user without a home
        warnings.warn(f"features are not cached: {error}", stacklevel=2)
        found = _computed(name, parts)
    else:
        with locked(path.parent, wait=True):  # One process computes; the others wait and read.
            found = _read(path, name) or _kept(path, _computed(name, parts), parts)
    for part in PARTS:
        if not len(getattr(found, part)):
            reason = found.skipped[0] if found.skipped else "there are none"
            raise UsageError(f"--data: the {part} part of {name} has no usable clips: {reason}")
    if found.skipped:
        total = sum(map(len, parts.values()))
        others = len(found.skipped) - MAX_NAMED_CLIPS
        more = f"; and {others:,} more" if others > 0 else ""
        warnings.warn(f"skipped {len(found.skipped):,} of {total:,} clips of {name}: "
                      f"{'; '.join(found.skipped[:MAX_NAMED_CLIPS])}{more}", stacklevel=2)  # fmt: skip
    return found


def _checksum(file: Path, known: dict[Path, str]) -> str:
    if file not in known:
        try:
            with open_regular(file) as content:
                known[file] = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError:
            known[file] = "missing"
    return known[file]


def _computed(name: str, parts: dict[str, list[Utterance]]) -> Clips:
    skipped: list[str] = []
    made = {}
    console = Console(stderr=True)
    for part in PARTS:
        frames, texts, names = [], [], []
        for utterance in track(parts[part], f"features, {part}", console=console, disable=not console.is_terminal):
            try:
                frames.append(_features(utterance))
            except UsageError:  # not specific to this clip
                raise
            except ValueError as error:
                skipped.append(f"{utterance.name}: {error}")
                continue
            texts.append(utterance.text)
            names.append(utterance.name)
        ends = torch.tensor([len(clip) for clip in frames], dtype=torch.int64).cumsum(0)
        made[part] = Part(torch.cat(frames) if frames else torch.zeros(0, MELS).half(), ends, texts, names)
        frames.clear()
    return Clips(name, _checksum_of(made), **made, skipped=skipped)


def _features(utterance: Utterance) -> Tensor:
    samples = utterance.sound()
    if not utterance.text.strip():
        raise ValueError("the text is empty")
    made = features(samples)
    if len(made) * STEP > MAX_CLIP_SECONDS * SAMPLES:
        raise ValueError(f"expected at most {MAX_CLIP_SECONDS} s, got {len(made) * STEP / SAMPLES:,.0f} s")
    return made


def _checksum_of(parts: dict[str, Part]) -> str:
    made = hashlib.sha256()
    for part in parts.values():
        made.update(json.dumps(part.texts).encode())
        for tensor in (part.ends, part.frames):
            made.update(tensor.contiguous().numpy().data.cast("B") if tensor.numel() else b"")
    return made.hexdigest()


def _kept(path: Path, clips: Clips, parts: dict[str, list[Utterance]]) -> Clips:
    """Write the features to the cache and return them.

    They are not cached if a clip without a file was skipped, because synthesizing it may work next time. An unwritable
    cache only causes a warning.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    made = {part: getattr(clips, part) for part in PARTS}
    if any(not u.files and u.name not in made[part].names for part in PARTS for u in parts[part]):
        return clips
    tensors = {f"{part}.{what}": getattr(made[part], what) for part in PARTS for what in ("frames", "ends")}
    words = {part: {"texts": made[part].texts, "names": made[part].names} for part in PARTS}
    described = {"words": json.dumps(words), "skipped": json.dumps(clips.skipped), "checksum": clips.checksum}
    try:
        with made_whole(path) as temporary:
            save_file(tensors, temporary, described)
        write_whole(path.with_suffix(".sha256"), _checksum(path, {}).encode())
    except (OSError, SafetensorError) as error:  # The latter also means a full disk.
        why = getattr(error, "strerror", None) or error
        warnings.warn(f"{path.parent}: features are not cached: {why}", stacklevel=2)
    trim_speech(path.parent, MAX_CACHED_BYTES, path)
    return clips


def _read(path: Path, name: str) -> Clips | None:
    """Return the cached features, or None if they are missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        if read_regular(path.with_suffix(".sha256"), MAX_SUM_BYTES) != _checksum(path, {}).encode():
            return None
        with safe_open(path, "pt") as file:
            words, skipped = (json.loads(file.metadata()[what]) for what in ("words", "skipped"))
            checksum = file.metadata()["checksum"]
            parts = {part: Part(file.get_tensor(f"{part}.frames"), file.get_tensor(f"{part}.ends"), **words[part])
                     for part in PARTS}  # fmt: skip
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
    with suppress(OSError):  # of a folder that may only be read
        os.utime(path)  # used now, and so among the last to be removed
    return Clips(name, checksum, **parts, skipped=skipped)
