"""The experiments: one file per question, and one line per experiment in `ALL`."""

from typing import Any

from subquad_lab import UsageError
from subquad_lab.experiments import convert, graphs, images, language, recall, speech
from subquad_lab.training.experiment import Experiment

ALL: tuple[Experiment[Any], ...] = (
    language.EXPERIMENT,
    images.EXPERIMENT,
    graphs.EXPERIMENT,
    speech.EXPERIMENT,
    recall.EXPERIMENT,
    convert.EXPERIMENT,
)
EXPERIMENTS = {experiment.name: experiment for experiment in ALL}


def experiment_named(name: str) -> Experiment[Any]:
    """Return the experiment with this name, as recorded in a run."""
    if name not in EXPERIMENTS:
        raise UsageError(f"EXPERIMENT: expected one of {', '.join(EXPERIMENTS)}, got {name!r}")
    return EXPERIMENTS[name]
