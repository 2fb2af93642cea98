"""`subquad compare`: the variants of an experiment with the same data, steps and seed, in one table and one plot."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from subquad_lab import RunError, UsageError, runs
from subquad_lab.experiments import experiment
from subquad_lab.files import write_whole
from subquad_lab.plots import compared
from subquad_lab.records import ABOUT, Run
from subquad_lab.train import Training

COLUMNS = ("variant", "parameters", "validation", "test", "steps", "training", "speed")


def run(name: str, config: Training, out: Path) -> None:
    """Train what is not trained yet, then print and write the table and the plot."""
    runs.alone("compare")
    variants = experiment(name).variants(config)
    done: dict[str, Run] = {}
    results: dict[str, dict[str, Any]] = {}
    for i, (variant, own) in enumerate(variants.items(), 1):
        folder = variant.replace(":", "-")
        print(f"{i} of {len(variants)}: {variant}", flush=True)
        if (out / folder).is_dir() and (out / folder / ABOUT).is_file():
            if runs.config_of(Run.open(out / folder))[1] != runs.settled(own):
                raise UsageError(f"--out: {out / folder} is a run with another config; expected a new folder")
            done[variant], results[variant] = runs.resume(out / folder)
        else:
            done[variant], results[variant] = runs.start(name, own, out, folder)
    measure, unit = experiment(name).MEASURE, experiment(name).UNIT
    rows = [cells(variant, done[variant], results[variant], measure, unit) for variant in variants]
    content = {variant: {**results[variant], **done[variant].about()} for variant in variants}
    try:
        write_whole(out / "compare.json", json.dumps(content, indent=1).encode())
        write_whole(out / "compare.svg", compared(done, measure))
    except OSError as error:
        raise RunError(f"cannot write into {out}: {error.strerror}") from error
    console = Console()
    if console.is_terminal:
        table = Table(*COLUMNS, title=f"{name}: {measure}")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for row in (COLUMNS, *rows):
            print("".join(f"{cell:<14}" for cell in row).rstrip())
    print(f"{out / 'compare.svg'}, {out / 'compare.json'}")


def cells(variant: str, made: Run, result: dict[str, Any], measure: str, unit: str) -> tuple[str, ...]:
    parameters = made.about()["parameters"]["total"]
    return (
        variant, f"{parameters:,}", f"{result['valid'][measure]:.2f}", f"{result['test'][measure]:.2f}",
        f"{result['steps']:,}", f"{result['seconds']:,.0f} s", f"{result[unit + '_per_second']:,.0f} {unit}/s",
    )  # fmt: skip
