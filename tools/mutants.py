"""Mutation testing: introduce small bugs into the library, one at a time, and count those that the tests detect.

    python tools/mutants.py [--count 200] [--seed 0] [--jobs 2] [--only attention.py] [--out FILE]

A mutant is the library with one expression changed (see `mutations.py`). First every test file runs once without a
mutation, while `executed_lines.py` records which lines of the library it executes. Then each mutant runs the test files
that execute its line, in order of duration, each in its own process. It is caught if a test fails, if the process
crashes, or if it takes far more processor time than without the change. A mutant in a line that no test executes
survives. The exit code is 1 if fewer than 90 % are caught, and 2 if the tests fail without a mutation.
"""

import argparse
import gc
import json
import os
import resource
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from executed_lines import Lines, record_lines, statement_lines
from mutations import Mutant, make_mutants
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "src/subquad"
SPARED_FILES = {
    # They decide which of several equal ways is the fastest: in which form, chunks and threads.
    "_engines/features/choose_form.py", "_engines/features/schedule.py",
    # Predicted errors, for the planner. The tests of planning, which time processes of their own, do not run here.
    "methods/error_estimate.py", "methods/series_error.py",
}  # fmt: skip
PLANNING_TESTS = {
    f"test_{name}.py"
    for name in (
        "auto", "cache", "calibration", "cost", "error", "far_range", "multipole_cost", "native_status", "plan",
        "sample", "sparse_cost",
    )
}  # fmt: skip
FILES = [LIBRARY / "attention.py", *(
    path for folder in ("methods", "_calls", "_engines") for path in sorted((LIBRARY / folder).rglob("*.py")))
]  # fmt: skip
CORE = [name for path in FILES if (name := path.relative_to(LIBRARY).as_posix()) not in SPARED_FILES]
# They compute in processes of their own, into which no mutant is planted.
RANK_TESTS = {"test_distributed.py", "test_sequence_parallel.py"}
TESTS = [ROOT / "tests/test_tiny.py", *(
    path for path in sorted((ROOT / "tests/subquad").glob("test_*.py"))
    if path.name not in PLANNING_TESTS | RANK_TESTS)
]  # fmt: skip
GOAL = 0.9
# Limit of processor time, on which other processes have no influence: a multiple of the time without a mutation.
TIMEOUT_FACTOR, TIMEOUT_SECONDS = 3, 20
HANG_SECONDS = 3600  # limit of wall-clock time, for a process that waits forever
MEMORY_BYTES = 8 << 30  # of address space; the tests need one eighth of it, except this one
LARGE_TEST = "tests/subquad/test_native.py::test_strides_beyond_32_bits"
OUTCOMES = {
    None: "not executed", 0: "survived", 1: "failed tests", -signal.SIGPROF: "time-outs", -signal.SIGALRM: "hangs",
}  # fmt: skip


class Recorded(NamedTuple):
    """What a test file did without a mutation."""

    tests: Path
    seconds: float  # of processor time, while recording
    lines: Lines


class Verdict(NamedTuple):
    mutant: Mutant
    code: int | None  # exit code of the last test file: 0 if all pass, None if none executes the line

    @property
    def outcome(self) -> str:
        return OUTCOMES.get(self.code, "crashes")


def module_of(path: Path) -> str:
    """Return the full name of the module in this file of a folder "subquad"."""
    parts = path.with_suffix("").parts
    inside = parts[len(parts) - 1 - parts[::-1].index("subquad") :]
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def label_of(path: Path) -> str:
    """Return the path inside the library, because files in different folders share names."""
    return path.relative_to(LIBRARY).as_posix() if path.is_relative_to(LIBRARY) else path.name


class Planted(SourceFileLoader):
    """Import hook that loads one module from a different source than its file."""

    def __init__(self, name: str, mutant: Mutant) -> None:
        super().__init__(name, str(mutant.path))
        self.source = mutant.source

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:  # The base method would use cached bytecode.
        return compile(self.source, self.path, "exec")


def start(body: Callable[[], int], seconds: float) -> int:
    """Fork a process that ends with the exit code that `body` returns, and return its id.

    The parent process has loaded torch but not the library.
    """
    if process := os.fork():
        return process
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF and SIGALRM end the process even if it hangs.
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
        code = body()
    finally:
        os._exit(code)


def test(path: Path) -> int:
    options = ["-x", "-q", "-p", "no:cacheprovider", "--deselect", LARGE_TEST]
    return int(import_module("pytest").main([str(path), *options]) != 0)


def test_mutant(path: Path, mutant: Mutant) -> int:
    sys.meta_path.insert(0, Planted(module_of(mutant.path), mutant))
    return test(path)


def test_recorded(path: Path, sources: Sequence[Path], out: Path) -> int:
    lines = record_lines(sources)
    code = test(path)
    sys.settrace(None)
    out.write_text(json.dumps({name: sorted(found) for name, found in lines.items()}))
    return code


def record(tests: Sequence[Path], sources: Sequence[Path]) -> list[Recorded]:
    """Run each test file without a mutation and return what it did, in order of duration; empty if one fails."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.json"
        for path in tests:
            process = start(partial(test_recorded, path, sources, out), HANG_SECONDS)
            _, status, usage = os.wait4(process, 0)
            if status != 0:
                limits = f"{HANG_SECONDS} s and {MEMORY_BYTES >> 30} GiB of address space"
                print(f"Fails without any mutation, within {limits}: python -m pytest {path}", file=sys.stderr)
                return []
            lines = {name: set(numbers) for name, numbers in json.loads(out.read_text()).items()}
            found.append(Recorded(path, usage.ru_utime + usage.ru_stime, lines))
            print(f"{found[-1].seconds:.1f} s of processor time: {path.name}", flush=True)
    return sorted(found, key=lambda recorded: recorded.seconds)


def run(mutants: Sequence[Mutant], recorded: Sequence[Recorded], jobs: int) -> Iterator[Verdict]:
    """Yield the verdict on each mutant, running `jobs` test files at a time."""

    def reaching(mutant: Mutant) -> list[Recorded]:
        lines = statement_lines(mutant.path.read_bytes(), mutant.line)
        return [each for each in recorded if lines & each.lines[str(mutant.path)]]

    running: dict[int, tuple[Mutant, list[Recorded]]] = {}
    waiting = deque((mutant, reaching(mutant)) for mutant in mutants)
    yield from (Verdict(mutant, None) for mutant, tests in waiting if not tests)
    waiting = deque((mutant, tests) for mutant, tests in waiting if tests)
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant, (first, *later) = waiting.popleft()
            seconds = max(TIMEOUT_SECONDS, TIMEOUT_FACTOR * first.seconds)
            running[start(partial(test_mutant, first.tests, mutant), seconds)] = mutant, later
        process, status = os.wait()
        mutant, later = running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and later:
            waiting.appendleft((mutant, later))
        else:
            yield Verdict(mutant, code)


def shown(verdicts: Iterator[Verdict], total: int) -> Iterator[Verdict]:
    """Pass the verdicts through and show progress: a bar on a terminal, otherwise a line for each."""
    terminal = sys.stdout.isatty()
    # Do not refresh in a thread: a process forked meanwhile would inherit its locks.
    with Progress(*Progress.get_default_columns(), auto_refresh=False, disable=not terminal) as bar:
        task = bar.add_task("mutants", total=total)
        for number, verdict in enumerate(verdicts, 1):
            mutant = verdict.mutant
            if terminal:
                bar.update(task, advance=1, refresh=True)
            else:
                print(f"{number}/{total} {label_of(mutant.path)}:{mutant.line} {verdict.outcome}", flush=True)
            yield verdict


def report(verdicts: Sequence[Verdict], seed: int) -> str:
    """Return a Markdown report: how many mutants were caught, by file and by outcome, and the survivors."""
    of = Counter(label_of(mutant.path) for mutant, _ in verdicts)
    caught = Counter(label_of(mutant.path) for mutant, code in verdicts if code)
    by = Counter(verdict.outcome for verdict in verdicts if verdict.code)
    lines = [
        "# Mutants\n",
        f"Caught: {caught.total()} of {of.total()}, {caught.total() / of.total():.1%}, with seed {seed}; "
        f"the goal is {GOAL:.0%}. By {', '.join(f'{name}: {count}' for name, count in by.most_common())}.\n",
        "| file | caught | of |\n|---|---:|---:|",
        *(f"| {name} | {caught[name]} | {of[name]} |" for name in of),
    ]
    survivors = [
        f"{label_of(mutant.path)}:{mutant.line}{'' if code == 0 else ' (not executed)'}\n"
        f"    {mutant.before}\n -> {mutant.after}"
        for mutant, code in verdicts
        if not code
    ]
    return "\n".join([*lines, *(["\nSurvivors:\n\n```text", *survivors, "```"] if survivors else [])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the selection (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel processes (default: %(default)s)")
    parser.add_argument("--only", metavar="FILE", choices=CORE, help="mutate this file only")
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the report to this Markdown file")
    options = parser.parse_args()
    if min(options.count, options.jobs) < 1:
        parser.error(f"--count, --jobs: expected positive integers, got {options.count} and {options.jobs}")
    out = options.out and options.out.resolve()
    os.chdir(ROOT)
    sys.dont_write_bytecode = True  # Leave the source tree unchanged.
    with tempfile.TemporaryDirectory() as os.environ["HYPOTHESIS_STORAGE_DIRECTORY"]:
        for name in ("torch", "torch._dynamo", "numpy", "pytest", "hypothesis"):  # Import once, before forking.
            import_module(name)
        sys.modules["torch"].set_num_threads(1)  # A forked process has no other threads.
        gc.freeze()  # A forked process does not examine what it has inherited.
        paths = [LIBRARY / name for name in ([options.only] if options.only else CORE)]
        if not (recorded := record(TESTS, paths)):
            return 2
        mutants = make_mutants(paths, options.count, options.seed)
        verdicts = sorted(shown(run(mutants, recorded, options.jobs), len(mutants)), key=lambda verdict: verdict.mutant)
    text = report(verdicts, options.seed)
    print(text)
    if out:
        out.write_text(text + "\n")
    return int(sum(bool(code) for _, code in verdicts) < GOAL * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
