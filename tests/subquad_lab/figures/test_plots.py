"""Pictures that can be read: whole epochs, plain numbers, units, and no letter cut off."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from subquad_lab.experiments.language import EXPERIMENT
from subquad_lab.figures import classification, plots
from subquad_lab.figures.classification import Predictions, confusion_picture
from subquad_lab.training.run import Run


def labels(axis) -> list[str]:
    """Of the ticks that are seen."""
    FigureCanvasAgg(axis.figure).draw()
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]


@pytest.mark.parametrize("last", [0.4, 1, 1.5, 3, 25, 300])
def test_ticks_are_at_whole_epochs(last):
    _, (axes,) = plots.axes_of(1)
    axes.plot([last / 3, last], [1, 2])
    plots.epochs_across(axes)
    found = labels(axes.xaxis)
    assert len(found) >= 2
    assert all(label.isdigit() for label in found)


@pytest.mark.parametrize(("low", "high"), [(6, 9), (6.1, 6.4), (80, 4000), (1.1, 20_000)])
def test_logarithmic_ticks_are_plain_numbers(low, high):
    _, (axes,) = plots.axes_of(1)
    axes.plot([1, 2], [high, low])
    plots.by_factors(axes)
    found = labels(axes.yaxis)
    assert len(found) >= 2
    assert all(label.replace(",", "").replace(".", "").isdigit() for label in found)


def test_losses_have_a_unit(trained):
    run = Run(trained)
    for picture in (plots.curves(run, EXPERIMENT), plots.compared({"a": [run]}, EXPERIMENT)):
        assert b"<!-- training loss, nats per word -->" in picture


def test_no_letter_of_the_confusion_matrix_is_cut_off(monkeypatch):
    drawn = []
    monkeypatch.setattr(classification, "svg", drawn.append)
    confusion_picture(Predictions([f"class {i}" for i in range(10)], list(range(10)) * 3, [*range(10)] * 3))
    (figure,) = drawn
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    whole = figure.bbox
    for text in (axes.yaxis.label, axes.xaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
        box = text.get_window_extent()
        assert min(box.x0, box.y0, whole.x1 - box.x1, whole.y1 - box.y1) >= 2, text  # of a hundredth of an inch
