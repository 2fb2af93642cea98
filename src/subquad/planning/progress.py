"""Progress of a calibration, on one line of a terminal, with an estimate of the time that is left."""

import sys
import time
from collections.abc import Callable

Progress = Callable[[int, int], None]  # (calls measured, calls in all)

REFRESH_SECONDS = 0.2


def progress_line(most_seconds: float) -> Progress:
    """Return a callback that writes to the standard error; it writes nothing where that is not a terminal."""
    if not sys.stderr.isatty():
        return lambda done, total: None
    begin = shown = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if done == total:
            print(f"\r{'':60}\r", end="", file=sys.stderr, flush=True)
        elif done == 0 or now - shown > REFRESH_SECONDS:
            shown = now
            left = min((now - begin) / done * (total - done) if done else most_seconds, most_seconds - (now - begin))
            text = f"calibrating this machine (once): {done / total:.0%}, about {max(1, left):.0f} s left"
            print(f"\r{text:60}", end="", file=sys.stderr, flush=True)

    return show
