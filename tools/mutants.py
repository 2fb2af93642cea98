"""Mutation testing: introduce small bugs into the library, one at a time, and count those that the tests detect.

    python tools/mutants.py [--count 200] [--seed 0] [--jobs 2] [--only attention.py] [--out FILE]

A mutant is the library with one expression changed (see `mutations.py`). Each mutant runs the fast tests in its own
process and, if it survives, the slow tests. It is caught if a test fails, if the process crashes, or if it takes far
longer than without the change. The exit code is 1 if fewer than 90 % are caught, and 2 if the tests fail without a
mutation.
"""

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType

from mutations import Mutant, make_mutants
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "src/subquad"
# Not mutated: code that affects only speed and predicted cost, and native calls, which tests compare to torch.
SPARED_FILES = {
    "methods/error_estimate.py", "methods/series_error.py", "_engines/decoder.py",
    *(f"_engines/features/{name}.py" for name in (
        "choose_form", "double_backward", "fused", "native_call", "operators", "schedule")),
}  # fmt: skip
FILES = [LIBRARY / "attention.py", *(
    path for folder in ("methods", "_calls", "_engines") for path in sorted((LIBRARY / folder).rglob("*.py")))
]  # fmt: skip
CORE = [name for path in FILES if (name := path.relative_to(LIBRARY).as_posix()) not in SPARED_FILES]
QUICK = ["tests/test_tiny.py"]
SLOW = [
    f"tests/subquad/test_{name}.py"
    for name in (
        "attention",
        "decoding",
        "degenerate",
        "export",
        "features",
        "forms",
        "masks",
        "multipole",
        "sdpa",
        "state",
        "window",
        "block_sparse",
    )
]
GOAL = 0.9
TIMEOUT_FACTOR, TIMEOUT_SECONDS = 5, 20  # Time limit: this multiple of the normal time, at least this many seconds.
MEMORY_BYTES = 8 << 30  # of address space; the tests need one eighth of it
OUTCOMES = {0: "survived", 1: "quick tests", 2: "slow tests", -signal.SIGALRM: "time-out"}  # by exit code

Stages = Sequence[tuple[list[str], float]]  # tests, and their time limit in seconds


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


def start(mutant: Mutant | None, stages: Stages) -> int:
    """Fork a process that runs the tests of each stage until one fails, and return its id.

    The exit code is the number of the failing stage, or 0. The parent process has loaded torch but not the library.
    """
    if process := os.fork():
        return process

    def fails(tests: list[str], seconds: float) -> bool:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process even if it hangs.
        return import_module("pytest").main([*tests, "-x", "-q", "-p", "no:cacheprovider"]) != 0

    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        if mutant is not None:
            sys.meta_path.insert(0, Planted(module_of(mutant.path), mutant))
        code = next((number for number, stage in enumerate(stages, 1) if fails(*stage)), 0)
    finally:
        os._exit(code)


def run(mutants: Sequence[Mutant], stages: Stages, jobs: int) -> Iterator[tuple[Mutant, int]]:
    """Yield each mutant with its exit code, running `jobs` at a time."""
    waiting, running = list(reversed(mutants)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[start(mutant, stages)] = mutant
        process, status = os.wait()
        yield running.pop(process), os.waitstatus_to_exitcode(status)


def measured(groups: Sequence[list[str]]) -> Stages:
    """Return each group of tests with its time limit, from a run without mutations; empty if that run fails."""
    stages = []
    for tests in groups:
        begin = time.monotonic()
        start(None, [(tests, 600)])
        if os.wait()[1] != 0:
            print("They fail, or take too long, without any mutation: python -m pytest", *tests, file=sys.stderr)
            return []
        seconds = time.monotonic() - begin
        print(f"{seconds:.1f} s without a mutation: {' '.join(tests)}", flush=True)
        stages.append((tests, max(TIMEOUT_SECONDS, TIMEOUT_FACTOR * seconds)))
    return stages


def shown(results: Iterator[tuple[Mutant, int]], total: int) -> Iterator[tuple[Mutant, int]]:
    """Pass the results through and show progress: a bar on a terminal, otherwise a line for each."""
    terminal = sys.stdout.isatty()
    # Do not refresh in a thread: a process forked meanwhile would inherit its locks.
    with Progress(*Progress.get_default_columns(), auto_refresh=False, disable=not terminal) as bar:
        task = bar.add_task("mutants", total=total)
        for number, (mutant, code) in enumerate(results, 1):
            if terminal:
                bar.update(task, advance=1, refresh=True)
            else:
                outcome = OUTCOMES.get(code, "crash")
                print(f"{number}/{total} {label_of(mutant.path)}:{mutant.line} {outcome}", flush=True)
            yield mutant, code


def report(results: Sequence[tuple[Mutant, int]], seed: int) -> str:
    """Return a Markdown report: how many mutants were caught, by file and by stage, and the survivors."""
    of, caught = (Counter(label_of(m.path) for m, code in results if code or every) for every in (True, False))
    by = Counter(OUTCOMES.get(code, "crash") for _, code in results if code)
    survivors = [mutant for mutant, code in results if not code]
    share = caught.total() / of.total()
    lines = [
        "# Mutants\n",
        f"Caught: {caught.total()} of {of.total()}, {share:.1%}, with seed {seed}; the goal is {GOAL:.0%}. "
        f"By {', '.join(f'{name}: {count}' for name, count in by.most_common())}.\n",
        "| file | caught | of |\n|---|---:|---:|",
        *(f"| {name} | {caught[name]} | {of[name]} |" for name in of),
    ]
    if survivors:
        lines += ["\nSurvivors:\n\n```text"]
        lines += [f"{label_of(m.path)}:{m.line}\n    {m.before}\n -> {m.after}" for m in survivors] + ["```"]
    return "\n".join(lines)


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
        if not (stages := measured([tests for tests in (QUICK, [*filter(os.path.exists, SLOW)]) if tests])):
            return 2
        paths = [LIBRARY / name for name in ([options.only] if options.only else CORE)]
        mutants = make_mutants(paths, options.count, options.seed)
        results = sorted(shown(run(mutants, stages, options.jobs), len(mutants)))
    text = report(results, options.seed)
    print(text)
    if out:
        out.write_text(text + "\n")
    return int(sum(code != 0 for _, code in results) < GOAL * len(results))


if __name__ == "__main__":
    sys.exit(main())
