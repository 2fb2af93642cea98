"""Progress of a run: a bar with loss, speed and remaining time on a terminal, plain lines in a log."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from subquad_lab.system.text import printable

LINE_SECONDS = 30.0  # between lines of a log
EVALUATION_SECONDS = 1.0  # between lines about evaluations, which can be more frequent than is readable


class Display:
    """Progress display on standard error, so that results on standard output can be piped."""

    def __init__(self, title: str, silent: bool = False) -> None:
        self.title, self.silent = printable(title), silent
        self.console = Console(stderr=True, quiet=silent)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                   TimeElapsedColumn(), TextColumn("remaining"), TimeRemainingColumn())  # fmt: skip
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.is_bar = self.console.is_terminal and not silent
        self.last, self.evaluation = -LINE_SECONDS, -EVALUATION_SECONDS  # so that the first of each is shown at once

    def __enter__(self) -> Self:
        if self.is_bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.is_bar:
            self.bar.stop()

    def begin(self) -> None:
        self.task = self.bar.add_task(self.title, total=1.0)

    def step(self, step: int, done: float, loss: float, speed: float, unit: str) -> None:
        text = f"{self.title}  step {step:,}  loss {loss:.3f}  {speed:,.0f} {unit}/s"
        if self.is_bar:
            self.bar.update(self.task, completed=done, description=text)
        elif time.monotonic() - self.last > LINE_SECONDS:
            self.last = time.monotonic()
            self.line(f"{text}  {done:.0%}")

    def evaluated(self, step: int, figures: dict[str, float], best: str, is_last: bool) -> None:
        if time.monotonic() - self.evaluation < EVALUATION_SECONDS and not is_last:
            return
        self.evaluation = time.monotonic()
        text = "  ".join(f"{name} {figure:.4g}" for name, figure in figures.items())
        self.line(f"{self.title}  step {step:,}  validation: {text}  (best so far: {best})")

    def line(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
