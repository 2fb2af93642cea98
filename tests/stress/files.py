"""Hostile files for every reader: one line, exit code 2, nothing executed, no hang.

A content that happens to be valid may be used. The commands of tests/bad_invocations.py take turns with these.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from small_runs import SPEECH_OPTIONS, small, write_digits, write_text
from stress.command import run_command
from stress.flips import write_planetoid
from stress.hostile import CANARY, write_hostile
from stress.kills import plan
from stress.parts import Failure, Part, draw_for
from subquad_lab.training import checkpoint, seeds

TINY = ("--model=rnn", "--embedding=6", "--width=8", "--context=5", "--batch=4", "--steps=1")
Arguments = tuple[object, ...]


def _text(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    write_text(place / "text")
    path = place / "text" / rng.choice(("train.txt", "valid.txt", "test.txt"))
    path.unlink()
    return path, ("train", "language", "--data", place / "text", *TINY)


def _pictures(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    return place / "x.npz", ("train", "images", "--data", place / "x.npz", "--batch=8", "--steps=1", "--seeds=1")


def _graph(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    return place / "x.npz", ("train", "graphs", "--data", place / "x.npz", "--steps=1", "--seeds=1")


def _planetoid(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    write_planetoid(place / "planetoid")
    path = rng.choice(sorted((place / "planetoid").iterdir()))
    path.unlink()
    return path, ("train", "graphs", "--data", place / "planetoid", "--steps=1", "--seeds=1")


def _digits(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    write_digits(place / "digits", speakers=("ann",))
    path = rng.choice(sorted((place / "digits").iterdir()))
    path.unlink()
    return path, ("train", "speech", "--data", place / "digits", *SPEECH_OPTIONS, "--steps=1")


def _config(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    """Some contents are valid configs: the rest of the options makes the run short."""
    command = rng.choice((("train", "language", "--data", shared / "text", *TINY), ("train", "graphs", "--seeds=1")))
    return place / "x.yaml", (*command, "--steps=1", "--config", place / "x.yaml")


def _theory(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    return place / "x.json", ("report", shared / "rnn", "--out", place / "x.html", "--theory", place / "x.json")


def _sample(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    return place / "x.safetensors", ("plan", "--sample", place / "x.safetensors")


def _model(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    return place / "x.gguf", ("plan", "--model", place / "x.gguf", "--text", shared / "text/test.txt")


def _picture(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    return place / "x.png", ("predict", shared / "pool", place / "x.png")


def _recording(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    return place / "x.wav", ("transcribe", shared / "attention decoder", place / "x.wav", "--beams=1")


def _metadata(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    return place / "x.csv", ("synthesize", place / "x.csv", place / "out", "--clips=1")


def _run_file(rng: random.Random, place: Path, shared: Path) -> tuple[Path, Arguments]:
    """A file of a run that someone else sent."""
    run = shutil.copytree(shared / "rnn", place / "runs/run")
    path = rng.choice([run / name for name in ("config.yaml", "run.json", "result.json", "metrics.jsonl")])
    path.unlink()
    commands: tuple[Arguments, ...] = (
        ("runs", "--root", place / "runs"), ("report", run, "--out", place / "x.html"), ("evaluate", run),
        ("train", "--resume", run), ("sample", run),
    )  # fmt: skip
    return path, rng.choice(commands)


# The reader, the formats that it expects, and its share.
READERS: dict[Callable[..., tuple[Path, Arguments]], tuple[tuple[str, ...], int]] = {
    _text: (("text", "pickle"), 2),
    _pictures: (("npz", "pickle"), 3),
    _graph: (("npz", "pickle"), 2),
    _planetoid: (("pickle",), 3),
    _digits: (("wav",), 2),
    _config: (("yaml", "json"), 3),
    _theory: (("json",), 2),
    _sample: (("safetensors", "pickle"), 3),
    _model: (("gguf", "safetensors"), 1),
    _picture: (("png", "pickle"), 2),
    _recording: (("wav",), 2),
    _metadata: (("text",), 1),
    _run_file: (("json", "yaml"), 3),
}


def prepare(shared: Path) -> None:
    """Train the small runs that some commands need, and calibrate a machine."""
    plan(shared, shared)
    write_text(shared / "text")
    if find_spec("bad_invocations"):
        (shared / "bad").mkdir()
        import_module("bad_invocations").prepare(shared / "bad")
    for name in ("rnn", "pool", "attention decoder"):
        experiment, config = small(name, shared / "text", steps=4)
        seeds.train(experiment, config, shared / name)
        assert checkpoint.newest(shared / name / "checkpoints") is not None


def case(number: int, shared: Path) -> Counter[str]:
    """Give a hostile file to a command, or run one of the bad invocations."""
    rng, place = draw_for("files", number), Path.cwd()
    os.environ["SUBQUAD_CACHE"] = str(shared / "cache")
    if find_spec("bad_invocations") and rng.random() < 0.2:
        return _invocation(rng, shared)
    reader = rng.choices(list(READERS), [share for _, share in READERS.values()])[0]
    path, arguments = reader(rng, place, shared)
    what = write_hostile(rng, path, READERS[reader][0])
    return check(arguments, f"{reader.__name__.strip('_')}, {what}", place)


def check(arguments: Arguments, what: str, place: Path) -> Counter[str]:
    """Run a command; raise Failure unless it refuses the file in one line, or uses it without harm."""
    try:
        outcome = run_command(*arguments)
    except Failure as failure:
        raise Failure(failure.kind, f"{what}: {failure.detail}") from failure
    if (place / CANARY).exists() or Path(CANARY).exists():
        raise Failure("executed", f"{what}: the content of a file was executed")
    if outcome.code not in (0, 2):
        raise Failure(f"exit code {outcome.code}", f"{what}: {outcome.err.strip()[-300:]}")
    if outcome.code == 2 and not outcome.is_refusal:
        raise Failure("not one line", f"{what}: {outcome.err.strip()[-300:]}")
    return Counter({"files": 1, "refused" if outcome.code else "used": 1})


def _invocation(rng: random.Random, shared: Path) -> Counter[str]:
    """Run one of the commands of tests/bad_invocations.py."""
    known: Any = import_module("bad_invocations")
    places = known.Places(shared / "bad")
    bad = rng.choice(known.invocations(places))
    os.chdir(places.root)
    outcome = run_command(*bad.arguments)
    if fault := known.fault_of(bad, *outcome):
        raise Failure(
            "bad invocation", f"{fault}: subquad {' '.join(bad.arguments)[:200]}: {outcome.err.strip()[-200:]}"
        )
    return Counter({"files": 1, "bad invocations refused": 1})


PART = Part("files", "files", 0.13, 40.0, case, prepare)
