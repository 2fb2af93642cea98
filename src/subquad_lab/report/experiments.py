"""The sections of experiments: measured beside published results in one table, curves over seeds, and every run."""

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from subquad_lab.experiments import EXPERIMENTS
from subquad_lab.figures import intervals
from subquad_lab.figures.plots import compared, loss_label, values_by_epoch
from subquad_lab.report.command import train_command
from subquad_lab.report.part import Material
from subquad_lab.report.picture import image
from subquad_lab.report.reading import History, Reader, Reading
from subquad_lab.system.text import printable
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.run import CONFIG, Run

MAX_LINES = 16  # in a plot: a sweep can have hundreds of runs


def sections(runs: list[Run], reader: Reader) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the content of a section for each experiment, and the reasons why damaged runs are left out."""
    if not runs:
        return [], {}
    root = Path(os.path.commonpath([run.folder.resolve().parent for run in runs]))
    if (root / CONFIG).is_file():  # Include the name of a series, which says more than those of its seeds.
        root = root.parent
    named = {str(run.folder.resolve().relative_to(root)): run for run in runs}  # Two seeds may share the last name.
    intact, damaged = reader.read(named)
    for place, reason in damaged.items() if intact else ():  # Otherwise it is an error.
        warnings.warn(f"{named[place].folder} is damaged and left out: {reason}", stacklevel=3)
    found = []
    for name, experiment in EXPERIMENTS.items():
        own = {place: each for place, each in intact.items() if each.experiment.name == name}
        if own:
            found.append(section(experiment, own))
    return found, damaged


def section(experiment: Experiment[Any], runs: dict[str, Reading]) -> dict[str, Any]:
    groups = {name: {place: runs[place] for place in places} for name, places in by_series(runs).items()}
    shared = {}
    if len(runs) > 1:
        shared = experiment.shared_pictures({name: [each.run for each in own.values()] for name, own in groups.items()})
    rows = [row(name, list(own.values()), experiment) for name, own in groups.items()]
    best = {line["name"] for line in best_first(rows, experiment)[:MAX_LINES]}
    drawn = {name: [each.history for each in own.values()] for name, own in groups.items() if name in best}
    return {
        "name": experiment.name, "question": experiment.question, "measure": experiment.measure.replace("_", " "),
        "better": "higher" if experiment.higher_is_better else "lower",
        "rows": rows, "published": experiment.published, "drawn": len(drawn),
        "plots": curves(drawn, experiment), "static": image(compared(drawn, experiment), "learning curves"),
        "shared": [image(picture, name) for name, picture in shared.items()],
        "groups": {name: in_detail(own, experiment) for name, own in groups.items()},
    }  # fmt: skip


def goodness(score: float | None, higher_is_better: bool) -> float:
    """Return a number that is higher for better results; a result that is missing or not finite is the worst."""
    if score is None or not math.isfinite(score):
        return -math.inf
    return score if higher_is_better else -score


def best_first(rows: list[dict[str, Any]], experiment: Experiment[Any]) -> list[dict[str, Any]]:
    """Return rows by validation result, unfinished ones last."""
    return sorted(rows, key=lambda line: goodness(line["score"], experiment.higher_is_better), reverse=True)


def in_detail(runs: dict[str, Reading], experiment: Experiment[Any]) -> dict[str, Any]:
    """Return what the page shows of runs that differ only in their seed: all results, and more about the best run."""
    entries = [entry(place, each) for place, each in runs.items()]
    best = max(
        entries,
        key=lambda own: goodness(own["results"]["valid"].get(experiment.measure), experiment.higher_is_better),
    )
    metrics = [(part, name) for part in ("test", "valid") for name in best["results"][part]]
    return {"entries": entries, "best": best, "metrics": metrics}


def plots(material: Material) -> dict[str, Any]:
    """Return the data of all plots by name, for the scripts."""
    return {name: plot for section in material.sections for name, plot in section["plots"].items()}


def by_series(runs: dict[str, Reading]) -> dict[str, list[str]]:
    """Group the places of runs that differ only in their seed by their common folder; others form their own group."""
    groups: dict[Any, dict[str, int]] = {}
    for place, found in runs.items():
        seed = found.config.seed
        key = str(Path(place).parent), replace(found.config, seed=0), str(found.about["data"].get("sha256"))
        own = (*key, place) if seed in groups.get(key, {}).values() else key
        groups.setdefault(own, {})[place] = seed
    named: dict[str, list[str]] = {}
    for (parent, *_), seeds in groups.items():
        places = list(seeds)
        several = f"{parent if parent != '.' else places[0]}, {len(places)} seeds"
        named[places[0] if len(places) == 1 or several in named else several] = places
    return named


def row(name: str, runs: list[Reading], experiment: Experiment[Any]) -> dict[str, Any]:
    """Return what the table shows of runs that differ only in their seed."""
    configs, about = [run.config for run in runs], runs[0].about
    results = [run.result for run in runs if run.result is not None]
    seconds = [result["seconds"] for result in results if isinstance(result.get("seconds"), int | float)]
    whole = len(results) == len(runs)
    scores = [result["valid"][experiment.measure] for result in results if experiment.measure in result["valid"]]
    return {
        "name": name,
        "seeds": len(runs),
        "score": fmean(scores) if len(scores) == len(runs) else None,
        "label": experiment.label(configs[0]),
        "data": about["data"].get("name", ""),
        "parameters": about["parameters"]["total"],
        "steps": max(run.history.steps for run in runs),
        "seconds": f"{fmean(seconds):,.1f}" if whole and seconds else "not finished",
        "valid": over_seeds([result["valid"] for result in results], len(runs), experiment.measure),
        "test": over_seeds([result["test"] for result in results], len(runs), experiment.measure),
        "command": train_command(experiment, configs),
    }  # fmt: skip


def over_seeds(found: Sequence[Mapping[str, float]], count: int, measure: str) -> str:
    """Return a metric, with its mean and interval if there are several runs, or "not finished"."""
    values = [figures[measure] for figures in found if measure in figures]
    if len(values) < count:
        return "not finished"
    if count > 1:
        return intervals.shown(values, measure)
    return figure(values[0])


def figure(value: float) -> str:
    return f"{value:,.2f}" if value >= 10 else f"{value:.4f}"


def curves(groups: Mapping[str, Sequence[History]], experiment: Experiment[Any]) -> dict[str, Any]:
    """Return the plots of training loss and validation measure: the mean over seeds and their range."""
    measure = experiment.measure
    found = {name: values_by_epoch(runs, measure) for name, runs in groups.items()}
    titles = f"training {loss_label(experiment)}", f"validation {measure.replace('_', ' ')}"
    plots = {}
    for i, title in enumerate(titles):
        series = [line(name, both[i]) for name, both in found.items() if both[i]]
        values = [value for each in series for value in each["y"] if value is not None]
        if series:
            plots[f"{experiment.name}-{('loss', 'measure')[i]}"] = {
                "title": f"{experiment.name}: {title}", "x": {"label": "epoch"}, "series": series,
                "y": {"label": title, "log": i == 1 and min(values, default=0) > 1},  # suits a perplexity
            }  # fmt: skip
    return plots


def line(name: str, found: Mapping[float, Sequence[float]]) -> dict[str, Any]:
    """Return the mean over seeds at each epoch, and the range; the curve has a gap where a value is not finite."""
    values = [seeds if math.isfinite(sum(seeds)) else None for seeds in found.values()]

    def drawn(summary: Callable[[Sequence[float]], float]) -> list[float | None]:
        return [None if seeds is None else summary(seeds) for seeds in values]

    curve: dict[str, Any] = {"name": printable(name), "x": list(found), "y": drawn(fmean)}
    if len(next(iter(found.values()))) > 1:
        curve |= {"low": drawn(min), "high": drawn(max)}
    return curve


def entry(name: str, found: Reading) -> dict[str, Any]:
    """Return what the page shows of one run."""
    results = {part: (found.result or {}).get(part, {}) for part in ("valid", "test")}
    return {
        "name": name,
        "data": {key: readable(value) for key, value in found.about["data"].items()},
        "parameters": {key: readable(value) for key, value in found.about["parameters"].items()},
        "versions": found.about["versions"],
        "config": {key: value for key, value in vars(found.config).items() if value is not None},
        "results": results,
        "shown": {part: {key: figure(value) for key, value in metrics.items()} for part, metrics in results.items()},
        "table": found.table,
        "pictures": found.pictures,
    }


def readable(value: Any) -> Any:
    """Format lists and dictionaries without brackets, and integers with commas."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {readable(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(str(readable(entry)) for entry in value)
    return f"{value:,}" if type(value) is int else value
