"""The HTML report about runs, generated from their records. It is self-contained and loads nothing."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import subquad
from subquad_lab import UsageError
from subquad_lab.experiments import EXPERIMENTS, experiment_named
from subquad_lab.experiments.stored import experiment_of
from subquad_lab.figures import intervals
from subquad_lab.figures.plots import compared, curves
from subquad_lab.system.text import printable
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.run import CONFIG, Run

PAGE = "page.html"


def page(runs: list[Run], theory: Sequence[dict[str, Any]] = ()) -> str:
    """Return the report as HTML. Text from records is escaped; plots are drawn here from the metrics.

    A damaged run is listed, with a warning, and left out; a UsageError is raised if no other run is left.
    """
    root = Path(os.path.commonpath([run.folder.resolve().parent for run in runs]))
    if (root / CONFIG).is_file():  # Include the name of a series, which says more than those of its seeds.
        root = root.parent
    named = {str(run.folder.resolve().relative_to(root)): run for run in runs}  # Two seeds may share the last name.
    groups: dict[str, dict[str, Run]] = {name: {} for name in EXPERIMENTS}  # in this order
    entries: dict[str, dict[str, Any]] = {}
    damaged: dict[str, str] = {}
    for number, (place, run) in enumerate(named.items(), 1):
        try:
            experiment = experiment_named(run.about()["experiment"])
            entries[place] = entry(place, run, f"{experiment.name}-{number}")
            groups[experiment.name][place] = run
        except (UsageError, OSError) as error:
            damaged[place] = str(error)
    if not entries:
        raise UsageError(next(iter(damaged.values())))
    for place, reason in damaged.items():
        warnings.warn(f"{named[place].folder} is damaged and left out: {reason}", stacklevel=2)
    sections = [section(EXPERIMENTS[name], own, entries) for name, own in groups.items() if own]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )  # fmt: skip
    return environment.get_template(PAGE).render(
        sections=sections, damaged=damaged, theory=theory, version=subquad.__version__
    )


def section(experiment: Experiment[Any], runs: dict[str, Run], entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name, measure = experiment.name, experiment.measure
    groups = by_series(runs)
    together = inline(compared(groups, experiment), f"{name}-0") if len(runs) > 1 else ""
    pictures = experiment.shared_pictures(groups) if len(runs) > 1 else {}
    seeds = [over_seeds(group, found, measure) for group, found in groups.items() if len(found) > 1]
    shared = [inline(picture, f"{name}-shared-{i}") for i, picture in enumerate(pictures.values())]
    return {"name": name, "question": experiment.question, "measure": measure, "seeds": seeds, "together": together,
            "shared": shared, "entries": [entries[place] for place in runs],
            "published": experiment.published}  # fmt: skip


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


def over_seeds(group: str, runs: list[Run], measure: str) -> dict[str, str]:
    """Return the mean over seeds with its interval, or "not finished" if a run is not finished."""
    results = [run.result() for run in runs]
    row = {"name": group}
    for part in ("valid", "test"):
        values = [result[part].get(measure) for result in results if result is not None]
        whole = len(values) == len(runs) and None not in values
        row[part] = intervals.shown(values, measure) if whole else "not finished"
    return row


def entry(name: str, run: Run, mark: str) -> dict[str, Any]:
    about, result = run.about(), run.result() or {}
    experiment, config = experiment_of(run)
    measure, pictures = experiment.measure, [curves(run, experiment), *experiment.pictures(run, config).values()]
    return {
        "name": name,
        "label": experiment.label(config),
        "data": {key: readable(value) for key, value in about["data"].items()},
        "parameters": {key: readable(value) for key, value in about["parameters"].items()},
        "versions": about["versions"],
        "config": {key: value for key, value in vars(config).items() if value is not None},
        "valid": figure(result.get("valid"), measure),
        "test": figure(result.get("test"), measure),
        "seconds": f"{result['seconds']:,.1f}" if isinstance(result.get("seconds"), int | float) else "not finished",
        "steps": max((int(line["step"]) for line in run.metrics()), default=0),
        "table": experiment.table(run),
        "pictures": [inline(picture, f"{mark}-{i}") for i, picture in enumerate(pictures)],
    }


def readable(value: Any) -> Any:
    """Format lists and dictionaries without brackets, and integers with commas."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {readable(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(str(readable(entry)) for entry in value)
    return f"{value:,}" if type(value) is int else value


def figure(found: Any, name: str) -> str:
    value = found.get(name) if isinstance(found, dict) else None
    if not isinstance(value, int | float):
        return "not finished"
    return f"{value:,.2f}" if value >= 10 else f"{value:.4f}"


def inline(svg: bytes, mark: str) -> Markup:
    """Return a plot as an inline SVG element, with ids that are unique on the page."""
    text = svg[svg.index(b"<svg") :].decode()
    for before, after in (('id="', f'id="{mark}-'), ("url(#", f"url(#{mark}-"), ('href="#', f'href="#{mark}-')):
        text = text.replace(before, after)
    return Markup(text)
