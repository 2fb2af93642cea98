"""One file for each question asked; `EXPERIMENTS` names them for the command line."""

from importlib import import_module
from typing import Any, Protocol

from subquad_lab import UsageError
from subquad_lab.training.config import Training
from subquad_lab.training.loop import Task
from subquad_lab.training.run import Run

EXPERIMENTS = ("language", "images", "graphs", "speech")


class Experiment(Protocol):
    """What a file of this folder has."""

    Config: type[Training]
    MEASURE: str  # of its figures, the one that says which is best
    HIGHER_IS_BETTER: bool  # of the measure
    UNIT: str  # what is counted for the speed
    PUBLISHED: list[dict[str, Any]]  # figures of others, for the report: of what, on which data

    def build(self, config: Any) -> Task:
        """The model and its data; all randomness from torch's generator, which was seeded."""

    def label(self, config: Any) -> str:
        """What tells a run apart from others, in a few words."""

    def pictures(self, run: Run) -> dict[str, bytes]:
        """SVG by name, drawn from what the run has written down, besides its curves."""

    def variants(self, config: Any) -> dict[str, Any]:
        """What `subquad compare` runs: configs by name."""


def experiment(name: str) -> Any:
    if name not in EXPERIMENTS:
        raise UsageError(f"EXPERIMENT: expected one of {', '.join(EXPERIMENTS)}, found {name!r}")
    return import_module(f"subquad_lab.experiments.{name}")
