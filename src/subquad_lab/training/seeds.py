"""Runs that differ in their seed alone: what one run cannot say of its figures, several can.

folder/           one seed: the run itself
folder/seed-7/    several: a run for each; beside them are the config of all, and what they come to together
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from subquad_lab import UsageError
from subquad_lab.experiments import experiment
from subquad_lab.figures import intervals
from subquad_lab.figures.plots import compared
from subquad_lab.options.fields import config_of
from subquad_lab.training import lifecycle
from subquad_lab.training.config import Training
from subquad_lab.training.interruption import Interrupted
from subquad_lab.training.run import ABOUT, CONFIG, CURVES, RESULT, Run

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Series:
    """Finished runs, and their results."""

    folder: Path
    runs: list[Run]
    results: list[dict[str, Any]]

    def values(self, part: str, figure: str) -> list[float]:
        """One for each seed."""
        return [result[part][figure] for result in self.results]

    def mean(self, part: str, figure: str) -> float:
        return fmean(self.values(part, figure))

    def shown(self, part: str, figure: str) -> str:
        """With its interval, where there are seeds enough for one."""
        values = self.values(part, figure)
        return str(intervals.over_seeds(values)) if len(values) > 1 else f"{values[0]:.4g}"


def train(name: str, config: Training, out: Path, folder: str | None = None) -> Series:
    """Start, or go on with what a folder of that name holds if it is of the same config."""
    config = lifecycle.settled(config)
    place = out / folder if folder else None
    if place is not None and (place / CONFIG).is_file():
        _check_same(name, config, Run(place))
        return _all(name, config, Run(place))
    if config.seeds == 1:
        run, result = lifecycle.start(name, config, out, folder)
        return Series(run.folder, [run], [result])
    lifecycle.check_batch(config)
    lifecycle.build(name, config)  # Data that are missing or wrong are told before there is a folder.
    return _all(name, config, lifecycle.create(name, config, out, folder, lambda run: None))


def _check_same(name: str, config: Training, found: Run) -> None:
    of, other = config_of(found)
    differing = [field for field, value in vars(config).items() if vars(other).get(field) != value]
    if of != name or differing:
        what = f"of {of}" if of != name else f"with another {', '.join(differing)}"
        raise UsageError(f"--out: {found.folder} holds a run {what}; expected the same, or a new folder")


def resume(folder: str | Path) -> Series:
    """Go on with a run, or with a series of them."""
    if not is_series(folder):
        run, result = lifecycle.resume(folder)
        return Series(run.folder, [run], [result])
    name, config = config_of(Run(Path(folder)))
    return _all(name, config, Run(Path(folder)))


def is_series(folder: str | Path) -> bool:
    path = Path(folder)
    return (path / CONFIG).is_file() and not (path / ABOUT).is_file() and config_of(Run(path))[1].seeds > 1


def check_same_data(made: list[Run]) -> None:
    """Figures of different data have no mean, and no difference."""
    first, *others = made
    for run in others:
        if run.about()["data"].get("sha256") != first.about()["data"].get("sha256"):
            raise UsageError(f"{run.folder}: its data are not those of {first.folder}; expected a new folder")


def members(folder: Path, config: Training) -> dict[Path, Training]:
    """The folder and the config of each run."""
    if config.seeds == 1:
        return {folder: config}
    seeds = range(config.seed, config.seed + config.seeds)
    return {folder / f"seed-{seed}": replace(config, seed=seed, seeds=1) for seed in seeds}


def finished(folder: Path, config: Training) -> Series:
    """What is there; all of its runs have a result."""
    made = [Run.open(place) for place in members(folder, config)]
    return Series(folder, made, [run.read_json(RESULT) for run in made])


def _all(name: str, config: Training, whole: Run) -> Series:
    made = []
    for place, own in members(whole.folder, config).items():
        title = f"{name}, {place.name}" if config.seeds > 1 else name
        try:
            if lifecycle.agreed((place / ABOUT).is_file()):  # Else one process could see what another has just made.
                made.append(lifecycle.resume(place, title))
            else:
                made.append(lifecycle.start(name, own, place.parent, place.name, title))
        except Interrupted as error:
            error.folder = whole.folder
            raise
    series = Series(whole.folder, [run for run, _ in made], [result for _, result in made])
    check_same_data(series.runs)
    if config.seeds > 1 and lifecycle.processes().is_main_process:
        whole.write(CURVES, compared({run.name: [run] for run in series.runs}, experiment(name).MEASURE))
        whole.write(SUMMARY, json.dumps(summary(series), indent=1).encode())
    return series


def summary(series: Series) -> dict[str, Any]:
    """Of each figure the values, their mean, and half of the 95 % interval."""
    parts: dict[str, Any] = {"runs": [run.name for run in series.runs]}
    for part in ("valid", "test"):
        parts[part] = {}
        for figure in series.results[0][part]:
            values = series.values(part, figure)
            parts[part][figure] = asdict(intervals.over_seeds(values)) | {"values": values}
    return parts


def chosen(folder: str | Path) -> Path:
    """The run itself, or of a series the one that is best on the validation part."""
    if not is_series(folder):
        return Path(folder)
    name, config = config_of(Run(Path(folder)))
    found = {}
    for place in members(Path(folder), config):
        result = Run(place).result() if place.is_dir() else None
        if result is not None:
            found[place] = result["valid"][experiment(name).MEASURE]
    if not found:
        raise UsageError(f"RUN: {folder} has no finished run yet; `subquad train --resume {folder}` goes on")
    choose: Callable[..., Path] = max if experiment(name).HIGHER_IS_BETTER else min
    best = choose(found, key=found.__getitem__)
    measure = experiment(name).MEASURE.replace("_", " ")
    print(f"subquad: {best} speaks, of {len(found)} finished runs the best in validation {measure}", file=sys.stderr)
    return best


def print_result(series: Series) -> None:
    """What it has come to, and where it is; by the main process alone."""
    if not lifecycle.processes().is_main_process:
        return
    over = f", mean of {len(series.runs)} seeds +- 95 % interval" if len(series.runs) > 1 else ""
    print(f"test{over}: " + ", ".join(
        f"{figure.replace('_', '-')} {series.shown('test', figure)}" for figure in series.results[0]["test"]
    ))  # fmt: skip
    steps, seconds = (sum(result[what] for result in series.results) for what in ("steps", "seconds"))
    print(f"{series.folder}: {steps:,} steps, {seconds:,.0f} s; curves in {series.folder / CURVES}")
    if skipped := series.results[0].get("skipped"):
        print(f"left out of the data: {skipped:,} clips, named in {series.runs[0].folder / 'skipped.json'}")
    drawn = [path for run in series.runs for path in sorted(run.folder.glob("*.svg")) if path.name != CURVES]
    if drawn:
        drawn = drawn[: len(drawn) // len(series.runs)]  # of the first seed
        print(f"pictures: {', '.join(map(str, drawn))}")
