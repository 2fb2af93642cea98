"""Asker: estimate the error of a method on one call as cheaply as possible.

    1. by norms      Taylor's error is bounded in each row; that of random features is predicted      O(length)
    2. a few rows    which reveal a method that is far off
    3. all rows      that were computed exactly, with a margin for the others

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, p picked rows.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import copysign, inf, sqrt
from typing import Any

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._engines import engine_of
from subquad._engines.features.alignment import aligned
from subquad.methods import RandomFeatures, Taylor, label_of
from subquad.methods.error_estimate import UNKNOWN_ERROR, ErrorEstimate
from subquad.planning.asking_cost import method_rows_flops
from subquad.planning.measured_error import SAMPLE_MARGIN
from subquad.planning.rows import Picked, method_rows, risks
from subquad.planning.shape import Shape

STANDARD_ERRORS = 3.0  # allowed deviation of a sum over sampled rows
FIRST_ROWS, FIRST_ROWS_PER_HEAD = 32, 4  # on which a method is tried first: of all heads, and at least of each
MAX_PREDICTED = 10.0  # times the budget: random features of a larger predicted error are not tried


@dataclass
class Asker:
    """The rows of a call that were computed exactly, and what asking may still cost."""

    call: Call
    shape: Shape
    max_error: float
    picked: Picked
    exact: Tensor  # (b, g, p, e)
    norm: float  # the least that the sum of squares over all rows can be
    risk: Tensor  # (b, g, n), as `risks` returns it
    budget: float  # operations
    reserve: float = 0.0  # the part of the budget that only Multipole, the most promising method, may use
    closest: ErrorEstimate = UNKNOWN_ERROR
    name: str = ""  # of the method that came closest
    skipped: list[str] = field(default_factory=list)  # methods that would have cost too much
    norms: dict[Any, float] = field(default_factory=dict)  # of a query and a key, by the key shift

    def ask(self, method: Any) -> ErrorEstimate:
        """Return the error of a method, with a safety margin if it is measured; unknown if it was not estimated."""
        found = UNKNOWN_ERROR
        if isinstance(method, Taylor):
            found = ErrorEstimate(sqrt(self.bound(method) / self.norm), "bound")
        # With negative weights, a row that was not sampled can be off by any amount: only a bound is acceptable.
        if not found.is_within(self.max_error) and method.positive:
            found = self._measured(method)
        if found.relative is not None and (self.closest.relative is None or found.relative < self.closest.relative):
            self.closest, self.name = found, label_of(method)
        return found

    def conclusion(self) -> str:
        """Return why no method was chosen."""
        text = f"no faster method stays within {self.max_error:g}"
        if self.name:
            text += f"; closest is {self.name}: {self.closest} (safety margin included)"
        return text + (f"; checking {', '.join(self.skipped)} would cost too much here" if self.skipped else "")

    def _measured(self, method: Any) -> ErrorEstimate:
        if isinstance(method, RandomFeatures):
            variance = method.relative_variance(self._squared_norm(method), self.shape.head_dim)
            predicted = sqrt(variance / method.num_features)
            if predicted > MAX_PREDICTED * self.max_error:
                return ErrorEstimate(predicted, "prediction")
        few, exact = self._first_rows()
        first, last = (method_rows_flops(method, self.shape, x.shape[2]) for x in (exact, self.exact))
        if 2 * first < last:  # Otherwise few rows cost about as much as all, as the keys have to be prepared.
            if not self._spend(method, few.places.shape[-1]):
                return UNKNOWN_ERROR
            error = SAMPLE_MARGIN * float((method_rows(method, self.call, few) - exact).norm() / exact.norm())
            if not error <= self.max_error:
                return ErrorEstimate(error, "sample")
        if not self._spend(method, self.picked.places.shape[-1]):
            return UNKNOWN_ERROR
        rows = method_rows(method, self.call, self.picked)
        difference, doubt = self.picked.total((rows - self.exact).square().sum(-1))
        return ErrorEstimate(SAMPLE_MARGIN * sqrt((difference + STANDARD_ERRORS * doubt) / self.norm), "sample")

    def _spend(self, method: Any, rows: int) -> bool:
        """Return whether there is enough left to compute rows of a method, and take it off."""
        price = method_rows_flops(method, self.shape, rows)
        if price > self.budget - (0.0 if engine_of(method) == "multipole" else self.reserve):
            self.skipped.append(label_of(method))
            return False
        self.budget -= price
        return True

    def _first_rows(self) -> tuple[Picked, Tensor]:
        """Return a few of the rows that were drawn at random, and their exact results."""
        count, p = max(FIRST_ROWS_PER_HEAD, FIRST_ROWS // self.exact[..., 0, 0].numel()), self.exact.shape[2]
        begin = self.picked.certain if self.picked.certain < p else 0
        index = torch.linspace(begin, p - 1, min(count, p - begin), device=self.exact.device).long()
        places, weights = self.picked.places[..., index].contiguous(), self.picked.weights[index]
        return Picked(places, weights, 0), self.exact[:, :, index]

    def bound(self, method: Taylor) -> float:
        """Return a bound of the squared error over all rows, rounding aside; infinity where there is none."""
        reach = self.risk
        if method.is_aligned:
            q, k = aligned(method, self.call)
            reach = risks(self.call, (q, k[..., : q.shape[-1]]))
        part = taylor_bound(method, reach)
        return inf if part is None else float((part * 2 * self.radius[:, None, None]).square().sum())

    def _squared_norm(self, method: Any) -> float:
        """Return |q + k|^2, scaled, of a typical query and key whose distance from the mean key is at right angles."""
        coordinates = method.key_shift, method.balance
        if coordinates not in self.norms:
            scale, (q, k) = self.call.logit_scale, (x.float() for x in aligned(method, self.call))
            mean, far, seen = self._around_mean(k)
            near = (q + copysign(1.0, scale) * mean[:, None]).square().sum(-1)
            self.norms[coordinates] = abs(scale) * float(near.median() + far[seen].median())
        return self.norms[coordinates]

    @cached_property
    def radius(self) -> Tensor:
        """(b,): the largest distance of a value from the mean of its head, half of the diameter at least."""
        _, squares, seen = self._around_mean(self.call.layout.fold_key(self.call.value).double())
        return torch.where(seen, squares, 0.0).amax(-1).sqrt()

    def _around_mean(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean (b, 1, d) of the visible ones of x (b, m, d), squared distances, and which they are."""
        keep = self.call.keep()
        seen = x.new_ones(x.shape[:-1], dtype=torch.bool) if keep is None else keep
        shown = torch.where(seen[..., None], x, 0.0)
        mean = shown.sum(1, keepdim=True) / seen.sum(1).clamp(min=1)[:, None, None]
        return mean, (shown - mean).square().sum(-1), seen


def taylor_bound(method: Taylor, reach: Tensor) -> Tensor | None:
    """Return (b, g, n): how far a row can move, as a part of the diameter of the values; None if by any amount.

    Args:
        method: The series.
        reach: (b, g, n), the largest magnitude of a logit of each row.
    """
    low, high = method.series(-reach), method.series(reach)
    if not bool((low > 0).all()):  # An odd series that is not positive: its normalizer can vanish.
        return None
    # ln rho over [-reach, reach]; an odd series is nearest to the exponential at 0, where r = 1.
    factors = torch.stack([low.clamp(min=0.0).log() + reach, high.log() - reach])
    top = factors.amax(0).clamp(min=0.0) if method.degree % 2 else factors.amax(0)
    return ((top - factors.amin(0)) / 4).tanh()
