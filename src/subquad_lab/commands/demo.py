"""`subquad demo`: the lab in some minutes, stage by stage, each in a process of its own.

Each stage leaves its results in the folder, so that an interrupted demo resumes with the next one.
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
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from subquad_lab import RunError, UsageError
from subquad_lab.commands import plan, report, verify
from subquad_lab.experiments import EXPERIMENTS
from subquad_lab.figures.tables import Table
from subquad_lab.options.fields import config_from, presets, read
from subquad_lab.report.claims import claims
from subquad_lab.system.files import locked, write_whole
from subquad_lab.theory import all_claims
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.interruption import Interrupted, Interruption
from subquad_lab.training.seeds import Series, finished, train

PAGE, PLAN, THEORY, RUNS = "report.html", "plan.txt", "verify.json", "runs"
PROCESS = (sys.executable, "-P", "-m", "subquad_lab.commands.demo")  # of a stage
LOOK_SECONDS = 0.25  # between two looks at a stage
STYLES = {"runs": "bold", "waits": "dim"}  # of a stage's row, by its state


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
            show = (lambda: live.update(table(stages).with_lines())) if console.is_terminal else None
            follow(stage, folder, interruption, show)
            if not console.is_terminal:
                print(f"{i} of {len(stages)}, {stage.name}: {stage.line}  ({stage.seconds:.0f} s)", flush=True)
    if console.is_terminal:
        table(stages).print()
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
    rows = [
        (stage.name, stage.state, f"{stage.seconds:.0f}" if stage.seconds else "", stage.line or stage.what)
        for stage in stages
    ]
    styles = {i: STYLES[stage.state] for i, stage in enumerate(stages) if stage.state in STYLES}
    return Table(("stage", "", "s", "found"), rows, "subquad demo", styles)


# --- The stages ---------------------------------------------------------------------------------------------------


def all_stages() -> list[Stage]:
    trained = [
        Stage(name, f"a small model: subquad train {name} --preset quick", partial(learn, experiment),
              partial(learned, experiment))
        for name, experiment in EXPERIMENTS.items() if "quick" in presets(name)
    ]  # fmt: skip
    return [
        Stage("plan", "the quickest method for 32,768 tokens on this machine", make_plan, planned),
        Stage("verify", f"{len(all_claims())} claims of the theory", check_claims, verified),
        *trained,
        Stage("report", "one page about all of it", write_report, reported),
    ]


def make_plan(out: Path) -> None:
    asked = plan.Question({"query_length": 32_768, "heads": 8, "head_dim": 16}, logit_range=0.5)
    write_printed(out / PLAN, lambda: plan.run(asked, show_all=False))


def planned(out: Path) -> str | None:
    """The sentence after the table."""
    path = out / PLAN
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line for line in reversed(lines) if line.strip() and not line.startswith("Not shown")), None)


def check_claims(out: Path) -> None:
    write_printed(out / THEORY, lambda: verify.run([], True, str(out / "theory"), 0, False))


def verified(out: Path) -> str | None:
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


def learn(experiment: Experiment[Any], out: Path) -> None:
    train(experiment, quick(experiment), out / RUNS / experiment.name)


def learned(experiment: Experiment[Any], out: Path) -> str | None:
    try:
        return in_words(finished(out / RUNS / experiment.name, quick(experiment)))
    except UsageError:  # It is not there, or not finished.
        return None


def quick(experiment: Experiment[Any]) -> Training:
    """The config of the stage."""
    return config_from(experiment, read(presets(experiment.name)["quick"]), "quick")  # type: ignore[no-any-return]


def in_words(series: Series) -> str:
    over = f" over {len(series.runs)} seeds" if len(series.runs) > 1 else ""
    figures = ", ".join(f"{name.replace('_', '-')} {series.shown('test', name)}" for name in series.results[0]["test"])
    return f"test{over}: {figures}"


def write_report(out: Path) -> None:
    report.run([out / RUNS], out / RUNS, out / PAGE, out / THEORY)


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
