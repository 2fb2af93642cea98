"""Pictures as SVG: curves of a run, or of several side by side."""

import io
from collections.abc import Sequence
from typing import Any

from subquad_lab.records import Run

SMOOTH = 200  # points of a training curve: the mean of the steps between


def curves(run: Run, measure: str) -> bytes:
    """Training loss by step, and the validation measure."""
    lines = list(run.metrics())
    figure, (left, right) = _axes(2)
    left.plot(*smoothed([(line["step"], line["loss"]) for line in lines if "loss" in line]))
    left.set(xlabel="step", ylabel="training loss")
    points = [(line["step"], line[f"valid/{measure}"]) for line in lines if f"valid/{measure}" in line]
    right.plot(*zip(*points, strict=True), "o-") if points else None
    right.set(xlabel="step", ylabel=f"validation {measure.replace('_', ' ')}")
    return _svg(figure)


def compared(runs: dict[str, Run], measure: str) -> bytes:
    """The validation measure of several runs, by step."""
    figure, (axes,) = _axes(1)
    for name, run in runs.items():
        key = f"valid/{measure}"
        points = [(line["step"], line[key]) for line in run.metrics() if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=name.replace("$", r"\$"))  # no formulas
    axes.set(xlabel="step", ylabel=f"validation {measure.replace('_', ' ')}", yscale="log")
    axes.legend(fontsize="small")
    return _svg(figure)


def smoothed(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Means of equal runs of points, so that a long curve stays readable and its file small."""
    size = -(-len(points) // SMOOTH) or 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [group[-1][0] for group in groups], [sum(y for _, y in group) / len(group) for group in groups]


def _axes(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * count, 3.6), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for each in axes:
        each.grid(alpha=0.3)
    return figure, axes


def _svg(figure: Any) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "subquad"}):  # The same picture has the same bytes.
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
