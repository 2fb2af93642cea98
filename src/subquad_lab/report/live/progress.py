"""The progress of one run, read from its log while another process writes it.

    bytes that were added to metrics.jsonl  ->  complete lines  ->  last step, latest figures, two short curves

A line that is not complete yet waits for its end. If what was read last is no longer there, because the run was resumed
from a checkpoint, the log is read again from its beginning. A line that is not a record is reported and skipped.
"""

import json
import math
from pathlib import Path
from typing import Any

from subquad_lab.system.regular_file import open_regular
from subquad_lab.system.text import one_line
from subquad_lab.training.config import Training
from subquad_lab.training.run import METRICS

CURVE_POINTS = 200  # at least, of a longer log; at most twice as many
READ_BYTES = 1 << 20  # at a time, so that a long log does not delay the other runs
MAX_LINE_BYTES = 1 << 16
MAX_FIGURES = 40
MAX_STEP = 1 << 53  # the largest integer up to which all are exact in JavaScript
TAIL_BYTES = 256  # of what was read, to notice that the log was rewritten


class Curve:
    """A curve of limited size: each point is the mean over the same number of values."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.means: list[float] = []
        self._waiting: list[float] = []
        self._size = 1  # values per point

    def add(self, step: int, value: float) -> None:
        self._waiting.append(value)
        if len(self._waiting) < self._size:
            return
        self.steps.append(step)
        self.means.append(sum(self._waiting) / self._size)
        self._waiting = []
        if len(self.steps) == 2 * CURVE_POINTS:
            self.steps = self.steps[1::2]
            self.means = [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=True)]
            self._size *= 2

    def as_json(self) -> list[list[Any]]:
        return [self.steps, [shown(mean) for mean in self.means]]


class Progress:
    """What the log of a run says so far; `read` continues where it stopped."""

    def __init__(self, folder: Path, measure: str, config: Training) -> None:
        self.path, self.measure, self.config = folder / METRICS, f"valid/{measure}", config
        self._begin()

    def _begin(self) -> None:
        self._size, self._lines, self._rest, self._tail = 0, 0, b"", b""
        self._unreadable = ""
        self.step, self.total, self.damage = 0, self.config.steps, ""
        self.figures: dict[str, float] = {}
        self.loss, self.valid = Curve(), Curve()

    def read(self) -> bool:
        """Read what was added, up to a limit, and return whether something was. A missing log is empty."""
        try:
            with open_regular(self.path) as file:
                file.seek(self._size - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    self._begin()
                    file.seek(0)
                added = file.read(READ_BYTES)
        except FileNotFoundError:
            return False
        except OSError as error:
            before, self._unreadable = self._unreadable, f"{METRICS}: {error.strerror}"
            return self._unreadable != before
        was_unreadable, self._unreadable = bool(self._unreadable), ""
        self._size += len(added)
        self._tail = (self._tail + added)[-TAIL_BYTES:]
        *lines, self._rest = (self._rest + added).split(b"\n")
        for line in lines:
            self._lines += 1
            self._add(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest, self.damage = b"", self._not_a_record("the line is too long")
        return bool(added) or was_unreadable

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step, figures = record.pop("step"), {one_line(name): float(value) for name, value in record.items()}
            if type(step) is not int or not 0 <= step <= MAX_STEP or len(figures) > MAX_FIGURES:
                raise TypeError("expected a step and numbers")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            self.damage = self._not_a_record(one_line(error))
            return
        self.step = step
        for name, value in figures.items():
            if name in self.figures or len(self.figures) < MAX_FIGURES:
                self.figures[name] = value
        if self.total is None and step and figures.get("epoch", 0) > 0:  # epoch = step / batches per epoch
            total = self.config.epochs * step / figures["epoch"]
            self.total = round(total) if total <= MAX_STEP else None
        if "loss" in figures:
            self.loss.add(step, figures["loss"])
        if self.measure in figures:
            self.valid.add(step, figures[self.measure])

    def _not_a_record(self, why: str) -> str:
        return f"{METRICS}: line {self._lines} is not a valid record: {why}"

    def as_json(self) -> dict[str, Any]:
        """Return the progress with what JSON can hold: a number that is not finite becomes null."""
        return {
            "step": self.step, "total": self.total, "damage": self._unreadable or self.damage,
            "measure": self.measure,
            "figures": {name: shown(value) for name, value in self.figures.items()},
            "loss": self.loss.as_json(), "valid": self.valid.as_json(),
        }  # fmt: skip


def shown(value: float) -> float | None:
    """Round to six digits, which is more than a curve shows, so that events stay small."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
