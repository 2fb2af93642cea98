"""Pictures as SVG: curves of a run, or of several side by side."""

import io
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

SMOOTH = 200  # points of a training curve: the mean of the steps between
Points = list[tuple[float, float]]


class Measured(Protocol):
    """What pictures need to know of an experiment."""

    @property
    def measure(self) -> str:
        """Of its figures, the one that is drawn."""

    @property
    def loss_unit(self) -> str:
        """What its loss is a mean over."""


class Logged(Protocol):
    """A run, as far as it is drawn."""

    def metrics(self) -> Iterable[dict[str, float]]:
        """A line for each step and each evaluation."""


def curves(run: Logged, experiment: Measured) -> bytes:
    """Training loss by step, and the validation measure."""
    lines, measure = list(run.metrics()), experiment.measure
    figure, (left, right) = axes_of(2)
    left.plot(*smoothed([(line["step"], line["loss"]) for line in lines if "loss" in line]))
    left.set(xlabel="step", ylabel=f"training {loss_label(experiment)}")
    points = [(line["step"], line[f"valid/{measure}"]) for line in lines if f"valid/{measure}" in line]
    right.plot(*zip(*points, strict=True), "o-") if points else None
    right.set(xlabel="step", ylabel=f"validation {measure.replace('_', ' ')}")
    return svg(figure)


def compared(groups: Mapping[str, Sequence[Logged]], experiment: Measured) -> bytes:
    """Training loss and validation measure by epoch, a line for each group: the mean of its runs, which are alike."""
    figure, both = axes_of(2)
    measure = experiment.measure
    for name, runs in groups.items():
        label = name.replace("$", r"\$")  # no formulas
        for axes, points in zip(both, by_epoch(runs, measure), strict=True):
            if points:
                axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=label)
    both[0].set(ylabel=f"training {loss_label(experiment)}")
    both[1].set(ylabel=f"validation {measure.replace('_', ' ')}")
    for axes in both:
        epochs_across(axes)
    if both[1].lines and min(min(line.get_ydata()) for line in both[1].lines) > 1:
        by_factors(both[1])  # as a perplexity falls
    if groups:
        both[1].legend(fontsize="small")
    return svg(figure)


def loss_label(experiment: Measured) -> str:
    return f"loss, nats per {experiment.loss_unit}"


def epochs_across(axes: Any) -> None:
    """From the beginning to the end of the first at least, with ticks at whole ones alone."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="epoch", xlim=(0, max(1.0, axes.get_xlim()[1])))
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def by_factors(axes: Any) -> None:
    """A logarithmic scale whose ticks are plain numbers: 6, not 6x10^0."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter("")


def by_epoch(runs: Sequence[Logged], measure: str) -> tuple[Points, Points]:
    """At each evaluation: the mean training loss of all steps since the one before, and the measure.

    Where runs have stopped early, up to the first that has: later means would be of those that went on alone.
    """
    losses: dict[float, list[float]] = {}
    measures: dict[float, list[float]] = {}
    for run in runs:
        since: list[float] = []
        for line in run.metrics():
            if "loss" in line:
                since.append(line["loss"])
            if f"valid/{measure}" in line:
                measures.setdefault(line["epoch"], []).append(line[f"valid/{measure}"])
                if since:
                    losses.setdefault(line["epoch"], []).append(fmean(since))
                since = []
    return _means(losses, len(runs)), _means(measures, len(runs))


def _means(found: dict[float, list[float]], count: int) -> Points:
    return [(epoch, fmean(values)) for epoch, values in sorted(found.items()) if len(values) == count]


def smoothed(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Means of equal runs of points, so that a long curve stays readable and its file small."""
    size = -(-len(points) // SMOOTH) or 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [group[-1][0] for group in groups], [sum(y for _, y in group) / len(group) for group in groups]


def axes_of(count: int, square: bool = False) -> tuple[Any, Sequence[Any]]:
    """A figure, and that many pairs of axes side by side."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(5.5 * count, 5.0 if square else 3.6))
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))  # inches; with less letters are cut
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for each in axes:
        each.grid(alpha=0.3)
    return figure, axes


def svg(figure: Any) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "subquad"}):  # The same picture has the same bytes.
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
