"""What the page needs of the runs, read once.

    metrics.jsonl, a line per step  ->  a record per evaluation, with the mean training loss since the one before

A reader that is kept, as the server does, reads a run again only when a file of the run has changed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from subquad_lab import UsageError
from subquad_lab.experiments import experiment_named
from subquad_lab.experiments.stored import experiment_of
from subquad_lab.figures.plots import evaluations
from subquad_lab.report.picture import image
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.run import METRICS, Run

Files = list[tuple[str, int, int]]


@dataclass(frozen=True)
class History:
    """The log of a run in short; `metrics` is what plots read."""

    steps: int
    records: Sequence[dict[str, float]]

    def metrics(self) -> Sequence[dict[str, float]]:
        return self.records


class Reading(NamedTuple):
    """An intact run. The best run of several is shown with its table and its pictures."""

    run: Run
    experiment: Experiment[Any]
    config: Any
    about: dict[str, Any]
    result: dict[str, Any] | None
    history: History
    table: Any
    pictures: list[dict[str, str]]


class Reader:
    """Reads runs by their places."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Files, Reading]] = {}

    def read(self, runs: Mapping[str, Run]) -> tuple[dict[str, Reading], dict[str, str]]:
        """Return what was read, and the reasons why damaged runs are left out."""
        known, damaged = {}, {}
        for place, run in runs.items():
            files, before = files_of(run), self._known.get(place)
            try:
                known[place] = before if before is not None and before[0] == files else (files, reading(place, run))
            except (UsageError, OSError) as error:
                damaged[place] = str(error)
        self._known = known
        return {place: found for place, (_, found) in known.items()}, damaged


def files_of(run: Run) -> Files:
    """Return what changes when a run does: names, times and sizes of the files in its folder."""
    found = []
    for path in run.folder.glob("*"):
        try:
            about = path.stat()
        except OSError:  # A temporary file is gone by now.
            continue
        found.append((str(path), about.st_mtime_ns, about.st_size))
    return sorted(found)


def reading(place: str, run: Run) -> Reading:
    """Read a run; raise a UsageError or OSError if it is damaged."""
    about = run.about()
    experiment, config = experiment_named(about["experiment"]), experiment_of(run)[1]
    pictures = experiment.pictures(run, config)
    return Reading(
        run, experiment, config, about, run.result(), history(run, experiment.measure), experiment.table(run),
        [image(picture, f"{place}: {what}") for what, picture in pictures.items()],
    )  # fmt: skip


def history(run: Run, measure: str) -> History:
    """Return the log of a run in short."""
    steps = 0

    def lines() -> Iterator[dict[str, float]]:
        nonlocal steps
        for line in run.metrics():
            steps = int(line["step"])
            yield line

    try:
        records = list(evaluations(lines(), measure))
        if not all(math.isfinite(record["epoch"]) for record in records):
            raise OverflowError("the epoch is not finite")
    except (KeyError, OverflowError) as error:
        raise UsageError(f"{run.folder / METRICS}: expected an epoch and numbers in each line: {error}") from error
    return History(steps, records)
