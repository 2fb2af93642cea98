"""The config fields that all experiments share."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from subquad_lab import UsageError
from subquad_lab.training import optimizers


@dataclass(frozen=True)
class Training:
    """The config fields that all experiments share.

    Args:
        seed: Random seed of the parameters, the data order and dropout.
        seeds: Number of runs, with consecutive seeds. More than one gives confidence intervals.
        epochs: Number of passes over the training set.
        steps: Number of optimizer steps; replaces --epochs.
        minutes: Stop after this many minutes of training, even if --epochs or --steps are not reached.
        batch: Total batch size of all processes.
        accumulate: Split each batch into this many parts to save memory. The update is the same.
        optimizer: sgd (with momentum); average (exponential moving average of the gradients); corrected (average with
            bias correction); adam. sgdw and adamw use decoupled weight decay, the others an L2 penalty.
        lr: Peak learning rate.
        momentum: Momentum (ignored by adam and adamw).
        weight_decay: Weight decay.
        schedule: Learning rate schedule after the warm-up: constant, linear to 0, or cosine to 0. epochs: lr/100 in
            epoch 1, about lr/2 in epoch 2, lr in epoch 3, then a linear decay to lr/100 in the last epoch.
        warmup: Number of steps of linear learning rate warm-up.
        clip: Maximum gradient norm; null: no clipping.
        evaluate_every: Steps between evaluations; null: one epoch.
        patience: Stop early after this many evaluations without improvement; null: never.
        save_every: Steps between checkpoints; null: save after each evaluation and about once a minute.
        weights: Weights to test: those of the best evaluation, or the last ones.
    """

    paths: ClassVar[tuple[str, ...]] = ("data",)  # fields that name a file or a folder

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
        minimum = dict(
            seeds=1, epochs=1, steps=1, batch=1, accumulate=1, warmup=0, evaluate_every=1, patience=1, save_every=1
        )
        for name, least in minimum.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(
                    f"{name}: expected {'a positive integer' if least else 'an integer >= 0'}, got {value}"
                )
        for name in self.paths:
            path = getattr(self, name, None)  # Not all experiments can read files.
            if path is not None and (not path or "\0" in path):
                raise UsageError(f"{name}: expected a file or folder, got {path!r}")
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
                    raise UsageError(f"{name}: expected no value with --schedule epochs, got {value}")
            if self.epochs < 4:
                raise UsageError(f"epochs: expected at least 4 with --schedule epochs, got {self.epochs}")
        if self.batch % self.accumulate:
            raise UsageError(f"accumulate: expected a divisor of the batch size {self.batch}, "
                             f"got {self.accumulate}")  # fmt: skip
