"""Flipped bits and cut ends of every file of runs, series, sweeps and caches: noticed, or harmless.

Each case damages one file of a copy, and has it read by the commands. Their output is compared with that for the
intact copy. Damage is noticed if a command refuses the folder in one line, lists the run as damaged, or warns; it is
harmless if the output is the same. Anything else is used in silence. Files of a run that later commands rely on must
be noticed by at least one command even where the output is the same; files for people only must not end in tracebacks.
"""

import io
import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import torch

from small_runs import broken_off, tiny, write_digits, write_text
from stress.command import Outcome, run_command
from stress.kills import SIZES, plan
from stress.parts import Failure, Part, draw_for
from subquad.planning import calibration_file
from subquad_lab.data.graphs import load_graph
from subquad_lab.data.speech import load_speech
from subquad_lab.experiments import language
from subquad_lab.training import checkpoint, seeds
from subquad_lab.training.checkpoint import Damaged
from subquad_lab.training.interruption import Interrupted

CHECKED = {"config.yaml", "run.json", "result.json", "metrics.jsonl"}  # A list of checksums has lines for others too.
FOR_PEOPLE = re.compile(r"timing\.jsonl$|\.svg$|(^|/)events/|summary\.json$|\.html$")
CHECKPOINT = re.compile(r"checkpoints/\d+/")
STEPS = 12
NEEDED = ("text", "digits", "planetoid")  # next to the folder that is read


class Read(NamedTuple):
    """What a reader made of a folder."""

    content: str
    is_noticed: bool


def _shown(outcome: Outcome, folder: Path, *files: Path) -> Read:
    """Return the output of a command and the files that it wrote, without the place of the folder."""
    parts = [str(outcome.code), outcome.out, *(file.read_text() for file in files if file.is_file())]
    if outcome.code not in (0, 2) or (outcome.code == 2 and not outcome.is_refusal):
        raise Failure("not one line", f"exit code {outcome.code}: {outcome.err.strip()[-300:]}")
    return Read("\n".join(parts).replace(str(folder), ""), outcome.is_noticed)


def _runs(folder: Path) -> Read:
    return _shown(run_command("runs", "--root", folder), folder)


def _report(folder: Path) -> Read:
    return _shown(run_command("report", "--root", folder, "--out", "page.html"), folder, Path("page.html"))


def _evaluate(folder: Path) -> Read:
    return _shown(run_command("evaluate", folder / "run"), folder)


def _sample(folder: Path) -> Read:
    return _shown(run_command("sample", folder / "run", "--count", 2, "--words", 8, "--prompt", "w1"), folder)


def _resume(folder: Path) -> Read:
    """Resume a run: it ends as it would have ended, or says why not."""
    is_begun = not (folder / "run/result.json").is_file()
    read = _shown(run_command("train", "--resume", folder / "run"), folder)
    # A finished run does not need its log.
    logs = [path.read_text(errors="replace") for path in folder.glob("run/metrics.jsonl") if is_begun]
    return Read("\n".join([re.sub(r"[\d.]+ s\b", "", read.content), *logs]), read.is_noticed)


def _sweep(folder: Path) -> Read:
    options = f"--data={folder.parent / 'text'}", f"--out={folder / 'run'}", "--steps=4", "--grid.lr", "0.01,0.02"
    return _shown(run_command("sweep", "language", *SIZES, *options), folder)


def _checkpoints(folder: Path) -> Read:
    """Read every checkpoint, also those that no command would use."""
    contents, damaged = [], 0
    for place in sorted(folder.glob("**/checkpoints/*")):
        try:
            found = checkpoint.load(place)
            sums = [float(x.double().sum()) for x in found.tensors.values()]
            contents.append(f"{place.relative_to(folder)} {json.dumps(found.state)} {sums}")
        except Damaged:
            damaged += 1
    return Read("\n".join(contents), damaged > 0)


def _calibration(folder: Path) -> Read:
    os.environ["SUBQUAD_CACHE"] = str(folder / "run")
    calibration_file._read.cache_clear()
    found = calibration_file.cached(torch.device("cpu"))
    return Read("" if found is None else str(found), found is None)


def _speech(folder: Path) -> Read:
    os.environ["SUBQUAD_CACHE"] = str(folder / "run")
    with redirect_stderr(io.StringIO()):
        found = load_speech(str(folder.parent / "digits"), clips=12)
    frames = [float(part.frames.double().sum()) for part in (found.train, found.valid, found.test)]
    return Read(f"{found.checksum} {frames} {found.train.texts}", False)


def _graph(folder: Path) -> Read:
    os.environ["SUBQUAD_CACHE"] = str(folder / "run")
    return Read(load_graph(str(folder.parent / "planetoid")).checksum, False)


# What is damaged, and what reads it; the first one reads all files that must be noticed.
READERS: dict[str, tuple[Callable[[Path], Read], ...]] = {
    "finished": (_runs, _report, _evaluate, _sample, _resume),
    "begun": (_runs, _evaluate, _resume),
    "series": (_runs, _report, _evaluate, _resume),
    "sweep": (_runs, _report, _sweep),
    "calibration": (_calibration,),
    "speech": (_speech,),
    "graph": (_graph,),
}
SHARES = {"finished": 5, "begun": 3, "series": 2, "sweep": 2, "calibration": 2, "speech": 2, "graph": 1}


def prepare(shared: Path, names: Iterable[str] = tuple(READERS)) -> None:
    """Make one of each, and note what the readers make of them intact."""
    write_text(shared / "text")
    write_digits(shared / "digits")
    write_planetoid(shared / "planetoid")
    for name in names:
        (shared / name).mkdir()
        _make(name, shared)
        place = shutil.copytree(shared / name, shared / "copies" / name)
        for needed in NEEDED:
            (place.parent / needed).symlink_to(shared / needed)
        contents = {reader.__name__: _read(reader, place) for reader in READERS[name]}
        (shared / f"{name}.json").write_text(json.dumps(contents))
        shutil.rmtree(place.parent)


def _make(name: str, shared: Path) -> None:
    folder = shared / name / "run"
    config = tiny(shared / "text", steps=STEPS, evaluate_every=5, save_every=3)
    match name:
        case "finished":
            seeds.train(language.EXPERIMENT, config, folder)
        case "begun":
            broken_off(config, folder, 8, Interrupted(signal.SIGTERM))
        case "series":
            seeds.train(language.EXPERIMENT, tiny(shared / "text", steps=3, seeds=2), folder)
        case "calibration":
            plan(shared / name, shared)
            (shared / name / "cache").rename(folder)
        case _:  # Reading makes it.
            READERS[name][-1](shared / name)


def _read(reader: Callable[[Path], Read], folder: Path) -> str:
    found = reader(folder)
    if found.is_noticed:
        raise Failure("damage found where there is none", f"{folder.name}: {reader.__name__}: {found.content[:200]}")
    return found.content


def write_planetoid(folder: Path) -> None:
    """Write a graph with the test module that knows the format."""
    spec = spec_from_file_location("planetoid", Path(__file__).parents[1] / "subquad_lab/data/test_graphs.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(folder)


def damage(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Return a content with a flipped bit, a cut end, a changed byte or a run of zeros, and what was done."""
    place = rng.randrange(len(content))
    match rng.choice(("bit", "bit", "bit", "cut", "byte", "zeros")):
        case "bit":
            bit = rng.randrange(8)
            return content[:place] + bytes([content[place] ^ (1 << bit)]) + content[
                place + 1 :
            ], f"bit {8 * place + bit}"
        case "cut":
            return content[:place], f"cut to {place} of {len(content)} bytes"
        case "byte":
            return content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :], f"byte {place}"
    zeros = bytes(min(rng.choice((1, 16, 512)), len(content) - place))
    return content[:place] + zeros + content[place + len(zeros) :], f"{len(zeros)} zeros at {place}"


def case(number: int, shared: Path) -> Counter[str]:
    """Damage one file, and read the folder."""
    rng = draw_for("flips", number)
    name = rng.choices(list(SHARES), list(SHARES.values()))[0]
    return flip(rng, name, shared, Path.cwd())


def flip(rng: random.Random, name: str, shared: Path, place: Path) -> Counter[str]:
    """Damage one file of a copy of a folder, and read the copy."""
    for needed in NEEDED:
        (place / needed).symlink_to(shared / needed)
    folder = shutil.copytree(shared / name, place / name)
    files = sorted(path for path in folder.glob("**/*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    whole = path.read_bytes()
    changed, what = damage(rng, whole)
    if changed == whole:
        return Counter()
    path.write_bytes(changed)
    inside = path.relative_to(folder / "run").as_posix()
    expected = json.loads((shared / f"{name}.json").read_text())
    readers = READERS[name]
    chosen = list(readers) if len(readers) < 3 else [readers[0], rng.choice(readers[1:])]
    if name == "series" and "/" not in inside:  # `runs` lists the runs in it.
        chosen = [_resume]
    if CHECKPOINT.search(inside):
        chosen = [_checkpoints, rng.choice(readers[1:])]
        expected[_checkpoints.__name__] = _checkpoints(shared / name).content
    is_noticed = False
    for reader in chosen:
        found = _found(reader, folder, f"{name}: {inside}, {what}")
        is_noticed |= found.is_noticed
        is_same = found.content == expected[reader.__name__]
        if not found.is_noticed and not is_same and not FOR_PEOPLE.search(inside):
            raise Failure("used in silence", f"{name}: {inside}, {what}, by {reader.__name__.strip('_')}")
    if not is_noticed and (path.name in CHECKED or CHECKPOINT.search(inside)):
        raise Failure("not noticed", f"{name}: {inside}, {what}")
    return Counter({"flips and cuts": 1, "noticed" if is_noticed else "harmless": 1})


def _found(reader: Callable[[Path], Read], folder: Path, what: str) -> Read:
    try:
        return reader(folder)
    except Failure as failure:
        raise Failure(failure.kind, f"{what}: {failure.detail}") from failure


PART = Part("flips", "flips and cuts", 0.42, 60.0, case, prepare)
