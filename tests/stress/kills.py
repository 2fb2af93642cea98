"""SIGKILL at random moments of a training run, a series, a sweep, a report and a calibration.

After every kill what is on the disk must be readable, and no step that was saved may be lost. The same command, run
again and again, must reach an end whose parameters, metrics and results are those of an undisturbed run to the bit.
"""

import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from small_runs import tiny, write_text
from stress.command import run_command
from stress.parts import Failure, Part, draw_for
from subquad.planning import calibration
from subquad.planning.seconds import work
from subquad_lab.experiments import language
from subquad_lab.training import checkpoint, seeds

STEPS, MAX_KILLS = 40, 12
MAX_DELAY = 0.8  # of the time of an undisturbed run
FINISH_SECONDS = 120.0
SIZES = ("--model=rnn", "--embedding=6", "--width=8", "--context=5", "--batch=4")


def train(folder: Path, shared: Path, name: str, **changes: Any) -> int:
    """Train, or resume, a run that saves a checkpoint after every step."""
    config = tiny(shared / "text", name, steps=STEPS, evaluate_every=9, save_every=1, **changes)
    seeds.train(language.EXPERIMENT, config, folder / "run")
    return 0


def sweep(folder: Path, shared: Path) -> int:
    options = [f"--data={shared / 'text'}", f"--out={folder / 'sweep'}", "--steps=12", "--grid.lr", "0.01,0.02"]
    return run_command("sweep", "language", *SIZES, *options).code


def report(folder: Path, shared: Path) -> int:
    return run_command("report", shared / "run" / "rnn", "--out", folder / "report.html").code


def plan(folder: Path, shared: Path) -> int:
    """Calibrate a machine whose times are known, because a real calibration takes half a minute."""

    def known(method: Any, form: str, shape: Any, device: object, dtype: object, before: float) -> float:
        time.sleep(0.002)
        return 1e-9 * sum(work(method, form, shape))

    calibration.measured_seconds = known
    os.environ["SUBQUAD_CACHE"] = str(folder / "cache")
    os.getloadavg = lambda: (0.0, 0.0, 0.0)
    return run_command("plan", "--length", 512, "--head-dim", 16).code


SUBJECTS: dict[str, Callable[[Path, Path], int]] = {
    "rnn": lambda folder, shared: train(folder, shared, "rnn"),
    "transformer": lambda folder, shared: train(folder, shared, "transformer"),
    "series": lambda folder, shared: train(folder, shared, "lstm", seeds=2),
    "sweep": sweep,
    "report": report,
    "plan": plan,
}


def prepare(shared: Path, names: Iterable[str] = tuple(SUBJECTS)) -> None:
    """Run subjects undisturbed, and note how long each takes."""
    write_text(shared / "text")
    (shared / "run").mkdir()
    seconds = {}
    for name in names:
        run, folder = SUBJECTS[name], shared / "whole" / name
        folder.mkdir(parents=True)
        begin = time.monotonic()
        if _code(_child(run, folder, shared), FINISH_SECONDS) != 0:
            raise Failure("undisturbed run failed", name)
        seconds[name] = time.monotonic() - begin
        if name == "rnn":
            shutil.copytree(folder / "run", shared / "run" / "rnn")  # for the report
    (shared / "seconds.json").write_text(json.dumps(seconds))


def _child(run: Callable[[Path, Path], int], folder: Path, shared: Path) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        torch.set_num_threads(1)  # A forked process has no other threads.
        code = run(folder, shared)
    finally:
        os._exit(code)


def _code(process: int, seconds: float) -> int | None:
    """Wait for a process and return its exit code; None if the time is over and it was killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.003)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def case(number: int, shared: Path) -> Counter[str]:
    """Kill one subject until it is done in spite of it, at most MAX_KILLS times; then compare."""
    rng = draw_for("kills", number)
    name = rng.choice(list(SUBJECTS))
    counts = killed(rng, name, Path.cwd(), shared)
    compare(name, Path.cwd(), shared / "whole" / name)
    return counts


def killed(rng: random.Random, name: str, folder: Path, shared: Path) -> Counter[str]:
    """Kill a subject again and again, until it is done; return the number of kills."""
    whole = json.loads((shared / "seconds.json").read_text())[name]
    counts: Counter[str] = Counter()
    saved: dict[str, int] = {}
    for attempt in range(MAX_KILLS + 1):
        delay = rng.uniform(0, MAX_DELAY * whole) if attempt < MAX_KILLS else FINISH_SECONDS
        code = _code(_child(SUBJECTS[name], folder, shared), delay)
        if code == 0:
            return counts
        if code is not None:
            raise Failure("resume failed", f"{name}: exit code {code} after {counts['kills']} kills")
        if attempt == MAX_KILLS:
            raise Failure("no end", f"{name} did not end within {FINISH_SECONDS:g} s after {counts['kills']} kills")
        counts.update({"kills": 1, f"kills of {name}": 1})
        saved = check_saved(folder, saved)
    raise AssertionError("unreachable")


def check_saved(folder: Path, before: dict[str, int]) -> dict[str, int]:
    """Return the step of the last checkpoint of each run; raise Failure if one was lost or cannot be read."""
    steps = {}
    for place in sorted(folder.glob("**/checkpoints")):
        if checkpoint.numbers(place):
            found = checkpoint.load(place / f"{max(checkpoint.numbers(place)):08d}")
            steps[str(place.relative_to(folder))] = found.state["progress"]["step"]
    lost = [name for name, step in before.items() if steps.get(name, -1) < step]
    if lost:
        raise Failure("progress lost", f"{lost[0]}: step {steps.get(lost[0])}, was {before[lost[0]]}")
    listed = run_command("runs", "--root", folder)
    if listed.code != 0 or listed.is_noticed:
        raise Failure("unreadable after a kill", f"subquad runs: {listed.err.strip() or listed.out.strip()[-200:]}")
    return steps


def compare(name: str, folder: Path, whole: Path) -> None:
    """Raise Failure unless two folders have the same files, parameters, metrics and results."""
    names, expected = ({str(path.relative_to(root)) for path in _files(root)} for root in (folder, whole))
    if names != expected:
        raise Failure("other files", f"{name}: {sorted(names ^ expected)[:4]}")
    for path in _files(whole):
        other = folder / path.relative_to(whole)
        if path.name in COMPARED and _timeless(path) != _timeless(other):
            raise Failure("another end", f"{name}: {path.relative_to(whole)} differs from that of an undisturbed run")
    for place in whole.glob("**/checkpoints"):
        one, other = (checkpoint.newest(root) for root in (place, folder / place.relative_to(whole)))
        if one is None or other is None or one.tensors.keys() != other.tensors.keys():
            raise Failure("another end", f"{name}: other tensors in {place.relative_to(whole)}")
        wrong = [key for key, tensor in one.tensors.items() if not torch.equal(tensor, other.tensors[key])]
        if wrong:
            raise Failure("another end", f"{name}: {wrong[0]} differs in {place.relative_to(whole)}")


def _files(root: Path) -> list[Path]:
    """Return the files that stay: neither hidden, nor events or checkpoints, whose names depend on the time."""
    found = (path for path in sorted(root.glob("**/*")) if path.is_file())
    return [path for path in found if not _IGNORED.search(str(path.relative_to(root)))]


def _timeless(path: Path) -> Any:
    """Return the content without what depends on the time or the folder."""
    if path.suffix != ".json":
        return path.read_bytes()
    content = json.loads(path.read_bytes())
    return {key: value for key, value in content.items() if not re.search("second|machine", key)}


COMPARED = ("metrics.jsonl", "result.json", "summary.json", "report.html")
_IGNORED = re.compile(r"(^|/)(\.|events/|checkpoints/|journal\.log|locks/)")
PART = Part("kills", "kills", 0.15, 400.0, case, prepare)
