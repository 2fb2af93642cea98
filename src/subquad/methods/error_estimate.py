"""ErrorEstimate: a relative error, and how it is known.

relative error = |out - exact| / |exact|     Frobenius norms over the call; above 1, zeros would be a better answer
"""

from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Literal

__all__ = ["ErrorEstimate", "LogitRange", "check_max_error"]

LogitRange = float | tuple[float, float]


@dataclass(frozen=True)
class ErrorEstimate:
    """A relative error, |out - exact| / |exact|, and how it is known.

    Attributes:
        relative: The error, or None where nothing can be said.
        known_by: "definition" (exact attention), "bound" (never exceeded), "prediction" (reached if the inputs are as
            bad as the range of their logits allows; often far smaller), "sample" (measured on sampled rows), or
            "nothing".

    Example:
        >>> print(ErrorEstimate(0.0312, "bound"), "|", ErrorEstimate(2.5, "sample"))
        at most 0.031 | 2.5 on sampled rows, worse than returning zeros
    """

    relative: float | None
    known_by: Literal["definition", "bound", "prediction", "sample", "nothing"]

    @property
    def worse_than_zeros(self) -> bool:
        """Whether an output of zeros would be at least as good."""
        return self.relative is not None and not self.relative <= 1  # also where it is NaN

    def is_within(self, max_error: float) -> bool:
        """Return whether the error is known, or expected, to be at most `max_error`."""
        return self.relative is not None and self.relative <= max_error

    def __str__(self) -> str:
        if self.relative is None:
            return "unknown until measured"
        if self.known_by == "definition":
            return "0"
        text = {"bound": "at most {:.2g}", "prediction": "up to about {:.2g}", "sample": "{:.2g} on sampled rows"}
        if not self.worse_than_zeros:
            return text[self.known_by].format(self.relative)
        if self.known_by == "sample":
            return f"{self.relative:.2g} on sampled rows, worse than returning zeros"
        return "can be worse than returning zeros"  # A figure above 1 says no more than that.


NO_ERROR = ErrorEstimate(0.0, "definition")
UNKNOWN_ERROR = ErrorEstimate(None, "nothing")


def as_range(logit_range: LogitRange) -> tuple[float, float]:
    """Return (low, high), or raise ValueError."""
    try:
        pair = (-logit_range, logit_range) if isinstance(logit_range, int | float | Real) else logit_range
        low, high = map(float, pair)
        if -inf < low <= high < inf:
            return low, high
    except (TypeError, ValueError):
        pass
    raise ValueError(
        "logit_range: expected a finite number >= 0, or a pair (low, high) of finite numbers with low <= high, "
        f"got {logit_range!r}"
    )


def check_max_error(max_error: float) -> None:
    """Raise ValueError unless `max_error` is a positive finite number."""
    if isinstance(max_error, bool) or not isinstance(max_error, Real) or not 0 < max_error < inf:
        raise ValueError(f"max_error: expected a positive number (relative error), got {max_error!r}")
