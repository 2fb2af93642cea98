"""`subquad transcribe`: what a trained speech model hears in sound files, utterance by utterance."""

import sys
from pathlib import Path

import soundfile

from subquad_lab import UsageError
from subquad_lab.data.sound import RATE, read_sound
from subquad_lab.data.speech import text_of
from subquad_lab.data.utterances import Usual, heard
from subquad_lab.experiments.speech import Config, make_model, side_by_side, spelled
from subquad_lab.experiments.stored import chosen, experiment_of
from subquad_lab.models.speech import Speech
from subquad_lab.training.lifecycle import load_weights, reopen
from subquad_lab.training.run import ABOUT, Run

BATCH = 8  # utterances that are heard at once
MOST_BEAMS = 100


def run(folder: str, files: list[str], beams: int) -> None:
    """A line for each file or utterance in it. A file that cannot be heard is named, and the others are heard."""
    if not 1 <= beams <= MOST_BEAMS:
        raise UsageError(f"--beams: expected a whole number from 1 to {MOST_BEAMS}, found {beams}")
    made = Run.open(chosen(Path(folder)))
    _, config = experiment_of(made)
    if not isinstance(config, Config):
        raise UsageError(f"RUN: {made.folder} is not a run of a speech model")
    longest, usual = learned(made)
    model = make_model(config)
    load_weights(model, made, config)
    failed = []
    for file in files:
        try:
            transcribe(config, model, Path(file), usual, longest, beams)
        except ValueError as error:
            failed.append(file)
            print(f"subquad: warning: {error}", file=sys.stderr)
    if failed:
        raise UsageError(f"FILES: {len(failed)} of {len(files)} could not be heard: {', '.join(failed)}")


def learned(made: Run) -> tuple[int, Usual]:
    """The frames of the longest clip that the model has learned whole, and what clips usually have."""
    data = made.about()["data"]
    if "usual" not in data:  # An early run has not written it down, but its data tell.
        data = reopen(*experiment_of(made), made).task.about()["data"]
    longest, usual = data.get("longest"), data["usual"]
    if not isinstance(longest, int) or longest < 1:
        raise UsageError(f"RUN: {made.folder} has learned no clip whole; expected more characters or frames")
    kinds = {name: float if name == "loudness" else int for name in Usual._fields}
    if (not isinstance(usual, dict) or {name: type(value) for name, value in usual.items()} != kinds
            or not all(0 <= usual[name] <= longest for name in kinds if name != "loudness")):  # fmt: skip
        raise UsageError(f"{made.folder / ABOUT}: expected numbers {', '.join(kinds)} of usual clips, found {usual}")
    return longest, Usual(**usual)


def transcribe(config: Config, model: Speech, path: Path, usual: Usual, longest: int, beams: int) -> None:
    """No utterance is longer than the clips that the model has learned."""
    samples = read_sound(path, RATE if config.resample else None)
    rate = RATE if config.resample else soundfile.info(path).samplerate
    try:
        utterances = heard(samples, usual, longest)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for i in range(0, len(utterances), BATCH):
        batch = utterances[i : i + BATCH]
        texts = spelled(config, model, *side_by_side(config, [clip for _, _, clip in batch]), beams)
        for (begin, end, _), text in zip(batch, texts, strict=True):
            where = f"{path} {begin / rate:.1f}-{end / rate:.1f} s" if len(utterances) > 1 else f"{path}"
            print(f"{where}: {text_of(text)}", flush=True)
            if len(text) == config.characters:
                print(f"subquad: warning: {where}: has no end after {config.characters} characters, where the run's "
                      "--characters cut it; perhaps it is no speech", file=sys.stderr)  # fmt: skip
