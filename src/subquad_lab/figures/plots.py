"""SVG plots: learning curves of one run, or of several runs together."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol, TypeVar

from subquad_lab.system.text import printable

CURVE_POINTS = 200  # of a training curve; each is the mean over several steps
LABEL_CHARACTERS = 40  # of a longer name in a legend, which would leave no room for the plot
Points = list[tuple[float, float]]
T = TypeVar("T")


class Measured(Protocol):
    """The part of an experiment that plots use."""

    @property
    def measure(self) -> str:
        """Metric to plot."""

    @property
    def loss_unit(self) -> str:
        """What the loss is averaged over."""


class Logged(Protocol):
    """The part of a run that plots use."""

    def metrics(self) -> Iterable[dict[str, float]]:
        """Yield a record for each step and each evaluation."""


def curves(run: Logged, experiment: Measured) -> bytes:
    """Plot the training loss and the validation measure against the step."""
    lines, measure = list(run.metrics()), experiment.measure
    figure, (left, right) = axes_of(2)
    left.plot(*smoothed([(line["step"], line["loss"]) for line in lines if "loss" in line]))
    left.set(xlabel="step", ylabel=f"training {loss_label(experiment)}")
    points = [(line["step"], line[f"valid/{measure}"]) for line in lines if f"valid/{measure}" in line]
    right.plot(*zip(*points, strict=True), "o-") if points else None
    right.set(xlabel="step", ylabel=f"validation {measure.replace('_', ' ')}")
    return svg(figure)


def compared(groups: Mapping[str, Sequence[Logged]], experiment: Measured) -> bytes:
    """Plot training loss and validation measure against the epoch: the mean of each group of runs, and its range."""
    figure, both = axes_of(2)
    measure = experiment.measure
    for name, runs in groups.items():
        for axes, found in zip(both, values_by_epoch(runs, measure), strict=True):
            if found:
                epochs, values = list(found), list(found.values())
                (line,) = axes.plot(epochs, list(map(fmean, values)), "o-", markersize=3, label=plain(shortened(name)))
                if len(runs) > 1:
                    lowest, highest = list(map(min, values)), list(map(max, values))
                    axes.fill_between(epochs, lowest, highest, color=line.get_color(), alpha=0.2, linewidth=0)
    both[0].set(ylabel=f"training {loss_label(experiment)}")
    both[1].set(ylabel=f"validation {measure.replace('_', ' ')}")
    for axes in both:
        epochs_across(axes)
    if both[1].lines and min(min(line.get_ydata()) for line in both[1].lines) > 1:
        by_factors(both[1])  # suits a perplexity
    if both[1].lines:
        both[1].legend(fontsize="small")
    return svg(figure)


def plain(text: str) -> str:
    """Return text from outside for a plot: control characters are escaped, and a $ does not start math mode."""
    return printable(text).replace("$", r"\$")


def shortened(name: str) -> str:
    """Return a name without its middle if it is too long for a legend."""
    half = LABEL_CHARACTERS // 2
    return name if len(name) <= LABEL_CHARACTERS else f"{name[:half]} ... {name[-half:]}"


def loss_label(experiment: Measured) -> str:
    return f"loss, nats per {experiment.loss_unit}"


def epochs_across(axes: Any) -> None:
    """Set up an axis of epochs from 0 to at least 1, with ticks at integers only."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="epoch", xlim=(0, max(1.0, axes.get_xlim()[1])))
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def by_factors(axes: Any) -> None:
    """Set a logarithmic scale with plain tick labels: 6, not 6x10^0."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter("")


def by_epoch(runs: Sequence[Logged], measure: str) -> tuple[Points, Points]:
    """Return the mean over runs of what `values_by_epoch` returns."""
    losses, measures = values_by_epoch(runs, measure)
    return [(e, fmean(values)) for e, values in losses.items()], [(e, fmean(values)) for e, values in measures.items()]


def values_by_epoch(runs: Sequence[Logged], measure: str) -> tuple[dict[float, list[float]], dict[float, list[float]]]:
    """Return the mean training loss since the previous evaluation, and the measure, of each run at each evaluation.

    If runs stop early, the curves end with the first of them: later means would cover different runs. Of more than
    CURVE_POINTS evaluations, groups are averaged.
    """
    losses: dict[float, list[float]] = {}
    measures: dict[float, list[float]] = {}
    for run in runs:
        for line in evaluations(run.metrics(), measure):
            measures.setdefault(line["epoch"], []).append(line[f"valid/{measure}"])
            if "loss" in line:
                losses.setdefault(line["epoch"], []).append(line["loss"])
    return _of_all(losses, len(runs)), _of_all(measures, len(runs))


def evaluations(lines: Iterable[dict[str, float]], measure: str) -> Iterator[dict[str, float]]:
    """Yield a record for each evaluation in a log: epoch, measure, and mean training loss since the previous one."""
    since: list[float] = []
    for line in lines:
        if "loss" in line:
            since.append(line["loss"])
        if (name := f"valid/{measure}") in line:
            yield {"epoch": line["epoch"], name: line[name]} | ({"loss": _mean(since)} if since else {})
            since = []


def _of_all(found: dict[float, list[float]], count: int) -> dict[float, list[float]]:
    points = [(epoch, values) for epoch, values in sorted(found.items()) if len(values) == count]
    return {group[-1][0]: [_mean(own) for own in zip(*(values for _, values in group), strict=True)]
            for group in _groups(points)}  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    """Return the mean, which need not be finite; `fmean` raises for infinities of both signs."""
    return sum(values) / len(values)


def _groups(points: Sequence[T]) -> list[Sequence[T]]:
    """Cut points into at most CURVE_POINTS groups of equal size; the last may be smaller."""
    size = -(-len(points) // CURVE_POINTS) or 1
    return [points[i : i + size] for i in range(0, len(points), size)]


def smoothed(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Average groups of equal size, so that a long curve stays readable and its file small."""
    groups = _groups(points)
    return [group[-1][0] for group in groups], [_mean([y for _, y in group]) for group in groups]


def axes_of(count: int, square: bool = False) -> tuple[Any, Sequence[Any]]:
    """Return a figure with `count` plots side by side, and their axes."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(5.5 * count, 5.0 if square else 3.6))
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))  # inches; smaller values cut off text
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for each in axes:
        each.grid(alpha=0.3)
    return figure, axes


def svg(figure: Any) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "subquad"}):  # makes the output reproducible
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
