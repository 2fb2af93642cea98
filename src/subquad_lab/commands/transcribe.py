"""`subquad transcribe`: transcribe audio files with a trained speech model, utterance by utterance."""

import sys
from pathlib import Path

import soundfile

from subquad_lab import UsageError, one_line
from subquad_lab.data.sound import RATE, read_sound
from subquad_lab.data.speech import text_of
from subquad_lab.data.utterances import Usual, heard
from subquad_lab.experiments.speech import Config, make_model, side_by_side, spelled
from subquad_lab.experiments.stored import chosen, experiment_of
from subquad_lab.models.speech import Speech
from subquad_lab.training.lifecycle import load_weights, reopen
from subquad_lab.training.run import ABOUT, Run

BATCH_SIZE = 8  # utterances that are decoded together
MAX_BEAMS = 100


def run(folder: str, files: list[str], beams: int) -> None:
    """Print a line for each utterance of each file. Files that cannot be transcribed are reported at the end."""
    if not 1 <= beams <= MAX_BEAMS:
        raise UsageError(f"--beams: expected an integer from 1 to {MAX_BEAMS}, got {beams}")
    made = Run.open(chosen(Path(folder)))
    _, config = experiment_of(made)
    if not isinstance(config, Config):
        raise UsageError(f"RUN: expected a run of a speech model, got {made.folder}")
    longest, usual = learned(made)
    model = make_model(config)
    load_weights(model, made, config)
    failed = []
    for file in files:
        try:
            transcribe(config, model, Path(file), usual, longest, beams)
        except ValueError as error:
            failed.append(file)
            print(f"subquad: warning: {one_line(error)}", file=sys.stderr)
    if failed:
        raise UsageError(f"FILES: {len(failed)} of {len(files)} could not be transcribed: {', '.join(failed)}")


def learned(made: Run) -> tuple[int, Usual]:
    """Return the length in frames of the longest clip that was not cut in training, and the usual clip properties."""
    data = made.about()["data"]
    if "usual" not in data:  # Older runs do not record it, but it follows from their data.
        data = reopen(*experiment_of(made), made).task.about()["data"]
    longest, usual = data.get("longest"), data["usual"]
    if not isinstance(longest, int) or longest < 1:
        raise UsageError(f"RUN: {made.folder} cut all its training clips; train with more --characters or --frames")
    kinds = {name: float if name == "loudness" else int for name in Usual._fields}
    if (not isinstance(usual, dict) or {name: type(value) for name, value in usual.items()} != kinds
            or not all(0 <= usual[name] <= longest for name in kinds if name != "loudness")):  # fmt: skip
        raise UsageError(f'{made.folder / ABOUT}: expected the numbers {", ".join(kinds)} under "usual", got {usual}')
    return longest, Usual(**usual)


def transcribe(config: Config, model: Speech, path: Path, usual: Usual, longest: int, beams: int) -> None:
    """Print the utterances of one file, each at most as long as the longest training clip."""
    samples = read_sound(path, RATE if config.resample else None)
    rate = RATE if config.resample else soundfile.info(path).samplerate
    try:
        utterances = heard(samples, usual, longest)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for i in range(0, len(utterances), BATCH_SIZE):
        batch = utterances[i : i + BATCH_SIZE]
        texts = spelled(config, model, *side_by_side(config, [clip for _, _, clip in batch]), beams)
        for (begin, end, _), text in zip(batch, texts, strict=True):
            where = f"{path} {begin / rate:.1f}-{end / rate:.1f} s" if len(utterances) > 1 else f"{path}"
            print(f"{where}: {text_of(text)}", flush=True)
            if len(text) == config.characters:
                print(f"subquad: warning: {where}: cut after {config.characters} characters, the limit of this run "
                      "(--characters); it may not contain speech", file=sys.stderr)  # fmt: skip
