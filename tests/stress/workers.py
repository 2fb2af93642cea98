"""Run cases in processes that may crash or hang, and record what happened to each.

A process that has imported everything forks one worker per lane. A worker announces each case before it runs it, so
that the process that watches knows the case during which a worker died or exceeded the time limit; it then kills the
worker with everything that it started, and starts another one for the next case of the lane.
"""

import faulthandler
import json
import os
import re
import resource
import select
import shutil
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from stress.parts import Failure, Part

MEMORY_BYTES = 16 << 30  # of address space, most of which libraries only reserve
STACK_SECONDS = 0.5  # to write the stacks of a worker that hangs
POLL_SECONDS = 0.2
PREPARATION_SECONDS = 600.0


class Found(NamedTuple):
    """A failure of a case."""

    part: str
    case: int
    kind: str
    detail: str


@dataclass
class Tally:
    """What became of the cases of a part."""

    part: Part
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Found] = field(default_factory=list)
    cases: int = 0
    seconds: float = 0.0


@dataclass
class Worker:
    """A process that runs the cases of one lane."""

    process: int
    pipe: int
    lane: int
    cases: Iterator[int]
    log: Path
    case: int | None = None
    begun: float = field(default_factory=time.monotonic)
    text: bytes = b""


def run_cases(
    part: Part, cases: Sequence[int], seconds: float, folder: Path, jobs: int = 1,
    report: Callable[[Tally], None] = lambda tally: None,
) -> Tally:  # fmt: skip
    """Run cases for some seconds, at least one in each of `jobs` lanes, and return what became of them.

    Args:
        part: The part that the cases belong to.
        cases: Their numbers.
        seconds: No case begins later.
        folder: For files; `part.prepare` writes into it first, in a process of its own.
        jobs: The number of workers.
        report: Called several times per second.
    """
    begin, tally = time.monotonic(), Tally(part)
    (folder / "shared").mkdir(parents=True)

    def prepare(case: int, shared: Path) -> Counter[str]:
        part.prepare(shared)
        return Counter()

    first = replace(part, case=prepare, limit_seconds=PREPARATION_SECONDS)
    _watch(first, [iter([cases[0]])], begin, folder, tally, report)
    if not tally.failures:
        tally.cases = 0
        lanes = [iter(cases[lane::jobs]) for lane in range(jobs)]
        _watch(part, lanes, time.monotonic() + seconds, folder, tally, report)
    tally.seconds = time.monotonic() - begin
    return tally


def _watch(
    part: Part, lanes: Sequence[Iterator[int]], end: float, folder: Path, tally: Tally, report: Callable[[Tally], None]
) -> None:
    """Start a worker per lane and handle their messages, deaths and hangs, until all lanes are done."""
    workers = [_start(part, cases, lane, folder, end) for lane, cases in enumerate(lanes)]
    try:
        while workers:
            ready, _, _ = select.select([worker.pipe for worker in workers], [], [], POLL_SECONDS)
            for worker in list(workers):
                over = _read(worker, tally) if worker.pipe in ready else None
                if over is None and worker.case is not None and time.monotonic() - worker.begun > part.limit_seconds:
                    over = _hung(worker, part)
                if over is None:
                    continue
                workers.remove(worker)
                _end(worker)
                if over:  # It died or hung during a case.
                    tally.cases += 1
                    tally.failures.append(Found(part.name, worker.case or 0, *over))
                if over and time.monotonic() < end:
                    workers.append(_start(part, worker.cases, worker.lane, folder, end))
            report(tally)
    finally:
        for worker in workers:  # after Ctrl-C
            _end(worker)


def _start(part: Part, cases: Iterator[int], lane: int, folder: Path, end: float) -> Worker:
    """Fork a worker that runs cases until the end of the time."""
    reader, writer = os.pipe()
    log = folder / f"lane-{lane}.log"
    process = os.fork()
    if process:
        os.close(writer)
        return Worker(process, reader, lane, cases, log)
    code = 1
    try:
        os.close(reader)
        os.setsid()  # so that everything that it starts can be killed with it
        _silence(log)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _work(part, cases, folder / "shared", folder / f"lane-{lane}", writer, end)
        code = 0
    finally:
        os._exit(code)


def _silence(log: Path) -> None:
    """Send all output to a file, where a crash or a hang leaves the stacks."""
    handle, null = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for stream, target in ((0, null), (1, handle), (2, handle)):
        os.dup2(target, stream)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2)


def _work(part: Part, cases: Iterator[int], shared: Path, place: Path, pipe: int, end: float) -> None:
    for number, case in enumerate(cases):
        if number and time.monotonic() > end:
            return
        os.ftruncate(2, 0)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        os.chdir(place)
        _send(pipe, case=case)
        try:
            _send(pipe, counts=run_case(part, case, shared))
        except Failure as failure:
            _send(pipe, kind=failure.kind, detail=failure.detail)
        except Exception as error:
            _send(pipe, kind=type(error).__name__, detail=described(error))


def run_case(part: Part, case: int, shared: Path) -> Counter[str]:
    """Run one case in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_, **__: None
        return part.case(case, shared)


def described(error: BaseException) -> str:
    """Return the message of an exception, and the line of code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}: {type(error).__name__}: {error}"


def _send(pipe: int, **message: object) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")  # Short enough to be written at once.


def _read(worker: Worker, tally: Tally) -> tuple[str, str] | tuple[()] | None:
    """Handle the messages of a worker. Return None if it still works, () if it is done, else how it failed."""
    data = os.read(worker.pipe, 1 << 16)
    *lines, worker.text = (worker.text + data).split(b"\n")
    for message in map(json.loads, lines):
        if "case" in message:
            worker.case, worker.begun = message["case"], time.monotonic()
            next(worker.cases)  # The process has a copy of its own.
            continue
        tally.cases += 1
        tally.counts.update(message.get("counts", {}))
        if "kind" in message:
            tally.failures.append(Found(tally.part.name, worker.case or 0, message["kind"], message["detail"]))
        worker.case = None
    if data:
        return None
    code = os.waitstatus_to_exitcode(os.waitpid(worker.process, 0)[1])
    if code == 0:
        return ()
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"crash, {name}", _stack(worker.log)


def _hung(worker: Worker, part: Part) -> tuple[str, str]:
    """Ask a worker for the stacks of its threads."""
    os.kill(worker.process, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    return "hang", f"no result after {part.limit_seconds:g} s; {_stack(worker.log)}"


def _stack(log: Path) -> str:
    """Return the innermost places of the stacks in a log, or its last line."""
    text = log.read_text(errors="replace")
    places = re.findall(r"most recent call first\):\n((?:  File .*\n?)+)", text)
    if places:
        inner = [re.findall(r'/([^/"]+)", line (\d+) in (\S+)', stack)[:3] for stack in places]
        return "; ".join(" < ".join(f"{file}:{line} {name}" for file, line, name in stack) for stack in inner)
    return (text.strip().splitlines() or ["no output"])[-1]


def _end(worker: Worker) -> None:
    """Kill a worker and everything that it started."""
    os.close(worker.pipe)
    with suppress(ProcessLookupError):
        os.killpg(worker.process, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(worker.process, 0)
