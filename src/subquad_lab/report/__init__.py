"""`subquad report`: one page about runs, from their records alone. Nothing on it asks another machine for anything."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import subquad
from subquad_lab import UsageError
from subquad_lab.experiments import EXPERIMENTS, experiment
from subquad_lab.figures import intervals
from subquad_lab.figures.plots import compared, curves
from subquad_lab.options.fields import config_of
from subquad_lab.system.files import write_whole
from subquad_lab.theory import figure as figure_of
from subquad_lab.training.run import CONFIG, Run, all_runs

PAGE = "page.html"


def write(folders: list[Path], root: Path, out: Path, theory: Path | None = None) -> None:
    """The page about the given runs, or about all in `root`; with what `verify` has printed, if it is given."""
    runs = [run for folder in folders for run in all_runs(folder) or [Run.open(folder)]] or all_runs(root)
    if not runs:
        raise UsageError(f"RUN: expected at least one run in {root}, found none")
    try:
        write_whole(out, page(runs, [] if theory is None else claims(theory)).encode())
    except OSError as error:
        raise UsageError(f"--out: cannot write {out}: {error.strerror}") from error
    print(out)


def page(runs: list[Run], theory: list[dict[str, Any]] = []) -> str:  # noqa: B006
    """All text from records is escaped; the pictures are drawn here, from the figures."""
    root = Path(os.path.commonpath([run.folder.resolve().parent for run in runs]))
    if (root / CONFIG).is_file():  # of a series, whose own name tells more than those of its seeds
        root = root.parent
    named = {str(run.folder.resolve().relative_to(root)): run for run in runs}  # Two seeds may share the last name.
    sections = []
    for run in runs:
        experiment(run.about()["experiment"])  # An unknown one is said.
    for name in EXPERIMENTS:
        own = {place: run for place, run in named.items() if run.about()["experiment"] == name}
        if own:
            sections.append(section(name, own))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(PAGE).render(sections=sections, theory=theory, version=subquad.__version__)


def claims(path: Path) -> list[dict[str, Any]]:
    """From JSON, whose every entry must be what `verify` writes."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--theory: cannot read {path}: {error}") from error
    rows = found if isinstance(found, list) else []
    if not rows or not all(_is_claim(row) for row in rows):
        raise UsageError(f"--theory: expected {path} to hold what `subquad verify --json` prints")
    return [
        {**row, "checks": [{**check, "shown": figure_of(check["found"])} for check in row["checks"]]} for row in rows
    ]


def _is_claim(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("number"), int)
        and all(isinstance(row.get(key), str) for key in ("statement", "verdict", "subject"))
        and isinstance(row.get("seconds"), int | float)
        and isinstance(row.get("checks"), list)
        and all(
            isinstance(check, dict)
            and isinstance(check.get("found"), int | float)
            and isinstance(check.get("what"), str)
            and isinstance(check.get("said"), str)
            and isinstance(check.get("is_mistake"), bool)
            for check in row["checks"]
        )
    )


def section(name: str, runs: dict[str, Run]) -> dict[str, Any]:
    what = experiment(name)
    entries = [entry(place, run, what.MEASURE, f"{name}-{i}") for i, (place, run) in enumerate(runs.items(), 1)]
    groups = alike(runs)
    together = inline(compared(groups, what.MEASURE), f"{name}-0") if len(runs) > 1 else ""
    seeds = [over_seeds(group, found, what.MEASURE) for group, found in groups.items() if len(found) > 1]
    question = (what.__doc__ or "").partition("\n")[0]
    return {"name": name, "question": question, "measure": what.MEASURE, "entries": entries, "seeds": seeds,
            "together": together, "published": what.PUBLISHED}  # fmt: skip


def alike(runs: dict[str, Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seed alone, by the folder that they share; others by their own."""
    groups: dict[Any, dict[str, Run]] = {}
    for place, run in runs.items():
        name, config = config_of(run)
        data = str(run.about()["data"].get("sha256"))
        key = name, str(Path(place).parent), replace(config, seed=0), data
        seeds = {config_of(other)[1].seed for other in groups.get(key, {}).values()}
        groups.setdefault((*key, place) if config.seed in seeds else key, {})[place] = run
    named = {}
    for (_, parent, *_), found in groups.items():
        places = list(found)
        several = f"{parent if parent != '.' else places[0]}, {len(places)} seeds"
        named[places[0] if len(places) == 1 or several in named else several] = list(found.values())
    return named


def over_seeds(group: str, runs: list[Run], measure: str) -> dict[str, str]:
    """What they come to together; where a run is not finished, nothing is said of them all."""
    results = [run.result() for run in runs]
    row = {"name": group}
    for part in ("valid", "test"):
        values = [result[part].get(measure) for result in results if result is not None]
        whole = len(values) == len(runs) and None not in values
        row[part] = str(intervals.over_seeds(values)) if whole else "not finished"
    return row


def entry(name: str, run: Run, measure: str, mark: str) -> dict[str, Any]:
    about, result = run.about(), run.result() or {}
    what = experiment(about["experiment"])
    config = vars(config_of(run)[1])
    return {
        "name": name,
        "label": what.label(config_of(run)[1]),
        "data": {key: readable(value) for key, value in about["data"].items()},
        "parameters": {key: readable(value) for key, value in about["parameters"].items()},
        "versions": about["versions"],
        "config": {key: value for key, value in config.items() if value is not None},
        "valid": figure(result.get("valid"), measure),
        "test": figure(result.get("test"), measure),
        "seconds": f"{result['seconds']:,.1f}" if isinstance(result.get("seconds"), int | float) else "not finished",
        "steps": max((int(line["step"]) for line in run.metrics()), default=0),
        "pictures": [
            inline(picture, f"{mark}-{i}")
            for i, picture in enumerate([curves(run, measure), *what.pictures(run).values()])
        ],
    }


def readable(value: Any) -> Any:
    """Lists and tables without brackets, numbers with commas."""
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
    """A picture of ours as an element of the page, its names made different from those of the others."""
    text = svg[svg.index(b"<svg") :].decode()
    for before, after in (('id="', f'id="{mark}-'), ("url(#", f"url(#{mark}-"), ('href="#', f'href="#{mark}-')):
        text = text.replace(before, after)
    return Markup(text)
