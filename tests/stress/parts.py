"""What a part of the stress tests is: numbered cases, each of which follows from its number.

A case either returns what it counted or raises `Failure`. Everything else that it raises is a failure too, of a kind
named after the exception.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class Failure(Exception):
    """A case with a wrong result.

    Args:
        kind: Two or three words, by which failures are counted.
        detail: One line that says what was expected and what was found.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Part:
    """One subject of the stress tests.

    Attributes:
        name: What `--only` takes.
        unit: What its cases count, such as "kills"; other counts are notes.
        share: Its share of the time budget.
        limit_seconds: The time limit of a case; a case that takes longer hangs.
        case: Runs the case with this number, with the folder of `prepare`; it may write into the current folder.
        prepare: Writes what the cases share into a folder, once.
    """

    name: str
    unit: str
    share: float
    limit_seconds: float
    case: Callable[[int, Path], Counter[str]]
    prepare: Callable[[Path], object] = lambda folder: None


def draw_for(part: str, case: int) -> random.Random:
    """Return the random numbers of a case."""
    return random.Random(f"{part} {case}")
