"""`subquad evaluate`: metrics of a trained model on the validation or test set of its run."""

from pathlib import Path

from subquad_lab.experiments.stored import chosen, trained
from subquad_lab.figures.tables import figures
from subquad_lab.system.text import say
from subquad_lab.training.experiment import PartName


def run(folder: str, part: PartName) -> None:
    """Print the metrics of the selected weights, or of the latest ones of an unfinished run."""
    _, task = trained(chosen(Path(folder)))
    say(figures(task.evaluate(part, lambda: None)))
