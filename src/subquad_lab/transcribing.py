"""`subquad transcribe`: what a trained speech model hears in sound files. Long ones are heard in pieces."""

import sys
from pathlib import Path

import soundfile

from subquad_lab import UsageError
from subquad_lab.configs import config_of
from subquad_lab.data.sound import QUIET, RATE, STEP, cut_at_pauses, features, read_sound
from subquad_lab.data.speech import text_of
from subquad_lab.experiments.speech import Config, make_model, side_by_side, spelled
from subquad_lab.models.speech import Speech
from subquad_lab.records import Run
from subquad_lab.runs import load_weights
from subquad_lab.series import chosen

BATCH = 8  # pieces that are heard at once
MOST_BEAMS = 100


def run(folder: str, files: list[str], beams: int) -> None:
    """A line for each file or piece of it. A file that cannot be heard is named, and the others are heard."""
    if not 1 <= beams <= MOST_BEAMS:
        raise UsageError(f"--beams: expected a whole number from 1 to {MOST_BEAMS}, found {beams}")
    made = Run.open(chosen(folder))
    _, config = config_of(made)
    if not isinstance(config, Config):
        raise UsageError(f"RUN: {made.folder} is not a run of a speech model")
    longest = made.about()["data"].get("longest")
    if not isinstance(longest, int) or longest < 1:
        raise UsageError(f"RUN: {made.folder} has learned no clip whole; expected more characters or frames")
    model = make_model(config)
    load_weights(model, made, config)
    failed = []
    for file in files:
        try:
            transcribe(config, model, Path(file), longest * STEP / RATE, beams)
        except ValueError as error:
            failed.append(file)
            print(f"subquad: warning: {error}", file=sys.stderr)
    if failed:
        raise UsageError(f"FILES: {len(failed)} of {len(files)} could not be heard: {', '.join(failed)}")


def transcribe(config: Config, model: Speech, path: Path, longest: float, beams: int) -> None:
    """In pieces no longer than the clips that the model has learned."""
    samples = read_sound(path, RATE if config.resample else None)
    rate = RATE if config.resample else soundfile.info(path).samplerate
    pieces = cut_at_pauses(samples, longest)
    heard = [(begin, end) for begin, end in pieces if float(samples[begin:end].abs().max()) >= QUIET]
    if not heard:
        raise ValueError(f"{path}: is silent")
    for i in range(0, len(heard), BATCH):
        batch = heard[i : i + BATCH]
        try:
            clips = [features(samples[begin:end]).float() for begin, end in batch]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        texts = spelled(config, model, *side_by_side(config, clips), beams)
        for (begin, end), text in zip(batch, texts, strict=True):
            when = f" {begin / rate:.1f}-{end / rate:.1f} s" if len(pieces) > 1 else ""
            print(f"{path}{when}: {text_of(text)}", flush=True)
