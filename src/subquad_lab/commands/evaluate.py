"""`subquad evaluate`: metrics of a trained model on the validation or test set of its run."""

from pathlib import Path

from subquad_lab import UsageError
from subquad_lab.experiments.language import Language
from subquad_lab.experiments.positions import perplexities
from subquad_lab.experiments.stored import chosen, trained
from subquad_lab.figures.tables import Table, figures
from subquad_lab.system.text import say
from subquad_lab.training.experiment import PartName


def run(folder: str, part: PartName, longest: int | None) -> None:
    """Print the metrics of the selected weights, or of the latest ones of an unfinished run."""
    made, task = trained(chosen(Path(folder)))
    if longest is None:
        say(figures(task.evaluate(part, lambda: None)))
        return
    if not isinstance(task, Language):
        raise UsageError(f"--longest: expected a run of a language model, got {made.folder}")
    found = perplexities(task.positions(part, longest, lambda: None))
    rows = [(f"{first:,} to {end - 1:,}", f"{perplexity:.4g}") for first, end, perplexity in found]
    Table(("position", "perplexity"), rows).print()
