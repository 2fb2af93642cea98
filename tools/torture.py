"""Torture the library and the lab: random cases of several kinds for a time budget, and a table at the end.

    python tools/torture.py [--minutes 60] [--seed 0] [--only calls,kills] [--case NUMBER] [--jobs 2] [--out FILE]

calls      random calls of `attention` against the definition in float64, with kernels and without
bits       a row alone and in a batch, 1 and 2 threads, edits of the future: not one bit may differ
kills      SIGKILL during training, sweeps, reports and calibration; the end must be that of an undisturbed run
flips      flipped bits and cut ends in every file of runs and caches; none may be used in silence
files      hostile files for every reader: refused in one line, nothing executed
threads    concurrent calls, continuations of one state, forks after use, data loaders
faults     a rank that ends, or calls with other shapes, another dtype or method: an error on every rank, no hang

The parts follow each other; each runs in `--jobs` processes with one thread each, except where threads are tested. A
case has a time limit, and may crash. Each failure is printed with the command that repeats it. The exit code is 1 if
there is one.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # as in the Makefile, for the commands that repeat
os.environ["HF_HUB_OFFLINE"] = "1"

from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn  # noqa: E402

from stress import bits, calls, faults, files, flips, kills, threads  # noqa: E402
from stress.parts import Failure, Part  # noqa: E402
from stress.workers import Found, Tally, run_case, run_cases  # noqa: E402

PARTS = {module.PART.name: module.PART for module in (calls, bits, kills, flips, files, threads, faults)}
PRELOADED = ("torch.utils.tensorboard", "optuna", "matplotlib.pyplot", "scipy.sparse", "soundfile", "safetensors.torch")
CASES_PER_SEED = 10_000_000
LINE_SECONDS = 30.0  # between lines of progress, without a terminal
MAX_SHOWN = 20  # failures of a part that are printed


class Display:
    """Progress: a bar on a terminal, else a line from time to time; and each failure when it is found."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.is_terminal = bar, sys.stdout.isatty()
        self.task: TaskID = bar.add_task("")
        self.line, self.shown = time.monotonic(), 0

    def begin(self) -> None:
        self.line, self.shown = time.monotonic(), 0

    def __call__(self, tally: Tally) -> None:
        for failure in tally.failures[self.shown :]:
            if self.shown < MAX_SHOWN:
                print(described_failure(failure), flush=True)
            self.shown += 1
        part = tally.part
        text = f"{part.name}: {tally.counts[part.unit]:,} {part.unit}, {len(tally.failures)} failures"
        if self.is_terminal:
            self.bar.update(self.task, description=text, refresh=True)
        elif time.monotonic() - self.line > LINE_SECONDS:
            self.line = time.monotonic()
            print(text, flush=True)


def described_failure(failure: Found) -> str:
    """Return the failure and the command that repeats it."""
    repeat = f"python tools/torture.py --only {failure.part} --case {failure.case}"
    return f"FAILED {failure.part}, {failure.kind}: {failure.detail}\n    repeat: {repeat}"


def report(tallies: Sequence[Tally], seed: int) -> str:
    """Return a Markdown page: a table of the parts, the notes of each, and the failures."""
    lines = [
        f"# Torture, seed {seed}\n",
        "| part | counted | cases | seconds | failures | by kind |\n|---|---:|---:|---:|---:|---|",
    ]
    for tally in tallies:
        kinds = ", ".join(f"{kind}: {n}" for kind, n in Counter(x.kind for x in tally.failures).most_common())
        unit, count = tally.part.unit, tally.counts[tally.part.unit]
        lines.append(
            f"| {tally.part.name} | {count:,} {unit} | {tally.cases:,} | {tally.seconds:.0f} | {len(tally.failures)} | "
            f"{kinds} |"
        )
    for tally in tallies:
        notes = {name: n for name, n in sorted(tally.counts.items()) if name != tally.part.unit}
        if notes:
            lines.append(f"\n{tally.part.name}:\n")
            lines += [f"- {name}: {n:,}" for name, n in notes.items()]
    found = [failure for tally in tallies for failure in tally.failures]
    if found:
        lines += ["\n```text", *map(described_failure, found), "```"]
    return "\n".join(lines)


def repeat_case(part: Part, case: int) -> int:
    """Run one case in this process, with its output; return the exit code."""
    with tempfile.TemporaryDirectory() as name:
        shared, place = Path(name) / "shared", Path(name) / "place"
        shared.mkdir()
        place.mkdir()
        os.chdir(place)
        try:
            part.prepare(shared)
            print(dict(run_case(part, case, shared)))
        except Failure as failure:
            print(described_failure(Found(part.name, case, failure.kind, failure.detail)))
            return 1
        finally:
            os.chdir(ROOT)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the cases (default: %(default)s)")
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help="comma-separated parts (default: all)")
    parser.add_argument("--case", type=int, help="repeat this case of one part, without time limit")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel processes (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the table to this Markdown file")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {unknown[0]!r}")
    if options.minutes <= 0 or options.jobs < 1:
        parser.error(f"--minutes, --jobs: expected positive numbers, got {options.minutes} and {options.jobs}")
    if options.case is not None and len(names) != 1:
        parser.error("--case: expected the name of its part in --only")
    out = options.out and options.out.resolve()
    for name in PRELOADED:  # once, before forking
        import_module(name)
    sys.modules["torch"].set_num_threads(1)  # A forked process has no other threads.
    if options.case is not None:
        return repeat_case(PARTS[names[0]], options.case)
    tallies = torture([PARTS[name] for name in names], options.minutes * 60, options.seed, options.jobs)
    text = report(tallies, options.seed)
    print(text)
    if out:
        out.write_text(text + "\n")
    return int(any(tally.failures for tally in tallies))


def torture(parts: Sequence[Part], seconds: float, seed: int, jobs: int) -> list[Tally]:
    """Run each part for its share of the time."""
    cases = range(seed * CASES_PER_SEED, (seed + 1) * CASES_PER_SEED)
    shares = sum(part.share for part in parts)
    tallies = []
    with (
        tempfile.TemporaryDirectory() as name,
        # Do not refresh in a thread: a process forked meanwhile would inherit its locks.
        Progress(TextColumn("{task.description}"), TimeElapsedColumn(), auto_refresh=False) as bar,
    ):
        bar.disable = not sys.stdout.isatty()
        display = Display(bar)
        os.environ["SUBQUAD_CACHE"] = str(Path(name) / "cache")
        for part in parts:
            display.begin()
            own = seconds * part.share / shares
            tallies.append(run_cases(part, cases, own, Path(name) / part.name, jobs, display))
            display(tallies[-1])
            print(f"{part.name}: done, {tallies[-1].counts[part.unit]:,} {part.unit}", flush=True)
    return tallies


if __name__ == "__main__":
    sys.exit(main())
