"""`subquad demo`: the lab in some minutes, stage by stage, each in a process of its own.

What a stage has made stays in the folder: stopped and started again, the demo goes on where it was.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from subquad_lab import RunError, UsageError
from subquad_lab.options.fields import config_from, presets, read
from subquad_lab.system.files import locked, write_whole
from subquad_lab.training.interruption import Interrupted, Interruption
from subquad_lab.training.seeds import Series, finished, train

EXPERIMENTS = ("language", "images", "graphs", "speech")
PAGE, PLAN, THEORY, RUNS = "report.html", "plan.txt", "verify.json", "runs"
PROCESS = (sys.executable, "-P", "-m", "subquad_lab.commands.demo")  # of a stage
LOOK_SECONDS = 0.25  # between two looks at a stage


@dataclass
class Stage:
    """`make` writes into the folder; `found` says what it came to, or nothing while it is not done."""

    name: str
    what: str
    make: Callable[[Path], None]
    found: Callable[[Path], str | None]
    seconds: float = field(default=0.0, compare=False)
    state: str = "waits"
    line: str = ""


def run(out: str) -> None:
    """All stages, with an overview; then the path of the page."""
    folder = Path(out)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot make {folder}: {error.strerror}") from error
    stages = all_stages()
    console = Console()
    with (
        locked(folder),
        Interruption() as interruption,
        Live(console=console, refresh_per_second=4, transient=True) as live,
    ):
        for i, stage in enumerate(stages, 1):
            follow(stage, folder, interruption, (lambda: live.update(table(stages))) if console.is_terminal else None)
            if not console.is_terminal:
                print(f"{i} of {len(stages)}, {stage.name}: {stage.line}  ({stage.seconds:.0f} s)", flush=True)
    if console.is_terminal:
        console.print(table(stages))
    print(folder / PAGE)


def follow(stage: Stage, folder: Path, interruption: Interruption, show: Callable[[], None] | None) -> None:
    """One stage in a process of its own, unless it is done."""
    done = stage.found(folder)
    if done is not None:
        stage.state, stage.line = "done before", done
        return
    log, begin = folder / "logs" / f"{stage.name}.log", time.monotonic()
    stage.state = "runs"
    command = [*PROCESS, stage.name, str(folder), str(os.getpid())]
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT,
                                                  start_new_session=True) as process:  # fmt: skip
        try:
            while process.poll() is None:
                time.sleep(LOOK_SECONDS)
                if interruption.number is not None:
                    raise Interrupted(interruption.number)
                stage.seconds, stage.line = time.monotonic() - begin, last_line(log)
                if show is not None:
                    show()
        except BaseException:
            process.send_signal(signal.SIGINT)  # A training run saves itself.
            raise
    stage.seconds = time.monotonic() - begin
    found = stage.found(folder)
    if process.returncode != 0 or found is None:
        raise RunError(f"{stage.name}: {last_line(log) or 'it ended without a word'} (all of it in {log})")
    stage.state, stage.line = "done", found


def last_line(log: Path) -> str:
    lines = log.read_bytes()[-2000:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def table(stages: list[Stage]) -> Table:
    found = Table("stage", "", "s", "found", title="subquad demo")
    for stage in stages:
        style = {"runs": "bold", "waits": "dim"}.get(stage.state)
        seconds = f"{stage.seconds:.0f}" if stage.seconds else ""
        found.add_row(stage.name, stage.state, seconds, escape(stage.line or stage.what), style=style)
    return found


# --- The stages ---------------------------------------------------------------------------------------------------


def all_stages() -> list[Stage]:
    trained = [
        Stage(name, f"a small model: subquad train {name} --preset quick",
              lambda out, name=name: learn(name, out), lambda out, name=name: learned(name, out))
        for name in EXPERIMENTS
    ]  # fmt: skip
    return [
        Stage("plan", "the quickest method for 32,768 tokens on this machine", plan, planned),
        Stage("verify", "22 claims of the theory", verify, verified),
        *trained,
        Stage("report", "one page about all of it", report, reported),
    ]


def plan(out: Path) -> None:
    from subquad_lab.commands.plan import run as print_plan

    sizes = dict(query_length=32_768, heads=8, head_dim=16)
    write_printed(out / PLAN, lambda: print_plan(sizes, 0.05, 0.5, None, True, False, "swap", "float32", False))  # type: ignore[arg-type]


def planned(out: Path) -> str | None:
    """The sentence after the table."""
    path = out / PLAN
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line for line in reversed(lines) if line.strip() and not line.startswith("Not shown")), None)


def verify(out: Path) -> None:
    from subquad_lab.commands.verify import run as print_claims

    write_printed(out / THEORY, lambda: print_claims([], True, str(out / "theory"), 0, False))


def verified(out: Path) -> str | None:
    from subquad_lab.report import claims

    try:
        rows = claims(out / THEORY)
    except UsageError:  # It is not there, or not whole, or of another version.
        return None
    return f"{sum(row['verdict'] != 'fails' for row in rows)} of {len(rows)} claims hold"


def write_printed(path: Path, call: Callable[[], None]) -> None:
    """What a command prints; also if it then says that something failed, as `verify` does of a claim."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            call()
        except RunError:
            write_whole(path, said.getvalue().encode())
            raise
    write_whole(path, said.getvalue().encode())


def learn(name: str, out: Path) -> None:
    train(name, config_from(name, read(presets(name)["quick"]), "quick"), out / RUNS, name)


def learned(name: str, out: Path) -> str | None:
    config = config_from(name, read(presets(name)["quick"]), "quick")
    try:
        return in_words(finished(out / RUNS / name, config))
    except UsageError:  # It is not there, or not finished.
        return None


def in_words(series: Series) -> str:
    over = f" over {len(series.runs)} seeds" if len(series.runs) > 1 else ""
    figures = ", ".join(f"{name.replace('_', '-')} {series.shown('test', name)}" for name in series.results[0]["test"])
    return f"test{over}: {figures}"


def report(out: Path) -> None:
    from subquad_lab.report import write

    write([out / RUNS], out / RUNS, out / PAGE, out / THEORY)


def reported(out: Path) -> str | None:
    """Written anew if anything is newer."""
    page = out / PAGE
    if not page.is_file():
        return None
    newest = max(path.stat().st_mtime for path in out.rglob("*.json"))
    return str(page) if page.stat().st_mtime >= newest else None


def stop_with_parent(parent: int) -> None:
    """A stage whose demo was killed ends too, or the next demo would find it at work.

    The demo says who it is: by the time that a stage has imported all it needs, its parent may be another.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """In the process of a stage."""
    name, folder, parent = sys.argv[1:]
    stop_with_parent(int(parent))
    stage = next(stage for stage in all_stages() if stage.name == name)
    try:
        stage.make(Path(folder))
    except (UsageError, RunError, OSError) as error:
        print(f"subquad: error: {error}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
