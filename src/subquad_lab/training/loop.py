"""The training loop of all experiments.

    loss of a batch -> gradients -> clipping -> update, with learning rate lr * schedule
    at intervals, an evaluation and a checkpoint; resuming from it is bit-for-bit identical to an uninterrupted run

A batch depends only on its position in the data, (epoch, index), so a run can resume at any step. The rows of a batch
are divided among the processes and, within a process, among the gradient accumulation steps; neither changes the
update. With sequence parallelism, several processes have the same rows, and a part of each sequence. A task in stages
trains some of its parameters at a time.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from torch import Tensor

from subquad.distributed import sequence_parallel
from subquad_lab import Diverged, UsageError
from subquad_lab.system.checksums import Damaged
from subquad_lab.system.out_of_memory import is_out_of_memory, memory_for
from subquad_lab.training import checkpoint, snapshot
from subquad_lab.training.checkpoint import Checkpoint
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Carry, Experiment, PartName, Rows, SplitTask, StagedTask, Task
from subquad_lab.training.interruption import Interrupted, Interruption
from subquad_lab.training.optimizers import make_optimizer
from subquad_lab.training.processes import sequence_group
from subquad_lab.training.progress import Display
from subquad_lab.training.run import Run
from subquad_lab.training.schedule import Progress, part_done, rate

SAVE_SECONDS = 60.0


class Trainer:
    """The state of one run: model, optimizer and progress."""

    def __init__(
        self, experiment: Experiment[Any], task: Task, settings: Training, run: Run, display: Display, sharing: int = 1
    ) -> None:  # fmt: skip
        self.experiment, self.task, self.settings, self.run, self.display = experiment, task, settings, run, display
        self.stages = task if isinstance(task, StagedTask) else None
        reducer = DistributedDataParallelKwargs(find_unused_parameters=self.stages is not None)
        self.accelerator = Accelerator(cpu=not torch.accelerator.is_available(), kwargs_handlers=[reducer])
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.sharing, self.group = sharing, sequence_group(sharing)
        groups = [list(task.model.parameters())] if self.stages is None else self.stages.groups
        self.optimizer = make_optimizer(settings.optimizer, [{"params": group} for group in groups], settings.lr,
                                        settings.momentum, settings.weight_decay)  # fmt: skip
        self.model, self.optimizer = self.accelerator.prepare(task.model, self.optimizer)
        self.total = settings.steps or settings.epochs * task.batches
        self.boundaries = frozenset() if self.stages is None else self.stages.boundaries
        self.progress = Progress(evaluated=-1 if 0 in self.boundaries else 0)
        self.carry = self._mine(task.begin(settings.batch))
        self.saved = 0.0  # seconds of training at the last checkpoint
        self.kept = 0  # the checkpoint that this process resumed from
        snapshot.seed_all(settings.seed + 1_000_003 * self.rank)  # The model exists by now, equal in all processes.

    # --- The loop -------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train until the end, an early stop or a signal, and return the result with the test metrics."""
        with Interruption() as self.interruption, self.display, self.run:
            self.display.begin()
            if not checkpoint.numbers(self.run.checkpoints):
                self.save()
            try:
                while True:
                    if self._is_evaluation_due():
                        self.evaluate()
                        self.save()
                    if self.is_done:
                        break
                    with memory_for(f"training {self.run.folder}, step {self.progress.step + 1}", self._remedy):
                        self.step()
                    self._stop_if_asked()
                    if self._is_saving_due():
                        self.save()
            except Interrupted:
                self.save()
                raise
            return self.result()  # Everything is saved by now, so loading other weights is safe.

    @property
    def is_done(self) -> bool:
        patience = self.settings.patience
        stopped = patience is not None and self.progress.since_best >= patience
        return stopped or part_done(self.settings, self.progress, self.total) >= 1

    def step(self) -> None:
        """Perform one optimizer step."""
        begin = time.perf_counter()
        progress, accumulate = self.progress, self.settings.accumulate
        rates = self._rates()
        rows = self._mine(dict(enumerate(self.task.batch(progress.epoch, progress.index))))
        pieces = list(zip(_cut(rows, accumulate), _cut(self.carry, accumulate), strict=True))
        losses, carries = [], []
        for i, (piece, carry) in enumerate(pieces):
            last = i + 1 == accumulate
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                mean, carried = self._differentiate(tuple(piece.values()), carry)
            losses.append(mean)
            carries.append(carried)
        loss = float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))
        norm = self._clip()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(
                f"step {progress.step + 1}: the loss is {loss} and the gradient norm is {norm}; the step was not "
                f"applied, and the last checkpoint in {self.run.checkpoints} is kept. Try a smaller --lr in a new run."
            )
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.carry = {name: torch.cat([carried[name] for carried in carries]) for name in self.carry}
        self._advance(self.task.count(tuple(rows.values())) * (self.world // self.sharing), time.perf_counter() - begin)
        if self.accelerator.is_main_process:
            self.run.log(progress.step, {"epoch": self._epochs, "loss": loss, "gradient": norm, "lr": max(rates)})
            self.display.step(progress.step, part_done(self.settings, progress, self.total), loss,
                              progress.units / max(progress.seconds, 1e-9), self.experiment.unit)  # fmt: skip

    def _differentiate(self, rows: Rows, carry: Carry) -> tuple[Tensor, Carry]:
        """Add the gradients of the rows' mean loss, and return it with the recurrent state."""
        accumulate = self.settings.accumulate
        if self.group is None:
            mean, carried = self.task.loss(self.model, rows, carry)
            self.accelerator.backward(mean / accumulate)
            return mean.detach(), carried
        assert isinstance(self.task, SplitTask)  # `lifecycle.build` has checked it.
        split = self.task.split(self.sharing)
        with sequence_parallel(self.model, self.group, split=split, gradients="mean") as parallel:
            mean = self.task.split_loss(self.model, rows, parallel)
            self.accelerator.backward(mean / accumulate)
        return mean.detach(), {}

    def _rates(self) -> list[float]:
        """Return the learning rate of each group of parameters in the next step; a task in stages prepares for it."""
        if self.stages is None:
            return [rate(self.settings, self.progress, self.total)]
        return self.stages.enter(self.progress.step)

    def _clip(self) -> float:
        """Clip the gradients of each group of parameters, and return the norm of all before clipping."""
        limit = math.inf if self.settings.clip is None else self.settings.clip
        norms = [float(self.accelerator.clip_grad_norm_(group["params"], limit))
                 for group in self.optimizer.param_groups]  # fmt: skip
        return norms[0] if len(norms) == 1 else math.hypot(*norms)

    def _advance(self, units: int, seconds: float) -> None:
        progress = self.progress
        progress.step += 1
        progress.units += units
        spent = torch.tensor(progress.seconds + seconds, dtype=torch.float64, device=self.accelerator.device)
        progress.seconds = float(self.accelerator.reduce(spent, "mean"))  # All processes must stop at the same step.
        progress.index += 1
        if progress.index == self.task.batches:
            progress.epoch, progress.index = progress.epoch + 1, 0
            self.carry = self._mine(self.task.begin(self.settings.batch))

    def _is_evaluation_due(self) -> bool:
        step = self.progress.step
        every = self.settings.evaluate_every or self.task.batches
        return step > self.progress.evaluated and (step % every == 0 or step in self.boundaries or self.is_done)

    def evaluate(self) -> None:
        """Evaluate on the validation set and update the best value."""
        figures = self._figures("valid")
        progress, value = self.progress, figures[self.experiment.measure]
        progress.evaluated = progress.step
        if self._is_better(value):
            progress.best, progress.best_step, progress.since_best = value, progress.step, 0
        else:
            progress.since_best += 1
        if self.accelerator.is_main_process:
            named = {f"valid/{name}": figure for name, figure in figures.items()}
            timing = {"seconds": progress.seconds, "speed": progress.units / max(progress.seconds, 1e-9)}
            self.run.log(progress.step, {"epoch": self._epochs, **named}, timing)
            best = "none" if progress.best is None else f"{progress.best:.4g}, step {progress.best_step:,}"
            self.display.evaluated(progress.step, figures, f"{self.experiment.measure} {best}", self.is_done)

    def _is_better(self, value: float) -> bool:
        best = self.progress.best
        if best is None:
            return not math.isnan(value)
        return value > best if self.experiment.higher_is_better else value < best

    @property
    def _epochs(self) -> float:
        """Number of passes over the training set so far."""
        return self.progress.step / self.task.batches

    def _figures(self, part: PartName) -> dict[str, float]:
        if self.stages is not None:
            self.stages.enter(self.progress.step)
        self.task.model.eval()
        try:
            with memory_for(f"evaluating {self.run.folder} on the {part} part", self._remedy):
                return self.task.evaluate(part, self._stop_if_asked)
        finally:
            self.task.model.train()

    @property
    def _remedy(self) -> str:
        return (
            f"the last checkpoint is kept. Free memory and run `subquad train --resume {self.run.folder}`, or start a "
            "new run with a smaller --batch, a larger --accumulate or a smaller model"
        )

    def result(self) -> dict[str, Any]:
        """Return the metrics of the selected weights, with the number of steps, time and speed."""
        progress = self.progress
        chosen = progress.step
        if self.settings.weights == "best" and progress.best_step:
            best = checkpoint.best(self.run.checkpoints, progress.best_checkpoint)
            snapshot.load_model(self.task.model, best)
            chosen = best.state["progress"]["step"]
        return {
            "valid": self._figures("valid"), "test": self._figures("test"), "weights_of_step": chosen,
            "steps": progress.step, "epochs": self._epochs, "seconds": progress.seconds,
            f"{self.experiment.unit}_per_second": progress.units / max(progress.seconds, 1e-9), "processes": self.world,
            "processes_per_sequence": self.sharing,
        }  # fmt: skip

    # --- Several processes ----------------------------------------------------------------------------------------

    def _mine(self, rows: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Return the rows of a batch that belong to this process."""
        size, place = self.settings.batch * self.sharing // self.world, self.rank // self.sharing
        mine = slice(place * size, (place + 1) * size)
        return {name: tensor[mine].to(self.accelerator.device) for name, tensor in rows.items()}

    def _stop_if_asked(self) -> None:
        number = self.interruption.number or 0
        if self.world > 1:  # A signal may have reached only one process.
            number = int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max())
        if number:
            raise Interrupted(number)

    # --- Checkpoints ----------------------------------------------------------------------------------------------

    def _is_saving_due(self) -> bool:
        if self.settings.save_every is not None:
            return self.progress.step % self.settings.save_every == 0
        return self.progress.seconds - self.saved > SAVE_SECONDS  # These seconds are the same in all processes.

    def save(self) -> None:
        """Save a checkpoint: all processes contribute, the main process writes."""
        number = checkpoint.next_number(self.run.checkpoints)  # Read before the main process can write.
        before = self.progress.best_checkpoint  # Keep it one more time: the previous checkpoint refers to it.
        if self.progress.best_step == self.progress.step > 0:
            self.progress.best_checkpoint = number
        generator, others = snapshot.random_numbers()
        generators = self.accelerator.gather(generator[None].to(self.accelerator.device))
        everyone = self._gathered(others)
        carry = {name: self.accelerator.gather(tensor.contiguous()) for name, tensor in self.carry.items()}
        if self.accelerator.is_main_process:
            tensors, numbers = snapshot.pack_optimizer(self.optimizer)
            tensors |= snapshot.pack("model", self.accelerator.unwrap_model(self.model).state_dict())
            tensors |= snapshot.pack("carry", carry)
            tensors |= {f"random.torch.{i}": state for i, state in enumerate(generators)}
            state = {
                "progress": asdict(self.progress),
                "optimizer": numbers,
                "random": everyone,
                "logs": self.run.marks(),
            }
            kept = {self.progress.best_checkpoint, before, self.kept}
            checkpoint.save(self.run.checkpoints, number, Checkpoint(tensors, state), kept)
        self.accelerator.wait_for_everyone()
        self.saved = self.progress.seconds

    def restore(self, found: Checkpoint) -> None:
        """Resume from a checkpoint; it may come from a different number of processes."""
        try:
            snapshot.load_model(self.task.model, found)
            snapshot.unpack_optimizer(self.optimizer, found.tensors, found.state["optimizer"])
            self.progress = Progress(**found.state["progress"])
            carry = snapshot.unpack("carry", found.tensors)
            shapes = {name: tensor.shape for name, tensor in self.task.begin(self.settings.batch).items()}
            if {name: tensor.shape for name, tensor in carry.items()} != shapes:
                raise ValueError(f"carry: expected the shapes {shapes}, got {carry}")
            self.carry = self._mine(carry)
            generators = snapshot.unpack("random.torch", found.tensors)
            if str(self.rank) in generators:
                snapshot.set_random_numbers(generators[str(self.rank)], found.state["random"][self.rank])
            else:  # The checkpoint comes from fewer processes.
                snapshot.seed_all(self.settings.seed + 1_000_003 * self.rank + self.progress.step)
            if self.accelerator.is_main_process:
                self.run.rewind(found.state["logs"])
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            if isinstance(error, UsageError) or is_out_of_memory(error):
                raise
            raise Damaged(f"checkpoint {found.path}: does not fit this run: {type(error).__name__}: {error}") from error
        self.kept = int(found.path.name) if found.path else 0

    def _gathered(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        if self.world == 1:
            return [entry]
        gathered: list[dict[str, Any]] = gather_object([entry])
        return gathered


def _cut(rows: dict[Any, Tensor], parts: int) -> list[dict[Any, Tensor]]:
    """Split the rows into equal parts."""
    pieces = {name: tensor.chunk(parts) for name, tensor in rows.items()}
    return [{name: piece[i] for name, piece in pieces.items()} for i in range(parts)]
