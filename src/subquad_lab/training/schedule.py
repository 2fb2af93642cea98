"""Progress of a run, and the learning rate schedule.

rate = lr * warm-up * schedule(fraction of the steps or of the time that is done)
"""

import math
from dataclasses import dataclass

from subquad_lab.training.config import Training


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    seconds: float = 0.0  # of training, excluding evaluations
    evaluated: int = 0  # step of the last evaluation
    best: float | None = None  # best validation value
    best_step: int = 0
    best_checkpoint: int = 0
    since_best: int = 0  # evaluations
    units: int = 0


def rate(settings: Training, progress: Progress, total: int) -> float:
    """Return the learning rate of the next step."""
    warm = min(1.0, (progress.step + 1) / settings.warmup) if settings.warmup else 1.0
    done = min(1.0, part_done(settings, progress, total))
    if settings.schedule == "epochs":
        low, last = settings.lr / 100, settings.epochs - 1
        share = progress.epoch / 2 if progress.epoch < 2 else 1 - (progress.epoch - 2) / (last - 2)
        return low + (settings.lr - low) * max(0.0, share)
    falling = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return settings.lr * warm * falling[settings.schedule]


def part_done(settings: Training, progress: Progress, total: int) -> float:
    """Return the fraction of the steps that is done, or of the time if that is limited and more advanced."""
    spent = 0.0 if settings.minutes is None else progress.seconds / (60 * settings.minutes)
    return max(progress.step / total, spent)
