"""Metrics of classifiers.

accuracy = fraction of examples whose most likely class is correct
cross-entropy = mean of -log p(correct class)
confusion[i, j] = number of examples of class i that were classified as class j
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad_lab import Diverged, UsageError
from subquad_lab.figures.plots import axes_of, plain, svg
from subquad_lab.system.checksums import is_listed, read_listed_json

PREDICTIONS = "predictions"


def figures(log_probabilities: Tensor, wanted: Tensor) -> dict[str, float]:
    """Return the metrics for log probabilities (n, classes) and correct classes (n)."""
    if log_probabilities.isnan().any():
        raise Diverged("evaluation: the probabilities are NaN; try a smaller --lr in a new run")
    right = (log_probabilities.argmax(-1) == wanted).double().mean()
    return {"accuracy": float(right), "cross_entropy": float(F.nll_loss(log_probabilities.double(), wanted))}


@dataclass(frozen=True)
class Predictions:
    """The correct and the predicted class of each test example."""

    classes: list[str]
    wanted: list[int]
    found: list[int]

    @property
    def right(self) -> list[float]:
        return [float(x == y) for x, y in zip(self.wanted, self.found, strict=True)]

    def confusion(self) -> Tensor:
        count = len(self.classes)
        pairs = torch.tensor(self.wanted) * count + torch.tensor(self.found)
        return torch.bincount(pairs, minlength=count**2).view(count, count)

    def by_class(self) -> dict[str, float]:
        """Return the accuracy of each class that has examples."""
        table = self.confusion()
        counts = table.sum(1)
        return {name: float(table[i, i] / counts[i]) for i, name in enumerate(self.classes) if counts[i]}

    def record(self) -> dict[str, Any]:
        return {**vars(self), "accuracy_by_class": self.by_class(), "confusion": self.confusion().tolist()}

    @classmethod
    def of(cls, folder: Path) -> "Predictions | None":
        """Return the validated predictions of a run, or None if it is not finished."""
        path = folder / f"{PREDICTIONS}.json"
        if not is_listed(folder, path.name):
            return None
        content = read_listed_json(folder, path.name)
        classes, wanted, found = (content.get(name) for name in ("classes", "wanted", "found"))
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise UsageError(f"{path}: expected class names under 'classes'")
        for numbers in (wanted, found):
            if not isinstance(numbers, list) or not all(
                type(number) is int and 0 <= number < len(classes) for number in numbers
            ):
                raise UsageError(f"{path}: expected class numbers in [0, {len(classes)})")
        assert isinstance(wanted, list) and isinstance(found, list)
        if not wanted or len(wanted) != len(found):
            raise UsageError(
                f"{path}: expected one prediction per example, got {len(found)} for {len(wanted)} examples"
            )
        return cls(classes, wanted, found)


def confusion_picture(predictions: Predictions) -> bytes:
    """Plot the confusion matrix: rows are correct classes, columns predictions, shades fractions of a row."""
    table = predictions.confusion()
    shares = table / table.sum(1, keepdim=True).clamp(min=1)
    names = [plain(name) for name in predictions.classes]
    figure, (axes,) = axes_of(1, square=True)
    axes.grid(False)
    axes.imshow(shares.tolist(), cmap="Blues", vmin=0, vmax=1)
    places = range(len(names))
    recognized = predictions.by_class()
    rows = [f"{name}  {recognized[given]:.1%}" if (given := predictions.classes[i]) in recognized else name
            for i, name in enumerate(names)]  # fmt: skip
    axes.set_xticks(places, names, rotation=45, ha="right")
    axes.set_yticks(places, rows)
    axes.set(xlabel="predicted class", ylabel="correct class, with its accuracy")
    if len(names) <= 20:
        for i in places:
            for j in places:
                if table[i, j]:
                    color = "white" if shares[i, j] > 0.5 else "black"
                    axes.text(j, i, str(int(table[i, j])), ha="center", va="center", color=color, fontsize="small")
    return svg(figure)
