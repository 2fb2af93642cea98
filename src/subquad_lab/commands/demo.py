"""`subquad demo`: the whole lab in a few minutes, as stages that each run in their own process.

Each stage writes its results into the folder, so that an interrupted demo resumes with the first unfinished stage.
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
from subquad_lab.system.out_of_memory import memory_for
from subquad_lab.system.text import one_line, say
from subquad_lab.theory import all_claims
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.interruption import Interrupted, Interruption
from subquad_lab.training.seeds import Series, finished, train

PAGE, PLAN, THEORY, RUNS = "report.html", "plan.txt", "verify.json", "runs"
PROCESS = (sys.executable, "-P", "-m", "subquad_lab.commands.demo")  # of a stage
POLL_SECONDS = 0.25  # between two checks of a running stage
STYLES = {"running": "bold", "waiting": "dim"}  # of a stage's row, by its state


@dataclass
class Stage:
    """A step of the demo. `make` writes into the folder; `found` returns a summary, or None if it is not done."""

    name: str
    what: str
    make: Callable[[Path], None]
    found: Callable[[Path], str | None]
    seconds: float = field(default=0.0, compare=False)
    state: str = "waiting"
    line: str = ""


def run(out: str) -> None:
    """Run all stages with a progress table, then print the path of the report."""
    folder = Path(out)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot create {folder}: {error.strerror}") from error
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
                say(f"{i} of {len(stages)}, {stage.name}: {stage.line}  ({stage.seconds:.0f} s)", flush=True)
    if console.is_terminal:
        table(stages).print()
    say(folder / PAGE)


def follow(stage: Stage, folder: Path, interruption: Interruption, show: Callable[[], None] | None) -> None:
    """Run one stage in its own process, unless it is done."""
    done = stage.found(folder)
    if done is not None:
        stage.state, stage.line = "already done", done
        return
    log, begin = folder / "logs" / f"{stage.name}.log", time.monotonic()
    stage.state = "running"
    command = [*PROCESS, stage.name, str(folder), str(os.getpid())]
    log.unlink(missing_ok=True)  # A symbolic link is removed, not followed.
    with log.open("xb") as sink, subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT,
                                                  start_new_session=True) as process:  # fmt: skip
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if interruption.number is not None:
                    raise Interrupted(interruption.number)
                stage.seconds, stage.line = time.monotonic() - begin, last_line(log)
                if show is not None:
                    show()
        except BaseException:
            process.send_signal(signal.SIGINT)  # A training run then saves a checkpoint.
            raise
    stage.seconds = time.monotonic() - begin
    found = stage.found(folder)
    if process.returncode != 0 or found is None:
        raise RunError(f"{stage.name}: {last_line(log) or 'it exited without output'} (full log: {log})")
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
    return Table(("stage", "", "s", "result"), rows, "subquad demo", styles)


# --- The stages ---------------------------------------------------------------------------------------------------


def all_stages() -> list[Stage]:
    trained = [
        Stage(name, f"a small model: subquad train {name} --preset quick", partial(learn, experiment),
              partial(learned, experiment))
        for name, experiment in EXPERIMENTS.items() if experiment.in_demo and "quick" in presets(name)
    ]  # fmt: skip
    return [
        Stage("plan", "the fastest method for 32,768 tokens on this machine", make_plan, planned),
        Stage("verify", f"{len(all_claims())} claims of the theory", check_claims, verified),
        *trained,
        Stage("report", "an HTML report of all results", write_report, reported),
    ]


def make_plan(out: Path) -> None:
    asked = plan.Question({"query_length": 32_768, "heads": 8, "head_dim": 16}, logit_range=0.5)
    write_printed(out / PLAN, lambda: plan.run(asked, show_all=False))


def planned(out: Path) -> str | None:
    """Return the sentence after the table."""
    path = out / PLAN
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line for line in reversed(lines) if line.strip() and not line.startswith("Not shown")), None)


def check_claims(out: Path) -> None:
    write_printed(out / THEORY, lambda: verify.run([], True, str(out / "theory"), 0, False))


def verified(out: Path) -> str | None:
    try:
        rows = claims(out / THEORY)
    except UsageError:  # The file is missing, truncated, or from another version.
        return None
    return f"{sum(row['verdict'] != 'fails' for row in rows)} of {len(rows)} claims hold"


def write_printed(path: Path, call: Callable[[], None]) -> None:
    """Write the output of a command to a file, even if the command then fails, as `verify` does for a false claim."""
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
        return in_words(finished(experiment, quick(experiment), out / RUNS / experiment.name))
    except UsageError:  # The run is missing or unfinished.
        return None


def quick(experiment: Experiment[Any]) -> Training:
    """Return the config of the stage."""
    return config_from(experiment, read(presets(experiment.name)["quick"]), "quick")  # type: ignore[no-any-return]


def in_words(series: Series) -> str:
    over = f" over {len(series.runs)} seeds" if len(series.runs) > 1 else ""
    figures = ", ".join(f"{name.replace('_', '-')} {series.shown('test', name)}" for name in series.results[0]["test"])
    return f"test{over}: {figures}"


def write_report(out: Path) -> None:
    report.run([out / RUNS], out / RUNS, out / PAGE, out / THEORY)


def reported(out: Path) -> str | None:
    """Return the path of the report, or None if it is missing or older than a result."""
    page = out / PAGE
    if not page.is_file():
        return None
    newest = max(path.stat().st_mtime for path in out.rglob("*.json"))
    return str(page) if page.stat().st_mtime >= newest else None


def stop_with_parent(parent: int) -> None:
    """Exit when the demo is killed; otherwise the stage would still be running when the next demo starts.

    The demo passes its process id, because the parent may already have changed by the time this stage has imported its
    modules.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Run one stage; the entry point of its process."""
    name, folder, parent = sys.argv[1:]
    stop_with_parent(int(parent))
    stage = next(stage for stage in all_stages() if stage.name == name)
    try:
        with memory_for(f"running the stage {name}", "free memory and run the demo again"):
            stage.make(Path(folder))
    except (UsageError, RunError, OSError) as error:
        say(f"subquad: error: {one_line(error)}", to_error=True)
        return 1
    except (Interrupted, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
