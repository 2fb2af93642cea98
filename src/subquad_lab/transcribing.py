"""`subquad transcribe`: what a trained speech model hears in sound files. Long ones are heard in pieces."""

import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad_lab import UsageError
from subquad_lab.data.sound import QUIET, RATE, STEP, cut_at_pauses, log_mel, read_sound
from subquad_lab.data.speech import text_of
from subquad_lab.runs import trained
from subquad_lab.series import chosen

BATCH = 8  # pieces that are heard at once


def run(folder: str, files: list[str], beams: int) -> None:
    """A line for each file or piece of it. A file that cannot be heard is named, and the others are heard."""
    if beams < 1:
        raise UsageError(f"--beams: expected a whole number >= 1, found {beams}")
    made, task = trained(chosen(folder))
    if made.about()["experiment"] != "speech":
        raise UsageError(f"RUN: {made.folder} is not a run of a speech model")
    failed = []
    for file in files:
        try:
            transcribe(task, Path(file), beams)
        except ValueError as error:
            failed.append(file)
            print(f"subquad: warning: {error}", file=sys.stderr)
    if failed:
        raise UsageError(f"FILES: {len(failed)} of {len(files)} could not be heard: {', '.join(failed)}")


def transcribe(task: Any, path: Path, beams: int) -> None:
    """Pieces are no longer than the clips that the model was trained with."""
    samples = read_sound(path, RATE if task.config.resample else None)
    if float(samples.abs().max()) < QUIET:
        raise ValueError(f"{path}: is silent")
    pieces = cut_at_pauses(samples, int(task.clips.train.lengths.max()) * STEP / RATE)
    heard = [(begin, end) for begin, end in pieces if float(samples[begin:end].abs().max()) >= QUIET]
    for i in range(0, len(heard), BATCH):
        batch = heard[i : i + BATCH]
        for (begin, end), text in zip(batch, spelled(task, [samples[a:b] for a, b in batch], beams), strict=True):
            when = f" {begin / RATE:.1f}-{end / RATE:.1f} s" if len(pieces) > 1 else ""
            print(f"{path}{when}: {text}", flush=True)


def spelled(task: Any, clips: list[Tensor], beams: int) -> list[str]:
    features = [log_mel(clip) for clip in clips]
    return [text_of(text) for text in task.spelled(*task.side_by_side(features), beams)]
