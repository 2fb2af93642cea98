"""`subquad evaluate`: figures of a run's weights on a part of its data."""

from pathlib import Path

from subquad_lab.experiments.stored import chosen, trained
from subquad_lab.figures.tables import figures
from subquad_lab.training.experiment import PartName


def run(folder: str, part: PartName) -> None:
    """With the weights that the run has chosen, or has so far."""
    _, task = trained(chosen(Path(folder)))
    print(figures(task.evaluate(part, lambda: None)))
