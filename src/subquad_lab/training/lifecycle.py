"""The life of a run: create or reopen it, train it from its last checkpoint, and write its result."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from subquad_lab import UsageError
from subquad_lab.figures.plots import curves
from subquad_lab.system.checksums import Damaged
from subquad_lab.system.files import locked, remove_leftovers
from subquad_lab.system.out_of_memory import memory_for
from subquad_lab.training import checkpoint, snapshot
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment, ExportingTask, SplitTask, Task
from subquad_lab.training.loop import Trainer
from subquad_lab.training.processes import agreed, check_sharing, processes
from subquad_lab.training.progress import Display
from subquad_lab.training.run import CURVES, RESULT, Run, as_json, versions


@dataclass(frozen=True)
class Job:
    """A run to train: its folder, experiment, config and task."""

    experiment: Experiment[Any]
    config: Training
    run: Run
    task: Task
    sharing: int = 1  # processes that share a sequence


def begin(experiment: Experiment[Any], config: Training, root: Path, name: str | None, sharing: int = 1) -> Job:
    """Create a run in a new folder with the given name, or with the next number."""
    task = build(experiment, config, sharing)
    about = {"experiment": experiment.name, "versions": versions(), **task.about()}
    run = create(experiment, config, root, name, about)
    return Job(experiment, config, run, task, sharing)


def reopen(experiment: Experiment[Any], config: Training, run: Run, sharing: int = 1) -> Job:
    """Reopen an existing run; raise if its data have changed."""
    task = build(experiment, config, sharing)
    if run.about()["data"].get("sha256") != task.about()["data"]["sha256"]:
        raise UsageError(f"{run.folder}: the data have changed since the run started; start a new run")
    return Job(experiment, config, run, task, sharing)


def build(experiment: Experiment[Any], config: Training, sharing: int = 1) -> Task:
    """Seed all generators and return the task of a config, of which `sharing` processes share each sequence."""
    check_sharing(sharing)
    check_batch(config, sharing)
    snapshot.seed_all(config.seed)
    with memory_for("loading the data and building the model", "use a smaller model, or data that fit into memory"):
        task = experiment.build(config)
    if sharing > 1:
        if not isinstance(task, SplitTask):
            raise UsageError(f"--sequence-parallel: not supported by {experiment.name}; use language")
        task.split(sharing)
    return task


def check_batch(config: Training, sharing: int) -> None:
    """Raise unless the batch divides evenly among processes, or groups of them, and accumulation steps."""
    count = processes().num_processes // sharing
    if config.batch % (count * config.accumulate):
        what = "processes" if sharing == 1 else f"groups of {sharing} processes"
        parts = f"{count} {what} x {config.accumulate} accumulation steps"
        raise UsageError(f"batch: expected a multiple of {parts}, got {config.batch}; change the number of processes")


def create(
    experiment: Experiment[Any], config: Training, root: Path, name: str | None, about: dict[str, Any] | None = None
) -> Run:
    """Create the folder of a run, or of a series if `about` is None. The main process writes; all return the run."""
    where = None
    if processes().is_main_process:
        run = Run.create(root, {"experiment": experiment.name, **asdict(config)}, name, about)
        where = str(run.folder)
    return Run(Path(agreed(where)))


def settled(config: Training) -> Any:
    """Return the config with absolute paths, so that the run can be resumed from another folder."""
    given = {name: path for name in config.paths if (path := getattr(config, name, None)) is not None}
    found: dict[str, Any] = {}
    for name, path in given.items():
        try:
            found[name] = str(Path(path).resolve())
        except RuntimeError as error:  # what Python before 3.13 says of a link that leads back to itself
            raise UsageError(f"--{name}: cannot read {path}: too many symbolic links") from error
    return replace(config, **found)


@contextmanager
def trainer(job: Job, title: str) -> Iterator[Trainer]:
    """Yield a trainer that starts from the latest intact checkpoint, with the folder locked."""
    state, folder = processes(), job.run.folder
    if not folder.is_dir():
        raise UsageError(f"--out: expected a folder that all processes share, got {folder}")
    with locked(folder) if state.is_main_process else nullcontext():
        display = Display(title, silent=not state.is_main_process)
        made = Trainer(job.experiment, job.task, job.config, job.run, display, job.sharing)
        found = checkpoint.newest(job.run.checkpoints)
        if state.is_main_process:
            remove_leftovers(folder)
            if found is None:
                job.run.rewind(None)
        if found is not None:
            made.restore(found)
        yield made


def finish(job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """Write plots, records and finally the result, which marks the run as finished."""
    run = job.run
    if processes().is_main_process:
        records = {f"{what}.json": as_json(content) for what, content in job.task.records().items()}
        exports = job.task.exports() if isinstance(job.task, ExportingTask) else {}
        run.write({CURVES: curves(run, job.experiment), **records, **exports})
        pictures = {f"{what}.svg": picture for what, picture in job.experiment.pictures(run, job.config).items()}
        if skipped := run.about()["data"].get("skipped"):
            result["skipped"] = skipped
        run.write_last({**pictures, RESULT: as_json(result)})  # Its checksum marks the run as finished.
    return result


def load_weights(model: nn.Module, run: Run, config: Training) -> int:
    """Load the best or the last weights, as configured, switch to evaluation mode, and return their step."""
    found = checkpoint.newest(run.checkpoints)
    if found is None:
        raise UsageError(f"RUN: {run.folder} has no checkpoint yet")
    progress = found.state.get("progress")
    number = progress.get("best_checkpoint") if isinstance(progress, dict) else None
    if config.weights == "best" and isinstance(number, int) and number:
        found = checkpoint.best(run.checkpoints, number)
    snapshot.load_model(model, found)
    model.eval()
    after = found.state.get("progress")
    step = after.get("step") if isinstance(after, dict) else None
    if not isinstance(step, int):
        raise Damaged(f"checkpoint {found.path}: expected the number of its step, got {step!r}")
    return step
