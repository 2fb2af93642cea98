"""Ctrl-C and SIGTERM: the step is finished, the run saved, and only then the process ends."""

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """Asked to stop by a signal; the exit code is 128 and its number, as a shell has it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.folder: Path | None = None  # of the run, or of the series that it belongs to


class Interruption:
    """Notes a signal while its block runs. A second Ctrl-C is not waited for: it raises KeyboardInterrupt.

    (A second SIGTERM is nothing new: torchrun sends one to each of its processes after a Ctrl-C.)
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
