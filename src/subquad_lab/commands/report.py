"""`subquad report`: an HTML report about runs."""

from pathlib import Path

from subquad_lab import UsageError
from subquad_lab.report.claims import claims
from subquad_lab.report.page import page
from subquad_lab.system.files import write_whole
from subquad_lab.system.text import say
from subquad_lab.training.run import Run, all_runs


def run(folders: list[Path], root: Path, out: Path, theory: Path | None = None) -> None:
    """Write a report about the given runs, or all runs in `root`, and the output of `verify --json` if given."""
    runs = [found for folder in folders for found in all_runs(folder) or [Run.open(folder)]] or all_runs(root)
    if not runs:
        raise UsageError(f"RUN: expected at least one run in {root}, got none")
    if out.is_dir():
        raise UsageError(f"--out: expected a file, got the folder {out}")
    try:
        write_whole(out, page(runs, [] if theory is None else claims(theory)).encode())
    except OSError as error:
        raise UsageError(f"--out: cannot write {out}: {error.strerror}") from error
    say(out)
