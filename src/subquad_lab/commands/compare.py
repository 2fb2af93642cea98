"""`subquad compare`: train the variants of an experiment on the same data, budget and seeds, and compare them."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from subquad_lab import RunError, UsageError
from subquad_lab.figures.classification import Predictions
from subquad_lab.figures.intervals import Interval, difference
from subquad_lab.figures.plots import compared
from subquad_lab.figures.tables import Table
from subquad_lab.system.files import write_whole
from subquad_lab.system.text import say
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.processes import refuse_several
from subquad_lab.training.seeds import Series, check_same_data, train

COLUMNS = ("variant", "parameters", "validation", "test", "steps", "training", "speed")
STATE = "state"  # the last column, of experiments that record its size


def run(experiment: Experiment[Any], config: Training, out: Path) -> None:
    """Train the variants that are not finished, then print and write the table, the verdicts and the plot."""
    refuse_several("compare")
    variants = experiment.variants(config)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot create {out}: {error.strerror}") from error
    done: dict[str, Series] = {}
    for i, (variant, own) in enumerate(variants.items(), 1):
        say(f"{i} of {len(variants)}: {variant}", flush=True)
        done[variant] = train(experiment, own, out / variant.replace(":", "-").replace(" ", "-"))
    check_same_data([run for series in done.values() for run in series.runs])
    measure = experiment.measure
    rows = [cells(variant, series, experiment) for variant, series in done.items()]
    found = differences(done, measure)
    content: dict[str, dict[str, Any]] = {
        variant: {"runs": [{**run.about(), **result} for run, result in zip(series.runs, series.results, strict=True)]}
        for variant, series in done.items()
    }  # fmt: skip
    for variant, interval in found.items():
        content[variant]["first_minus_this"] = asdict(interval)
    try:
        write_whole(out / "compare.json", json.dumps(content, indent=1).encode())
        drawn = compared({variant: series.runs for variant, series in done.items()}, experiment)
        write_whole(out / "compare.svg", drawn)
        pictures = experiment.shared_pictures({variant: series.runs for variant, series in done.items()})
        for name, picture in pictures.items():
            write_whole(out / f"{name}.svg", picture)
    except OSError as error:
        raise RunError(f"cannot write into {out}: {error.strerror}") from error
    better = "higher" if experiment.higher_is_better else "lower"
    columns = COLUMNS if len(rows[0]) == len(COLUMNS) else (*COLUMNS, STATE)
    Table(columns, rows, f"{experiment.name}: {measure.replace('_', ' ')}, {better} is better").print()
    say(*figures(done, measure), *verdicts(done, measure, found))
    say(", ".join(str(out / name) for name in ("compare.svg", *(f"{name}.svg" for name in pictures), "compare.json")))


def cells(variant: str, series: Series, experiment: Experiment[Any]) -> tuple[str, ...]:
    measure, unit = experiment.measure, experiment.unit
    about = series.runs[0].about()
    parameters, state = about["parameters"]["total"], about.get("state_bytes")
    steps, seconds = (fmean(result[what] for result in series.results) for what in ("steps", "seconds"))
    speed = fmean(result[f"{unit}_per_second"] for result in series.results)
    return (
        variant, f"{parameters:,}", series.shown("valid", measure), series.shown("test", measure),
        f"{steps:,.0f}", f"{seconds:,.0f} s", f"{speed:,.0f} {unit}/s", *([] if state is None else [f"{state:,} B"]),
    )  # fmt: skip


def figures(done: dict[str, Series], measure: str) -> list[str]:
    """Return a line for each variant with its other test metrics."""
    lines = []
    for variant, series in done.items():
        others = [name for name in series.results[0]["test"] if name != measure]
        lines.append(f"{variant}, test: " + ", ".join(
            f"{name.replace('_', '-')} {series.shown('test', name)}" for name in others
        ))  # fmt: skip
    return lines


def differences(done: dict[str, Series], measure: str) -> dict[str, Interval]:
    """Return the difference of the first variant and each other one on the test set; empty for a single seed."""
    (_, first), *others = done.items()
    if len(first.runs) < 2:
        return {}
    own = right(first)
    return {
        variant: difference(first.values("test", measure), series.values("test", measure), own, right(series),
                            comparisons=len(others))
        for variant, series in others
    }  # fmt: skip


def right(series: Series) -> list[float] | None:
    """Return for each test example the fraction of seeds that classified it correctly."""
    found = [predictions.right for run in series.runs if (predictions := Predictions.of(run.folder)) is not None]
    return [fmean(shares) for shares in zip(*found, strict=True)] if len(found) == len(series.runs) else None


def verdicts(done: dict[str, Series], measure: str, found: dict[str, Interval]) -> list[str]:
    """Describe the result of `differences` in sentences."""
    if not found:
        return []
    (name, first), *_ = done.items()
    examples = right(first)
    over = f"{len(first.runs)} seeds" + (f" and {len(examples):,} test examples" if examples else "")
    lines = [
        "+- and (low to high): in the table, the 95 % confidence interval of the mean over seeds; below, family-wise "
        f"95 % confidence for all {len(found)} differences, over {over}"
    ]
    for other, interval in found.items():
        size = "significant" if interval.excludes_zero() else "not significant"
        lines.append(
            f"{name} minus {other}: {measure.replace('_', ' ')} {interval.mean:+.4f} +- {interval.half:.4f}: {size}"
        )
    return lines
