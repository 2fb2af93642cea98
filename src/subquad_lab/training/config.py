"""What every run is told: the fields that the configs of all experiments have."""

import math
from dataclasses import dataclass
from typing import Literal

from subquad_lab import UsageError
from subquad_lab.training import optimizers


@dataclass(frozen=True)
class Training:
    """The fields that every experiment's config has.

    Args:
        seed: Of the parameters, of the order of the data, and of dropout.
        seeds: Runs, each with the next seed; more than one show how much of a figure is chance.
        epochs: Passes over the training part.
        steps: Updates, instead of epochs.
        minutes: Of training, after which the run ends even if the epochs or steps are not done.
        batch: Rows of a step, over all processes.
        accumulate: Parts into which a batch is cut to save memory; the step is the same.
        optimizer: sgd (with momentum), average or corrected (with a running average of the gradients, without and
            with its bias corrected), adam; sgdw and adamw have a decoupled weight decay, the others an L2 penalty.
        lr: Learning rate, at its highest.
        momentum: Share of the past in the step, of all but adam and adamw.
        weight_decay: Of the optimizer.
        schedule: How the rate goes on after the warm-up: constant, linear to 0, or cosine to 0. Or by epochs: a
            hundredth of lr, half, lr, and then linear to a hundredth in the last.
        warmup: Steps in which the rate rises to lr.
        clip: The largest norm of the gradient.
        evaluate_every: Steps between evaluations; after each epoch if not given.
        patience: Evaluations without a better one after which the run stops early.
        save_every: Steps between checkpoints; after each evaluation and each minute if not given.
        weights: Which weights the test sees, those of the best evaluation or the last.
    """

    seed: int = 0
    seeds: int = 1
    epochs: int = 1
    steps: int | None = None
    minutes: float | None = None
    batch: int = 32
    accumulate: int = 1
    optimizer: optimizers.Name = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine", "epochs"] = "constant"
    warmup: int = 0
    clip: float | None = None
    evaluate_every: int | None = None
    patience: int | None = None
    save_every: int | None = None
    weights: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        at_least = dict(
            seeds=1, epochs=1, steps=1, batch=1, accumulate=1, warmup=0, evaluate_every=1, patience=1, save_every=1
        )
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name}: expected an integer >= {least}, got {value}")
        for name in ("lr", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}: expected a number >= 0, got {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum: expected a number in [0, 1), got {self.momentum}")
        for name in ("clip", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name}: expected a positive number, got {value}")
        if not 0 <= self.seed <= 2**32 - self.seeds:
            raise UsageError(f"seed: expected an integer in [0, 2^32), got {self.seed}")
        if self.schedule == "epochs":
            others = {"steps": self.steps, "minutes": self.minutes, "warmup": self.warmup or None}
            for name, value in others.items():
                if value is not None:
                    raise UsageError(f"{name}: expected none with the schedule by epochs, got {value}")
            if self.epochs < 4:
                raise UsageError(f"epochs: expected at least 4 for the schedule by epochs, got {self.epochs}")
        if self.batch % self.accumulate:
            raise UsageError(f"accumulate: expected a number that divides the batch of {self.batch}, "
                             f"got {self.accumulate}")  # fmt: skip
