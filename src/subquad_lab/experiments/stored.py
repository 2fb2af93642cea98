"""Runs that are there: of which experiment, with which config, and their tasks with the weights that they learned."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from subquad_lab import UsageError
from subquad_lab.experiments import experiment_named
from subquad_lab.options.fields import config_from, read
from subquad_lab.training import lifecycle
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.run import ABOUT, CONFIG, Run
from subquad_lab.training.seeds import members


def experiment_of(run: Run) -> tuple[Experiment[Any], Any]:
    """The experiment of a run, or of a series, and its config."""
    path = run.folder / CONFIG
    values = read(path)
    experiment = experiment_named(str(values.pop("experiment", None)))
    return experiment, config_from(experiment, values, path)


def is_series(folder: Path) -> bool:
    """Whether the folder holds runs with several seeds."""
    return (folder / CONFIG).is_file() and not (folder / ABOUT).is_file() and experiment_of(Run(folder))[1].seeds > 1


def opened(folder: Path) -> tuple[Experiment[Any], Any]:
    """The experiment and the config of a folder, which must be that of a run or of a series."""
    return experiment_of(Run(folder) if is_series(folder) else Run.open(folder))


def trained(folder: Path) -> tuple[Run, Any]:
    """A run's task with its best weights, or its last, as its config says; ready to be used."""
    run = Run.open(folder)
    experiment, config = experiment_of(run)
    task = lifecycle.reopen(experiment, config, run).task
    lifecycle.load_weights(task.model, run, config)
    return run, task


def chosen(folder: Path) -> Path:
    """The run itself, or of a series the one that is best on the validation part."""
    if not is_series(folder):
        return folder
    experiment, config = experiment_of(Run(folder))
    found = {}
    for place in members(folder, config):
        result = Run(place).result() if place.is_dir() else None
        if result is not None:
            found[place] = result["valid"][experiment.measure]
    if not found:
        raise UsageError(f"RUN: {folder} has no finished run yet; `subquad train --resume {folder}` goes on")
    choose: Callable[..., Path] = max if experiment.higher_is_better else min
    best = choose(found, key=found.__getitem__)
    measure = experiment.measure.replace("_", " ")
    print(f"subquad: {best} speaks, of {len(found)} finished runs the best in validation {measure}", file=sys.stderr)
    return best
