"""Runs from beginning to end: start, resume, evaluate, and the table of what there is."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.table import Table

from subquad_lab import UsageError, checkpoint, snapshot
from subquad_lab.configs import config_of
from subquad_lab.display import Display
from subquad_lab.experiments import experiment
from subquad_lab.files import locked
from subquad_lab.plots import curves
from subquad_lab.records import ABOUT, CURVES, Run, all_runs, versions
from subquad_lab.train import Task, Trainer, Training


def processes() -> PartialState:
    """This process among those that torchrun has started, or alone."""
    return PartialState(cpu=not torch.accelerator.is_available())  # Without a GPU it must be told to use gloo.


def start(name: str, config: Training, root: Path, folder: str | None = None) -> tuple[Run, dict[str, Any]]:
    """A new run in a folder of its own."""
    state = processes()
    task = _build(name, config)
    where = [None]
    if state.is_main_process:
        run = Run.create(root, name, {"experiment": name, **asdict(config)}, folder)
        run.write_json(ABOUT, {"experiment": name, "versions": versions(), **task.about()})
        where = [str(run.folder)]
    broadcast_object_list(where)
    return _train(Run(Path(str(where[0]))), task, config, name)


def resume(folder: str | Path) -> tuple[Run, dict[str, Any]]:
    """Go on where the last whole checkpoint is; a finished run is only read."""
    run = Run.open(folder)
    done = run.result()
    if done is not None:
        return run, done
    name, config = config_of(run)
    task = _build(name, config)
    if run.read_json(ABOUT).get("data") != task.about()["data"]:
        raise UsageError(f"{run.folder}: the data are not those that the run began with")
    return _train(run, task, config, name)


def _train(run: Run, task: Task, config: Training, name: str) -> tuple[Run, dict[str, Any]]:
    state = processes()
    with locked(run.folder) if state.is_main_process else nullcontext():
        trainer = Trainer(task, config, run, Display(name, silent=not state.is_main_process))
        found = checkpoint.newest(run.checkpoints)
        if found is not None:
            trainer.restore(found)
        result = trainer.train()
        if state.is_main_process:
            run.write(CURVES, curves(run, task.measure))
    return run, result


def _build(name: str, config: Training) -> Any:
    snapshot.seed_all(config.seed)
    return experiment(name).build(config)


def evaluate(folder: str | Path, part: str) -> dict[str, float]:
    """Figures of a part of the data, with the weights that the run has chosen, or has so far."""
    task = trained(folder)[1]
    return task.evaluate(part, lambda: None)


def trained(folder: str | Path) -> tuple[Run, Any]:
    """A run's task with its best weights, ready to be used."""
    run = Run.open(folder)
    name, config = config_of(run)
    task = _build(name, config)
    found = checkpoint.newest(run.checkpoints)
    if found is None:
        raise UsageError(f"RUN: {run.folder} has no checkpoint yet")
    best = found.state.get("progress", {}).get("best_checkpoint")
    if config.weights == "best" and best:
        found = checkpoint.at(run.checkpoints, best)
    snapshot.load_model(task.model, found)
    task.model.eval()
    return run, task


def table(root: Path) -> list[dict[str, str]]:
    """A row for each run that is there."""
    rows = []
    for run in all_runs(root):
        about, result = run.read_json(ABOUT), run.result()
        last = max((int(line["step"]) for line in run.metrics()), default=0)
        rows.append({
            "run": str(run.folder.relative_to(root)), "experiment": str(about.get("experiment")),
            "data": str(about.get("data", {}).get("name")), "parameters": f"{about['parameters']['total']:,}",
            "steps": f"{last:,}", "state": "finished" if result else "unfinished",
            "test": "" if result is None else figures(result["test"]),
        })  # fmt: skip
    return rows


def figures(found: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value:.4g}" for name, value in found.items())


def print_result(run: Run, result: dict[str, Any]) -> None:
    """What a run has come to, where it is, and what can be done with it; by the main process alone."""
    if processes().is_main_process:
        print_figures(result["test"], "test")
        print(f"{run.folder}: {result['steps']:,} steps, {result['seconds']:,.0f} s; curves in {run.folder / CURVES}")


def print_figures(found: dict[str, float], part: str | None = None) -> None:
    print(f"{part}: {figures(found)}" if part else figures(found))


def print_table(root: Path) -> None:
    rows = table(root)
    if not rows:
        print(f"no runs in {root}; `subquad train EXPERIMENT` makes one")
        return
    console = Console()
    if console.is_terminal:
        shown = Table(*rows[0])
        for row in rows:
            shown.add_row(*row.values())
        console.print(shown)
    else:
        for row in rows:
            print("  ".join(row.values()))
