"""`subquad train`: train a new run, or resume an interrupted one."""

from pathlib import Path
from typing import Any

from subquad_lab import UsageError
from subquad_lab.experiments.stored import opened
from subquad_lab.system.text import say
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.processes import processes
from subquad_lab.training.run import CURVES
from subquad_lab.training.seeds import Series, train


def run(
    experiment: Experiment[Any] | None, config: Training | None, out: str, resume: str | None, sharing: int
) -> None:
    """Train in a new folder inside `out`, or resume the run in the folder `resume`; then print the result.

    `sharing` processes share each sequence. It is not part of the config: the run is the same for any number of them.
    """
    if resume is not None:
        found, own = opened(Path(resume))
        print_result(found, train(found, own, Path(resume), sharing=sharing))
    elif experiment is not None and config is not None:
        print_result(experiment, train(experiment, config, Path(out), numbered=True, sharing=sharing))
    else:
        raise UsageError("EXPERIMENT: expected an experiment or --resume RUN, got neither")


def print_result(experiment: Experiment[Any], series: Series) -> None:
    """Print the result and where it is stored, in the main process only."""
    if not processes().is_main_process:
        return
    for run in series.runs:
        if (table := experiment.table(run)) is not None:
            table.print()
    over = f", mean of {len(series.runs)} seeds and 95 % confidence interval" if len(series.runs) > 1 else ""
    say(f"test{over}: " + ", ".join(
        f"{figure.replace('_', '-')} {series.shown('test', figure)}" for figure in series.results[0]["test"]
    ))  # fmt: skip
    steps, seconds = (sum(result[what] for result in series.results) for what in ("steps", "seconds"))
    say(f"{series.folder}: {steps:,} steps, {seconds:,.0f} s; curves in {series.folder / CURVES}")
    if skipped := series.results[0].get("skipped"):
        say(f"skipped {skipped:,} clips of the data, listed in {series.runs[0].folder / 'skipped.json'}")
    drawn = [path for run in series.runs for path in sorted(run.folder.glob("*.svg")) if path.name != CURVES]
    if drawn:
        drawn = drawn[: len(drawn) // len(series.runs)]  # those of the first seed
        say(f"plots: {', '.join(map(str, drawn))}")
