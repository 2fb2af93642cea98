"""Series: runs that differ only in their seed, to estimate how much a result varies.

folder/           one seed: the run itself
folder/seed-7/    several seeds: one run each, next to the common config and a summary
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from subquad_lab import UsageError
from subquad_lab.figures import intervals
from subquad_lab.figures.plots import compared
from subquad_lab.options.fields import config_from, read
from subquad_lab.training import lifecycle
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.interruption import Interrupted
from subquad_lab.training.lifecycle import Job
from subquad_lab.training.processes import agreed, processes
from subquad_lab.training.run import CONFIG, CURVES, Run, as_json

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Series:
    """Finished runs and their results."""

    folder: Path
    runs: list[Run]
    results: list[dict[str, Any]]

    def values(self, part: str, figure: str) -> list[float]:
        """Return the value of a metric for each seed."""
        return [result[part][figure] for result in self.results]

    def mean(self, part: str, figure: str) -> float:
        return fmean(self.values(part, figure))

    def shown(self, part: str, figure: str) -> str:
        """Format a metric, with its confidence interval if there are several seeds."""
        values = self.values(part, figure)
        return intervals.shown(values, figure) if len(values) > 1 else f"{values[0]:.4g}"


def train(
    experiment: Experiment[Any], config: Training, place: Path, numbered: bool = False, sharing: int = 1
) -> Series:
    """Train a run for each seed, or resume existing ones.

    Args:
        experiment: Experiment to train.
        config: Config of the runs; must equal that of an existing folder.
        place: Folder of the run or of the series.
        numbered: Whether to create a numbered folder inside `place` instead.
        sharing: Number of processes that share each sequence.
    """
    config = lifecycle.settled(config)
    whole, first = _folder(experiment, config, place, numbered, sharing)
    made: list[Run] = []
    results: list[dict[str, Any]] = []
    for folder, own in members(whole.folder, config).items():
        try:
            is_begun = agreed(Run(folder).is_begun())  # One process could otherwise see what another just wrote.
            result = Run.open(folder).result() if is_begun else None
            if result is None:
                job = first or _job(experiment, own, folder, is_begun, sharing)
                title = f"{experiment.name}, {folder.name}" if config.seeds > 1 else experiment.name
                with lifecycle.trainer(job, title) as trainer:
                    result = lifecycle.finish(job, trainer.train())
        except Interrupted as error:
            error.folder = whole.folder
            raise
        made.append(Run(folder))
        results.append(result)
    check_same_data(made)
    series = Series(whole.folder, made, results)
    if config.seeds > 1 and processes().is_main_process:
        drawn = compared({run.name: [run] for run in made}, experiment)
        whole.write({CURVES: drawn, SUMMARY: as_json(summary(series))})
    return series


def _folder(
    experiment: Experiment[Any], config: Training, place: Path, numbered: bool, sharing: int
) -> tuple[Run, Job | None]:
    """Return the folder, and the job if it is a new single run. Bad data raise before a folder is created."""
    if not numbered and Run(place).has(CONFIG):
        check_same(experiment, config, Run(place))
        return Run(place), None
    root, name = (place, None) if numbered else (place.parent, place.name)
    if config.seeds == 1:
        job = lifecycle.begin(experiment, config, root, name, sharing)
        return job.run, job
    lifecycle.build(experiment, config, sharing)
    return lifecycle.create(experiment, config, root, name), None


def check_same(experiment: Experiment[Any], config: Training, found: Run) -> None:
    """Raise unless a folder holds a run of this experiment with this config."""
    found.verify(CONFIG)
    path = found.folder / CONFIG
    values = read(path)
    of = values.pop("experiment", None)
    if of != experiment.name:
        raise UsageError(f"--out: {found.folder} holds a run of {of}; use the same experiment or a new folder")
    other = lifecycle.settled(config_from(experiment, values, path))
    differing = [field for field, value in vars(config).items() if vars(other)[field] != value]
    if differing:
        what = f"with another {', '.join(differing)}"
        raise UsageError(f"--out: {found.folder} holds a run {what}; use the same values or a new folder")


def _job(experiment: Experiment[Any], config: Training, folder: Path, is_begun: bool, sharing: int) -> Job:
    if is_begun:
        return lifecycle.reopen(experiment, config, Run(folder), sharing)
    return lifecycle.begin(experiment, config, folder.parent, folder.name, sharing)


def check_same_data(made: list[Run]) -> None:
    """Raise if the runs have different data: their results cannot be averaged or compared."""
    first, *others = made
    for run in others:
        if run.about()["data"].get("sha256") != first.about()["data"].get("sha256"):
            raise UsageError(f"{run.folder}: the data differ from those of {first.folder}; use a new folder")


def members(folder: Path, config: Training) -> dict[Path, Training]:
    """Return the config of each run by folder."""
    if config.seeds == 1:
        return {folder: config}
    seeds = range(config.seed, config.seed + config.seeds)
    return {folder / f"seed-{seed}": replace(config, seed=seed, seeds=1) for seed in seeds}


def finished(experiment: Experiment[Any], config: Training, folder: Path) -> Series:
    """Open a series with this config whose runs are all finished."""
    config = lifecycle.settled(config)
    made, results = [], []
    for place, own in members(folder, config).items():
        run = Run.open(place)
        check_same(experiment, own, run)
        result = run.result()
        if result is None:
            raise UsageError(f"{place}: expected a finished run, got an unfinished one")
        made.append(run)
        results.append(result)
    return Series(folder, made, results)


def summary(series: Series) -> dict[str, Any]:
    """Return the values of each metric, their mean, and half the width of the 95 % confidence interval."""
    parts: dict[str, Any] = {"runs": [run.name for run in series.runs]}
    for part in ("valid", "test"):
        parts[part] = {}
        for figure in series.results[0][part]:
            values = series.values(part, figure)
            parts[part][figure] = asdict(intervals.over_seeds(values)) | {"values": values}
    return parts
