"""The sections of experiments: measured beside published results in one table, curves over seeds, and every run."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from subquad_lab import UsageError
from subquad_lab.experiments import EXPERIMENTS, experiment_named
from subquad_lab.experiments.stored import experiment_of
from subquad_lab.figures import intervals
from subquad_lab.figures.plots import compared, loss_label, values_by_epoch
from subquad_lab.report.command import train_command
from subquad_lab.report.part import Material
from subquad_lab.report.picture import image
from subquad_lab.system.text import printable
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.run import CONFIG, Run


def sections(runs: list[Run]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the content of a section for each experiment, and the reasons why damaged runs are left out."""
    if not runs:
        return [], {}
    root = Path(os.path.commonpath([run.folder.resolve().parent for run in runs]))
    if (root / CONFIG).is_file():  # Include the name of a series, which says more than those of its seeds.
        root = root.parent
    named = {str(run.folder.resolve().relative_to(root)): run for run in runs}  # Two seeds may share the last name.
    intact: dict[str, dict[str, Run]] = {name: {} for name in EXPERIMENTS}  # in this order
    entries: dict[str, dict[str, Any]] = {}
    damaged: dict[str, str] = {}
    for place, run in named.items():
        try:
            experiment = experiment_named(run.about()["experiment"])
            entries[place] = entry(place, run)
            intact[experiment.name][place] = run
        except (UsageError, OSError) as error:
            damaged[place] = str(error)
    for place, reason in damaged.items() if entries else ():  # Otherwise it is an error.
        warnings.warn(f"{named[place].folder} is damaged and left out: {reason}", stacklevel=3)
    return [section(EXPERIMENTS[name], own, entries) for name, own in intact.items() if own], damaged


def section(experiment: Experiment[Any], runs: dict[str, Run], entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    groups = by_series(runs)
    places = {id(run): place for place, run in runs.items()}
    shared = experiment.shared_pictures(groups) if len(runs) > 1 else {}
    return {
        "name": experiment.name, "question": experiment.question, "measure": experiment.measure.replace("_", " "),
        "better": "higher" if experiment.higher_is_better else "lower",
        "rows": [row(name, found, experiment) for name, found in groups.items()],
        "published": experiment.published,
        "plots": curves(groups, experiment), "static": image(compared(groups, experiment), "learning curves"),
        "shared": [image(picture, name) for name, picture in shared.items()],
        "groups": {
            name: in_detail([entries[places[id(run)]] for run in found], experiment) for name, found in groups.items()
        },
    }  # fmt: skip


def in_detail(entries: list[dict[str, Any]], experiment: Experiment[Any]) -> dict[str, Any]:
    """Return what the page shows of runs that differ only in their seed: all results, and more about the best run."""
    finished = [entry for entry in entries if experiment.measure in entry["results"]["valid"]]
    choose = max if experiment.higher_is_better else min
    best = choose(finished, key=lambda entry: entry["results"]["valid"][experiment.measure], default=entries[0])
    metrics = [(part, name) for part in ("valid", "test") for name in best["results"][part]]
    return {"entries": entries, "best": best, "metrics": metrics}


def plots(material: Material) -> dict[str, Any]:
    """Return the data of all plots by name, for the scripts."""
    return {name: plot for section in material.sections for name, plot in section["plots"].items()}


def by_series(runs: dict[str, Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in their seed by their common folder; other runs form their own group."""
    groups: dict[Any, dict[str, Run]] = {}
    for place, run in runs.items():
        experiment, config = experiment_of(run)
        data = str(run.about()["data"].get("sha256"))
        key = experiment.name, str(Path(place).parent), replace(config, seed=0), data
        seeds = {experiment_of(other)[1].seed for other in groups.get(key, {}).values()}
        groups.setdefault((*key, place) if config.seed in seeds else key, {})[place] = run
    named = {}
    for (_, parent, *_), found in groups.items():
        places = list(found)
        several = f"{parent if parent != '.' else places[0]}, {len(places)} seeds"
        named[places[0] if len(places) == 1 or several in named else several] = list(found.values())
    return named


def row(name: str, runs: list[Run], experiment: Experiment[Any]) -> dict[str, Any]:
    """Return what the table shows of runs that differ only in their seed."""
    about, results = runs[0].about(), [result for run in runs if (result := run.result()) is not None]
    configs = [experiment_of(run)[1] for run in runs]
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
        "steps": max((int(line["step"]) for run in runs for line in run.metrics()), default=0),
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
    return f"{values[0]:,.2f}" if values[0] >= 10 else f"{values[0]:.4f}"


def curves(groups: Mapping[str, Sequence[Run]], experiment: Experiment[Any]) -> dict[str, Any]:
    """Return the plots of training loss and validation measure: the mean over seeds and their range."""
    measure = experiment.measure
    found = {name: values_by_epoch(runs, measure) for name, runs in groups.items()}
    titles = f"training {loss_label(experiment)}", f"validation {measure.replace('_', ' ')}"
    plots = {}
    for i, title in enumerate(titles):
        series = [line(name, both[i]) for name, both in found.items() if both[i]]
        values = [value for each in series for value in each["y"]]
        if series:
            plots[f"{experiment.name}-{('loss', 'measure')[i]}"] = {
                "title": f"{experiment.name}: {title}", "x": {"label": "epoch"}, "series": series,
                "y": {"label": title, "log": i == 1 and min(values) > 1},  # suits a perplexity
            }  # fmt: skip
    return plots


def line(name: str, found: Mapping[float, Sequence[float]]) -> dict[str, Any]:
    values = list(found.values())
    drawn: dict[str, Any] = {"name": printable(name), "x": list(found), "y": list(map(fmean, values))}
    if len(values[0]) > 1:
        drawn |= {"low": list(map(min, values)), "high": list(map(max, values))}
    return drawn


def entry(name: str, run: Run) -> dict[str, Any]:
    """Return what the page shows of one run."""
    about, result = run.about(), run.result() or {}
    experiment, config = experiment_of(run)
    list(run.metrics())  # raises if it is damaged
    return {
        "name": name,
        "data": {key: readable(value) for key, value in about["data"].items()},
        "parameters": {key: readable(value) for key, value in about["parameters"].items()},
        "versions": about["versions"],
        "config": {key: value for key, value in vars(config).items() if value is not None},
        "command": train_command(experiment, [config]),
        "results": {part: result.get(part, {}) for part in ("valid", "test")},
        "table": experiment.table(run),
        "pictures": [image(picture, f"{name}: {what}") for what, picture in experiment.pictures(run, config).items()],
    }


def readable(value: Any) -> Any:
    """Format lists and dictionaries without brackets, and integers with commas."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {readable(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(str(readable(entry)) for entry in value)
    return f"{value:,}" if type(value) is int else value
