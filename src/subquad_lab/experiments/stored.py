"""Existing runs: their experiments, configs, and tasks with trained weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from subquad_lab import UsageError
from subquad_lab.experiments import experiment_named
from subquad_lab.options.fields import config_from, read
from subquad_lab.system.text import say
from subquad_lab.training import lifecycle
from subquad_lab.training.experiment import Experiment, StagedTask
from subquad_lab.training.run import ABOUT, CONFIG, Run
from subquad_lab.training.seeds import members


def experiment_of(run: Run) -> tuple[Experiment[Any], Any]:
    """Return the experiment and the config of a run or a series."""
    path = run.folder / CONFIG
    run.verify(CONFIG)
    values = read(path)
    experiment = experiment_named(str(values.pop("experiment", None)))
    return experiment, config_from(experiment, values, path)


def is_series(folder: Path) -> bool:
    """Return whether the folder holds a series of runs with several seeds."""
    run = Run(folder)
    return run.has(CONFIG) and not run.has(ABOUT) and experiment_of(run)[1].seeds > 1


def opened(folder: Path) -> tuple[Experiment[Any], Any]:
    """Return the experiment and the config of a folder; raise unless it holds a run or a series."""
    return experiment_of(Run(folder) if is_series(folder) else Run.open(folder))


def trained(folder: Path) -> tuple[Run, Any]:
    """Return a run and its task with the best or last weights, as configured, in evaluation mode."""
    run = Run.open(folder)
    experiment, config = experiment_of(run)
    task = lifecycle.reopen(experiment, config, run).task
    step = lifecycle.load_weights(task.model, run, config)
    if isinstance(task, StagedTask):
        task.enter(step)
    return run, task


def chosen(folder: Path) -> Path:
    """Return the folder of the run, or of the best run of a series by validation result."""
    if not is_series(folder):
        return folder
    experiment, config = experiment_of(Run(folder))
    found = {}
    for place in members(folder, config):
        result = Run(place).result() if place.is_dir() else None
        if result is not None:
            found[place] = result["valid"][experiment.measure]
    if not found:
        raise UsageError(f"RUN: {folder} has no finished run yet; resume it with: subquad train --resume {folder}")
    choose: Callable[..., Path] = max if experiment.higher_is_better else min
    best = choose(found, key=found.__getitem__)
    measure = experiment.measure.replace("_", " ")
    say(f"subquad: using {best}, the best of {len(found)} finished runs by validation {measure}", to_error=True)
    return best
