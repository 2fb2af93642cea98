"""Ctrl-C and SIGTERM: finish the step, save the run, then exit."""

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """Raised to stop after a signal; the exit code is 128 plus its number, the shell convention."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.folder: Path | None = None  # of the run, or of its series


class Interruption:
    """Record signals inside a `with` block. A second Ctrl-C raises KeyboardInterrupt immediately.

    A second SIGTERM is ignored: torchrun sends one to each of its processes after a Ctrl-C.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def __enter__(self) -> Self:
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number
