"""Read the page of `subquad serve` with many clients while a run trains, and measure what that costs the training.

    python benchmarks/serve.py [--readers 200] [--seconds 30] [--pairs 4]

A run trains during the whole measurement, and a server follows it. Periods without and with readers alternate, and the
steps per second of each are read from the log. Each reader does what a browser does: it opens the page, then listens to
the events. The readers run on the same machine, at the low priority of the server. Any failed connection, status other
than 200, cut page or missing event counts as an error.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PAUSE_SECONDS = 3.0  # after the start of a period, before its steps are counted
WARM_STEPS = 20
SPREAD_SECONDS = 2.0  # over which the readers arrive
TRAINING = [
    "--model=transformer", "--width=64", "--layers=1", "--heads=4", "--context=32", "--batch=16", "--steps=1000000",
    "--evaluate-every=1000000",
]  # fmt: skip


class Period(NamedTuple):
    """What happened in one period."""

    readers: int
    steps_per_second: float
    counts: dict[str, int]


async def request(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """Return a connection after the head of its answer, and the head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise OSError(f"status {head[:30]!r}")
    return reader, writer, head


async def load(port: int, counts: Counter[str]) -> None:
    """Read the whole page."""
    reader, writer, head = await request(port, "/")
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    content = await reader.readexactly(int(length[1]))
    writer.close()
    counts["pages"] += 1
    counts["page bytes"] += len(content)


async def read(port: int, delay: float, end: float, counts: Counter[str]) -> None:
    """Open the page, and listen to the events until the end."""
    await asyncio.sleep(delay)
    last, heard = 0, 0
    try:
        await load(port, counts)
        reader, writer, _ = await request(port, "/events")
        while (now := time.monotonic()) < end:
            try:
                line = await asyncio.wait_for(reader.readline(), end - now)
            except TimeoutError:
                continue
            if not line:
                raise OSError("the events ended")
            if line.startswith(b"data: "):
                heard += 1
                step = json.loads(line[6:])["step"]
                counts["errors"] += step < last  # Progress never goes back.
                last = step
        writer.close()
    except (OSError, asyncio.IncompleteReadError, AssertionError) as error:
        counts["errors"] += 1
        counts[f"{type(error).__name__}: {error}"] += 1
    counts["events"] += heard
    counts["errors"] += heard < 2
    counts["readers with growing steps"] += heard >= 2


async def read_all(port: int, readers: int, seconds: float) -> None:
    """Run all readers, and print what they counted as JSON."""
    print("ready", flush=True)
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    delays = [SPREAD_SECONDS * i / readers for i in range(readers)]
    await asyncio.gather(*(read(port, delay, end, counts) for delay in delays))
    print(json.dumps(counts))


def steps_of(log: Path) -> int:
    """Return the last step of a log; its last line may be incomplete."""
    lines = log.read_bytes()[-4096:].split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def period(log: Path, port: int, readers: int, seconds: float) -> Period:
    clients = None
    if readers:
        arguments = ["--port", str(port), "--readers", str(readers), "--seconds", str(seconds + PAUSE_SECONDS)]
        clients = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, preexec_fn=idle)
        assert clients.stdout is not None and clients.stdout.readline() == b"ready\n"
    time.sleep(PAUSE_SECONDS)
    begin, first = time.monotonic(), steps_of(log)
    time.sleep(seconds - 1.0)  # Readers that end do not count.
    speed = (steps_of(log) - first) / (time.monotonic() - begin)
    counts = {} if clients is None else json.loads(clients.communicate(timeout=120)[0])
    return Period(readers, speed, counts)


def idle() -> None:
    os.nice(15)


def measured(readers: int, seconds: float, pairs: int) -> list[Period]:
    """Train and serve, and return periods without and with readers in turn."""
    command = [sys.executable, "-m", "subquad_lab"]
    processes = []
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name) / "runs"
        try:
            train = [*command, "train", "language", *TRAINING, "--out", str(runs)]
            processes.append(subprocess.Popen(train, stderr=subprocess.DEVNULL))
            log = runs / "language-001" / "metrics.jsonl"
            while not log.exists() or steps_of(log) < WARM_STEPS:
                if processes[0].poll() is not None:
                    raise SystemExit("the training ended early")
                time.sleep(0.5)
            serve = [*command, "serve", "--port", "0", "--root", str(runs)]
            processes.append(subprocess.Popen(serve, stdout=subprocess.PIPE, text=True))
            port = int(processes[-1].stdout.readline().rpartition(":")[2])
            return [period(log, port, count, seconds) for _ in range(pairs) for count in (0, readers)]
        finally:
            for process in processes:
                process.terminate()  # SIGINT is ignored by processes of a background job.
            for process in processes:
                process.wait(60)


def page(periods: list[Period], seconds: float) -> str:
    from results import machine, today  # It imports torch, for which the readers need not wait.

    lines = ["| readers | steps/s | pages read | MB per page | events | errors |", "|---:|---:|---:|---:|---:|---:|"]
    for found in periods:
        counts = Counter(found.counts)
        size = counts["page bytes"] / max(1, counts["pages"]) / 1e6
        cells = [counts["pages"], f"{size:.2f}", counts["events"], counts["errors"]] if found.readers else [""] * 4
        lines.append("| " + " | ".join(map(str, [found.readers, f"{found.steps_per_second:.2f}", *cells])) + " |")
    without, with_ = (
        statistics.median(p.steps_per_second for p in periods if bool(p.readers) == flag) for flag in (False, True)
    )
    errors = sum(found.counts.get("errors", 0) for found in periods)
    verdict = (
        f"Periods of {seconds:.0f} s in turn. "
        f"Median {without:.2f} steps/s without readers and {with_:.2f} with them: "
        f"{100 * (with_ / without - 1):+.1f} %. Errors: {errors}."
    )
    return "\n\n".join([f"# Readers of a live page, {today()}", machine(), "\n".join(lines), verdict]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure what readers of a live page cost; writes benchmarks/results/."
    )
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--port", type=int, help="only read from the server on this port, and print counts")
    given = parser.parse_args()
    if given.port is not None:
        asyncio.run(read_all(given.port, given.readers, given.seconds))
        return
    from results import write_page

    periods = measured(given.readers, given.seconds, given.pairs)
    write_page("serve", page(periods, given.seconds), [found._asdict() for found in periods])


if __name__ == "__main__":
    main()
