"""Plan: what `plan` found, as a value that prints as a table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from subquad.methods import AnyMethod, label_of
from subquad.methods.error_estimate import ErrorEstimate
from subquad.planning.measured_error import SAMPLE_MARGIN
from subquad.planning.text import duration, mebibytes

Purpose = Literal["swap", "train"]
COLUMNS: dict[str, tuple[str, ...]] = {
    "swap": ("method", "form", "time", "peak memory", "relative error", "within budget"),
    "train": ("method", "form", "time", "peak memory", "state", "can recall", "choice"),
}
RIGHT_ALIGNED = ("time", "peak memory", "state")


@dataclass(frozen=True, repr=False)
class Candidate:
    """A method in a form, and what is predicted for it."""

    method: AnyMethod
    form: str  # "exact", "dense", "linear", "chunked" or "fused"
    seconds: float
    peak_bytes: int
    state_bytes: int
    error: ErrorEstimate
    recall: str  # what a trained layer can read: which tokens, or how much of them
    is_chosen_form: bool  # whether `attention` takes this form by itself
    is_acceptable: bool

    @property
    def name(self) -> str:
        return label_of(self.method)

    def __repr__(self) -> str:
        """Without the numbers of a key shift, of which there are thousands."""
        return f"Candidate({self.name}, {self.form!r}, {duration(self.seconds)}, error={str(self.error)!r})"


@dataclass(frozen=True, repr=False)
class Plan:
    """What `plan` found: the method to use, why, and all candidates, the fastest first. Prints as a table."""

    method: AnyMethod
    reason: str
    candidates: tuple[Candidate, ...]
    max_error: float
    purpose: Purpose = "swap"

    @property
    def choice(self) -> Candidate:
        """The candidate that was chosen."""
        return next(c for c in self.candidates if c.method == self.method and c.is_chosen_form)

    @property
    def columns(self) -> tuple[str, ...]:
        """The heads of the table's columns."""
        return COLUMNS[self.purpose]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of the table."""
        for c in self.candidates:
            first = c.name, c.form, duration(c.seconds), mebibytes(c.peak_bytes)
            if self.purpose == "train":
                yield *first, mebibytes(c.state_bytes), c.recall, "chosen" if c is self.choice else ""
                continue
            is_unknown = c.error.relative is None
            within = "unknown" if is_unknown else "yes" if c.is_acceptable else "no"
            mark = "yes, chosen" if c is self.choice else within
            yield *first, "measure with sample=" if is_unknown else str(c.error), mark

    @property
    def legend(self) -> str:
        """A sentence on the last column, for errors that were measured; empty if none was."""
        if not any(c.error.known_by == "sample" for c in self.candidates):
            return ""
        return (
            f"Within budget: {SAMPLE_MARGIN:g} times the error is at most {self.max_error:g}, because rows that were "
            "not sampled may be worse."
        )

    def __str__(self) -> str:
        table = [self.columns, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        sides = [str.rjust if name in RIGHT_ALIGNED else str.ljust for name in self.columns]
        lines = (
            "  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)).rstrip() for row in table
        )
        return "\n".join([*lines, "", *filter(None, [self.legend]), self.reason])

    def __repr__(self) -> str:
        """Without the candidates, which `print` shows."""
        return f"Plan({label_of(self.method)}, purpose={self.purpose!r}, candidates={len(self.candidates)})"
