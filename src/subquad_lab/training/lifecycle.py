"""A run from its folder to its result: begun or opened again, trained from its last checkpoint, and finished."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from subquad_lab import UsageError
from subquad_lab.figures.plots import curves
from subquad_lab.system.files import locked
from subquad_lab.training import checkpoint, snapshot
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment, Task
from subquad_lab.training.loop import Trainer
from subquad_lab.training.processes import agreed, processes
from subquad_lab.training.progress import Display
from subquad_lab.training.run import ABOUT, CURVES, RESULT, Run, versions


@dataclass(frozen=True)
class Job:
    """A run that is to be trained: its folder, and what is trained in it."""

    experiment: Experiment[Any]
    config: Training
    run: Run
    task: Task


def begin(experiment: Experiment[Any], config: Training, root: Path, name: str | None) -> Job:
    """A new run in a folder of its own: the given name, or the next number."""
    task = build(experiment, config)
    about = {"experiment": experiment.name, "versions": versions(), **task.about()}
    run = create(experiment, config, root, name, lambda run: run.write_json(ABOUT, about))
    return Job(experiment, config, run, task)


def reopen(experiment: Experiment[Any], config: Training, run: Run) -> Job:
    """A run that is there, with the data that it began with."""
    task = build(experiment, config)
    if run.about()["data"].get("sha256") != task.about()["data"]["sha256"]:
        raise UsageError(f"{run.folder}: the data are not those that the run began with")
    return Job(experiment, config, run, task)


def build(experiment: Experiment[Any], config: Training) -> Task:
    """The task of a config, with random numbers that follow from its seed."""
    check_batch(config)
    snapshot.seed_all(config.seed)
    return experiment.build(config)


def check_batch(config: Training) -> None:
    """All processes, and all parts of a step, have as many rows."""
    count = processes().num_processes
    if config.batch % (count * config.accumulate):
        parts = f"{count} processes x {config.accumulate} parts"
        raise UsageError(f"batch: expected a number that {parts} divide, got {config.batch}")


def create(
    experiment: Experiment[Any], config: Training, root: Path, name: str | None, fill: Callable[[Run], None]
) -> Run:
    """A folder with the config and what `fill` writes: made by the main process, known to all."""
    where = None
    if processes().is_main_process:
        run = Run.create(root, experiment.name, {"experiment": experiment.name, **asdict(config)}, name)
        fill(run)
        where = str(run.folder)
    return Run(Path(agreed(where)))


def settled(config: Training) -> Any:
    """With the whole path of its data: the run may be resumed from another folder."""
    data = getattr(config, "data", None)
    return config if data is None else replace(config, data=str(Path(data).resolve()))  # type: ignore[call-arg]


@contextmanager
def trainer(job: Job, title: str) -> Iterator[Trainer]:
    """What trains the run, from its last whole checkpoint on; the folder is locked meanwhile."""
    state, folder = processes(), job.run.folder
    if not folder.is_dir():
        raise UsageError(f"--out: {folder} is not seen by every process; expected a disk that they share")
    with locked(folder) if state.is_main_process else nullcontext():
        made = Trainer(job.experiment, job.task, job.config, job.run, Display(title, silent=not state.is_main_process))
        found = checkpoint.newest(job.run.checkpoints)
        if found is not None:
            made.restore(found)
        yield made


def finish(job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """Write what the run has come to: pictures, records and, last of all, the result."""
    run = job.run
    if processes().is_main_process:
        run.write(CURVES, curves(run, job.experiment))
        for what, content in job.task.records().items():
            run.write_json(f"{what}.json", content)
        for what, picture in job.experiment.pictures(run, job.config).items():
            run.write(f"{what}.svg", picture)
        if skipped := run.about()["data"].get("skipped"):
            result["skipped"] = skipped
        run.write_json(RESULT, result)  # With it the run is finished.
    return result


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
