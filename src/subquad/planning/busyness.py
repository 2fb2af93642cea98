"""Whether other programs use this machine: then times that are measured here are rough.

load      programs that want to run, over the last minute, as the system counts them, without this one
spread    the median of slower / faster, over calls that were measured twice
"""

import os
import time
from math import exp

import torch

MAX_SPREAD = 1.3
SPARE_LOAD = 0.5  # what the system itself may add
LOAD_SECONDS = 60.0  # over which the system averages, with weights that decay exponentially


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float:
    """Return the load average of the last minute, without the most that this process can have added.

    It has added most if it has computed until now, on all of torch's threads. 0 where the system does not count it.
    """
    try:
        found = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none.
        return 0.0
    threads = min(torch.get_num_threads(), cores())
    return max(0.0, found - threads * (1 - exp(-time.process_time() / threads / LOAD_SECONDS)))


def is_loaded(before: float) -> bool:
    """Return whether torch's threads have to share cores, by the load before they were started."""
    return before + min(torch.get_num_threads(), cores()) > cores() + SPARE_LOAD


def is_busy(before: float, spread: float | None) -> bool:
    """Return whether other programs disturbed a calibration.

    Args:
        before: The load before it.
        spread: How much times varied, 1 = not at all; None if no call was measured twice.
    """
    return is_loaded(before) or (spread is not None and spread > MAX_SPREAD)


def note_on(before: float, spread: float | None, measured: float) -> str:
    """Return a sentence, with a leading space, on a calibration that is rough; nothing if it is not.

    Args:
        before, spread: As for `is_busy`.
        measured: The share of its calls that were measured.
    """
    if not is_busy(before, spread) and measured == 1:
        return ""
    found = f"load {before:.1f} on {cores()} cores"
    found += "" if measured == 1 else f", {measured:.0%} of the benchmark finished"
    found += "" if spread is None else f", repeated timings differed by {spread - 1:.0%}"
    why = "the machine was busy" if is_busy(before, spread) else "there was not enough time"
    return f" Times are rough: {why} when it was calibrated ({found})."
