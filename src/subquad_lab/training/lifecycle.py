"""Runs from beginning to end: start, resume, evaluate, and the table of what there is."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from subquad_lab import UsageError
from subquad_lab.experiments import experiment
from subquad_lab.figures.plots import curves
from subquad_lab.options.fields import config_of
from subquad_lab.system.files import locked
from subquad_lab.training import checkpoint, snapshot
from subquad_lab.training.config import Training
from subquad_lab.training.interruption import Interrupted
from subquad_lab.training.loop import Task, Trainer
from subquad_lab.training.progress import Display
from subquad_lab.training.run import ABOUT, CURVES, RESULT, Run, all_runs, versions


def processes() -> PartialState:
    """This process among those that torchrun has started, or alone."""
    return PartialState(cpu=not torch.accelerator.is_available())  # Without a GPU it must be told to use gloo.


def start(
    name: str, config: Training, root: Path, folder: str | None = None, title: str | None = None
) -> tuple[Run, dict[str, Any]]:
    """A new run in a folder of its own."""
    check_batch(config)
    config = settled(config)
    task = build(name, config)
    about = {"experiment": name, "versions": versions(), **task.about()}
    run = create(name, config, root, folder, lambda run: run.write_json(ABOUT, about))
    return _train(run, task, config, name, title)


def check_batch(config: Training) -> None:
    count = processes().num_processes
    if config.batch % (count * config.accumulate):
        parts = f"{count} processes x {config.accumulate} parts"
        raise UsageError(f"batch: expected a number that {parts} divide, found {config.batch}")


def agreed(value: Any) -> Any:
    """What the main process says, in all processes."""
    said = [value]
    broadcast_object_list(said)
    return said[0]


def create(name: str, config: Training, root: Path, folder: str | None, fill: Callable[[Run], None]) -> Run:
    """A folder with the config and what `fill` writes: made by the main process, known to all."""
    where = None
    if processes().is_main_process:
        run = Run.create(root, name, {"experiment": name, **asdict(config)}, folder)
        fill(run)
        where = str(run.folder)
    return Run(Path(agreed(where)))


def settled(config: Training) -> Any:
    """With the whole path of its data: the run may be resumed from another folder."""
    data = getattr(config, "data", None)
    return config if data is None else replace(config, data=str(Path(data).resolve()))


def resume(folder: str | Path, title: str | None = None) -> tuple[Run, dict[str, Any]]:
    """Go on where the last whole checkpoint is; a finished run is only read."""
    run = Run.open(folder)
    done = run.result()
    if done is not None:
        return run, done
    name, config, task = task_of(run)
    return _train(run, task, config, name, title)


def _train(run: Run, task: Task, config: Training, name: str, title: str | None) -> tuple[Run, dict[str, Any]]:
    state = processes()
    if not run.folder.is_dir():
        raise UsageError(f"--out: {run.folder} is not seen by every process; expected a disk that they share")
    with locked(run.folder) if state.is_main_process else nullcontext():
        trainer = Trainer(task, config, run, Display(title or name, silent=not state.is_main_process))
        found = checkpoint.newest(run.checkpoints)
        if found is not None:
            trainer.restore(found)
        try:
            result = trainer.train()
        except Interrupted as error:
            error.folder = run.folder
            raise
        if state.is_main_process:
            run.write(CURVES, curves(run, task.measure))
            for what, content in task.records().items():
                run.write_json(f"{what}.json", content)
            for what, picture in experiment(name).pictures(run).items():
                run.write(f"{what}.svg", picture)
            if skipped := run.about()["data"].get("skipped"):
                result["skipped"] = skipped
            run.write_json(RESULT, result)  # The last of all: with it the run is finished.
    return run, result


def build(name: str, config: Training) -> Any:
    snapshot.seed_all(config.seed)
    return experiment(name).build(config)


def task_of(run: Run) -> tuple[str, Training, Any]:
    """A run's experiment, config and task, with the data that it began with."""
    name, config = config_of(run)
    task = build(name, config)
    if run.about()["data"].get("sha256") != task.about()["data"]["sha256"]:
        raise UsageError(f"{run.folder}: the data are not those that the run began with")
    return name, config, task


def evaluate(folder: str | Path, part: str) -> dict[str, float]:
    """Figures of a part of the data, with the weights that the run has chosen, or has so far."""
    return trained(folder)[1].evaluate(part, lambda: None)


def trained(folder: str | Path) -> tuple[Run, Any]:
    """A run's task with its best weights, or its last, as its config says; ready to be used."""
    run = Run.open(folder)
    _, config, task = task_of(run)
    load_weights(task.model, run, config)
    return run, task


def load_weights(model: nn.Module, run: Run, config: Training) -> None:
    """The best, or the last, as the config says; the model is then ready to be used."""
    found = checkpoint.newest(run.checkpoints)
    if found is None:
        raise UsageError(f"RUN: {run.folder} has no checkpoint yet")
    progress = found.state.get("progress")
    number = progress.get("best_checkpoint") if isinstance(progress, dict) else None
    if config.weights == "best" and isinstance(number, int) and number:
        found = checkpoint.best(run.checkpoints, number)
    snapshot.load_model(model, found)
    model.eval()


def alone(command: str) -> None:
    """Refuse what makes several runs on several processes: each of its runs may have them, not all of it."""
    if processes().num_processes > 1:
        raise UsageError(
            f"{command}: expected one process, found {processes().num_processes}; start it without torchrun"
        )


COLUMNS = ("run", "experiment", "model", "data", "parameters", "steps", "state", "test")


def table(root: Path) -> list[dict[str, str]]:
    """A row for each run that is there; a warning says what is wrong with a damaged one."""
    rows = []
    for run in all_runs(root):
        try:
            rows.append(row(run, root))
        except UsageError as error:
            warnings.warn(f"{run.folder} is damaged: {error}", stacklevel=2)
            rows.append(dict.fromkeys(COLUMNS, "") | {"run": str(run.folder.relative_to(root)), "state": "damaged"})
    return rows


def row(run: Run, root: Path) -> dict[str, str]:
    about, result = run.about(), run.result()
    last = max((int(line["step"]) for line in run.metrics()), default=0)
    cells = (
        str(run.folder.relative_to(root)), about["experiment"],
        experiment(about["experiment"]).label(config_of(run)[1]), str(about["data"].get("name")),
        f"{about['parameters']['total']:,}", f"{last:,}", "finished" if result else "unfinished",
        "" if result is None else figures(result["test"]),
    )  # fmt: skip
    return dict(zip(COLUMNS, cells, strict=True))


def figures(found: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value:.4g}" for name, value in found.items())


def print_table(root: Path) -> None:
    rows = table(root)
    if not rows:
        print(f"no runs in {root}; `subquad train EXPERIMENT` makes one")
        return
    console = Console()
    if console.is_terminal:
        shown = Table(*rows[0])
        for row in rows:
            shown.add_row(*map(escape, row.values()))
        console.print(shown)
    else:
        cells = [tuple(rows[0]), *(tuple(row.values()) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
