"""Whether other programs use this machine: then times that are measured here are rough.

load      programs that want to run, over the last minute, as the system counts them
spread    the median of slower / faster, over calls that were measured twice
"""

import os

import torch

MAX_SPREAD = 1.3
SPARE_LOAD = 0.5  # what the system itself may add


def load() -> float:
    """Return the load average of the last minute; 0 where the system does not count it."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none.
        return 0.0


def is_loaded(before: float) -> bool:
    """Return whether torch's threads have to share cores, by the load before they were started."""
    cores = os.cpu_count() or 1
    return before + min(torch.get_num_threads(), cores) > cores + SPARE_LOAD


def note_on(before: float, spread: float | None, measured: float) -> str:
    """Return a sentence, with a leading space, on a calibration that is rough; nothing if it is not.

    Args:
        before: The load before it.
        spread: How much times varied, 1 = not at all; None if no call was measured twice.
        measured: The share of its calls that were measured.
    """
    is_busy = is_loaded(before) or (spread is not None and spread > MAX_SPREAD)
    if not is_busy and measured == 1:
        return ""
    found = f"load {before:.1f} on {os.cpu_count()} cores, {measured:.0%} of the calls measured"
    found += "" if spread is None else f", times varied by {spread - 1:.0%}"
    why = "the machine was busy" if is_busy else "there was not enough time"
    return f" Times are rough: {why} when it was calibrated ({found}); a later run on a quiet machine measures again."
