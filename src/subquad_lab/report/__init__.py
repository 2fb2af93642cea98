"""`subquad report`: one page about runs, from their records alone. Nothing on it asks another machine for anything."""

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import subquad
from subquad_lab import UsageError
from subquad_lab.configs import config_of
from subquad_lab.experiments import EXPERIMENTS, experiment
from subquad_lab.files import write_whole
from subquad_lab.plots import compared, curves
from subquad_lab.records import Run, all_runs

PAGE = "page.html"


def write(folders: list[Path], root: Path, out: Path) -> None:
    """The page about the given runs, or about all in `root`."""
    runs = [Run.open(folder) for folder in folders] if folders else all_runs(root)
    if not runs:
        raise UsageError(f"RUN: expected at least one run in {root}, found none")
    try:
        write_whole(out, page(runs).encode())
    except OSError as error:
        raise UsageError(f"--out: cannot write {out}: {error.strerror}") from error
    print(out)


def page(runs: list[Run]) -> str:
    """All text from records is escaped; the pictures are drawn here, from the figures."""
    root = Path(os.path.commonpath([run.folder.resolve().parent for run in runs]))
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
    return environment.get_template(PAGE).render(sections=sections, version=subquad.__version__)


def section(name: str, runs: dict[str, Run]) -> dict[str, Any]:
    what = experiment(name)
    entries = [entry(place, run, what.MEASURE, f"{name}-{i}") for i, (place, run) in enumerate(runs.items(), 1)]
    together = inline(compared(runs, what.MEASURE), f"{name}-0") if len(runs) > 1 else ""
    question = (what.__doc__ or "").partition("\n")[0]
    return {"name": name, "question": question, "measure": what.MEASURE, "entries": entries, "together": together,
            "published": what.PUBLISHED}  # fmt: skip


def entry(name: str, run: Run, measure: str, mark: str) -> dict[str, Any]:
    about, result = run.about(), run.result() or {}
    config = vars(config_of(run)[1])
    return {
        "name": name,
        "label": experiment(about["experiment"]).label(config_of(run)[1]),
        "data": about["data"],
        "parameters": about["parameters"],
        "versions": about["versions"],
        "config": {key: value for key, value in config.items() if value is not None},
        "valid": figure(result.get("valid"), measure),
        "test": figure(result.get("test"), measure),
        "seconds": figure(result, "seconds"),
        "steps": max((int(line["step"]) for line in run.metrics()), default=0),
        "curves": inline(curves(run, measure), mark),
    }


def figure(found: Any, name: str) -> str:
    value = found.get(name) if isinstance(found, dict) else None
    return f"{value:,.2f}" if isinstance(value, int | float) else "not finished"


def inline(svg: bytes, mark: str) -> Markup:
    """A picture of ours as an element of the page, its names made different from those of the others."""
    text = svg[svg.index(b"<svg") :].decode()
    for before, after in (('id="', f'id="{mark}-'), ("url(#", f"url(#{mark}-"), ('href="#', f'href="#{mark}-')):
        text = text.replace(before, after)
    return Markup(text)
