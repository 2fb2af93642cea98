"""`subquad runs`: a table of all runs."""

import os
from pathlib import Path

from subquad_lab import UsageError
from subquad_lab.experiments.stored import experiment_of
from subquad_lab.figures.tables import Table, figures
from subquad_lab.system.text import say
from subquad_lab.training.run import Run, all_runs

DEFAULT_ROOT = Path("runs")  # does not exist before the first run
COLUMNS = ("run", "experiment", "model", "data", "parameters", "steps", "state", "test")


def run(root: Path) -> None:
    """Print a row for each run in a folder and in the folders within it."""
    if root != DEFAULT_ROOT and not root.is_dir():
        raise UsageError(f"--root: no such folder: {root}")
    rows = [row(found, root) for found in all_runs(root)]
    if rows:
        Table(COLUMNS, rows).print()
    else:
        say(f"no runs in {root}; start one with `subquad train EXPERIMENT`")


def row(run: Run, root: Path) -> tuple[str, ...]:
    """Return the cells of a run; those of a damaged one say why."""
    place = str(run.folder.relative_to(root))
    try:
        return (place, *cells(run))
    except UsageError as error:
        return (place, *[""] * 5, "damaged", str(error).removeprefix(f"{run.folder}{os.sep}"))


def cells(run: Run) -> tuple[str, ...]:
    """Return all cells except the first."""
    about, result = run.about(), run.result()
    experiment, config = experiment_of(run)
    last = max((int(line["step"]) for line in run.metrics()), default=0)
    return (
        experiment.name, experiment.label(config), str(about["data"].get("name")),
        f"{about['parameters']['total']:,}", f"{last:,}", "finished" if result else "unfinished",
        "" if result is None else figures(result["test"]),
    )  # fmt: skip
