"""How wrong an approximation will be, before the run.

    relative error = |out - exact| / |exact|     Frobenius norms over the call; above 1, zeros would be a better answer

    Taylor           Each weight is off by the factor r(x) = T(x) exp(-x). With rho = max r / min r over the logits, an
                     output moves by at most tanh(ln(rho)/4) times the diameter of the values: rigorous, and sharp.
    RandomFeatures   Var[estimate] / exp(2x) = (exp(|q+k|^2) - 1) / m          positive
                                               2 (cosh(|q+k|^2) - 1) / m       hyperbolic: m/2 pairs
                                               2 (cosh(|q-k|^2) - 1) / m       trigonometric: m/2 pairs
    Linear, Separable and users' maps have weights of their own: nothing can be said before the run.

Logits x, and q and k here, are scaled: x = q.k * scale, and q and k each carry the root of the scale.
"""

import math
from dataclasses import dataclass
from math import cosh, exp, expm1, inf, lgamma, log, log1p, sinh, sqrt, tanh
from typing import TYPE_CHECKING, Literal

from subquad._features import Exact, RandomFeatures, Taylor

if TYPE_CHECKING:
    from subquad._methods import Method

LogitRange = float | tuple[float, float]


@dataclass(frozen=True)
class Error:
    """A relative error, |out - exact| / |exact|, and how it is known.

    relative: None where nothing can be said.
    known_by: "definition" (exact attention), "bound" (never more), "prediction" (so much if the inputs are as bad as
        the range of their logits allows; often far less), "sample" (measured on sampled rows), or "nothing".

    >>> print(Error(0.0312, "bound"), "|", Error(2.5, "sample"))
    at most 0.031 | 2.5 on sampled rows, worse than returning zeros
    """

    relative: float | None
    known_by: Literal["definition", "bound", "prediction", "sample", "nothing"]

    @property
    def worse_than_zeros(self) -> bool:
        return self.relative is not None and not self.relative <= 1  # Also where it is not a number.

    def is_within(self, max_error: float) -> bool:
        """Whether it is known to be, or expected to be, no more than so much."""
        return self.relative is not None and self.relative <= max_error

    def __str__(self) -> str:
        if self.relative is None:
            return "unknown before a run"
        if self.known_by == "definition":
            return "0"
        text = {"bound": "at most {:.2g}", "prediction": "up to about {:.2g}", "sample": "{:.2g} on sampled rows"}
        if not self.worse_than_zeros:
            return text[self.known_by].format(self.relative)
        if self.known_by == "sample":
            return f"{self.relative:.2g} on sampled rows, worse than returning zeros"
        return "can be worse than returning zeros"  # A figure beyond 1 would say no more.


def error(
    method: "Method | str", *, logit_range: LogitRange, spread: float | None = None, squared_norm: float | None = None
) -> Error:
    """The relative error of `method` on logits in `logit_range`, after its `key_shift` if it has one.

    logit_range: (lowest, highest) scaled logit, or one number for both signs; `subquad.logit_range` finds it.
    spread: the diameter of the values over the root mean square norm of the exact output's rows. With it Taylor's error
        is a bound; without, a prediction for values that know nothing of the logits, such as random ones.
    squared_norm: |q+k|^2 of a pair, scaled, for random features (|q-k|^2 for trigonometric ones); where pairs differ,
        the largest weigh most. By default that of equal norms at right angles, whose logits could reach the range:
        where keys are much larger than queries, or the reverse, the error is larger too, and a range does not tell.

    >>> print(error(Taylor(2), logit_range=0.5))
    up to about 0.022
    >>> print(error(Taylor(2), logit_range=0.5, spread=3.0))
    at most 0.033
    >>> print(error(RandomFeatures(256), logit_range=3))
    can be worse than returning zeros
    >>> print(error("separable", logit_range=0.5))
    unknown before a run
    """
    from subquad._auto import Auto  # Here, because Auto knows of errors.
    from subquad._methods import resolve

    method, (low, high) = resolve(method), as_range(logit_range)
    if isinstance(method, Auto):
        raise ValueError("method: Auto decides by the numbers of each call; expected one that it may take, got Auto")
    if isinstance(method, Exact):
        return Error(0.0, "definition")
    if isinstance(method, Taylor) and method.basis == "symmetric":
        if spread is not None and (not isinstance(spread, int | float) or not spread >= 0):
            raise ValueError(f"spread: expected a number >= 0, got {spread!r}")
        found = _taylor_error(method.degree, low, high, spread)
        return Error(found, "prediction" if spread is None else "bound")
    if isinstance(method, RandomFeatures):
        square = 2 * max(abs(low), abs(high)) if squared_norm is None else squared_norm
        _check_square(square)
        return Error(sqrt(random_variance(square, method.kind) / method.num_features), "prediction")
    return Error(None, "nothing")


def needed_degree(max_error: float, logit_range: LogitRange, spread: float | None = None) -> float:
    """The lowest degree of `Taylor` whose `error` is no more than `max_error`, or infinity if it is above 500.

    >>> needed_degree(0.05, 0.5), needed_degree(0.05, 3), needed_degree(0.05, 20)
    (2, 10, 71)
    """
    low, high = as_range(logit_range)
    check_max_error(max_error)
    return next((p for p in range(501) if _taylor_error(p, low, high, spread) <= max_error), inf)


def _taylor_error(degree: int, low: float, high: float, spread: float | None) -> float:
    log_rho = taylor_log_ratio(degree, low, high)
    if log_rho == inf and degree % 2:  # Weights that are not positive: their sum can vanish, and nothing bounds that.
        return inf
    if spread is not None:
        return tanh(log_rho / 4) * spread
    # Values that know nothing of the weights move by about the weights' coefficient of variation: for weights spread
    # over the whole range, at most this.
    return sinh(log_rho / 2) if log_rho < 700 else inf


def needed_features(
    max_error: float,
    squared_norm: float,
    kind: Literal["positive", "hyperbolic", "trigonometric"] = "positive",
) -> float:
    """The smallest number of random features whose predicted `error` is no more than `max_error`, or infinity.

    >>> needed_features(0.05, 1.0), needed_features(0.05, 6.0)
    (688, 160972)
    """
    check_max_error(max_error)
    _check_square(squared_norm)
    if kind not in ("positive", "hyperbolic", "trigonometric"):
        raise ValueError(f"kind: expected 'positive', 'hyperbolic' or 'trigonometric', got {kind!r}")
    count = random_variance(squared_norm, kind) / max_error / max_error
    if count == inf:
        return inf
    pairs = 1 if kind == "positive" else 2
    return max(pairs, pairs * math.ceil(count / pairs))


def taylor_log_ratio(degree: int, low: float, high: float) -> float:
    """ln(rho): the logarithm of max r / min r over [low, high]; infinite where a weight is not positive.

    r' = -x^degree exp(-x) / degree!, so r falls all the way for an even degree; for an odd one it rises up to x = 0.
    """
    ends = [_log_factor(degree, low), _log_factor(degree, high)]
    top = max([*ends, 0.0]) if degree % 2 and low < 0 < high else max(ends)
    return inf if inf in ends else top - min(ends)


def _log_factor(degree: int, x: float) -> float:
    """ln r(x) = ln(T(x) exp(-x)), without cancellation; -inf where T is not positive."""
    if x >= 0:
        terms = [power * log(x) - lgamma(power + 1) for power in range(degree + 1)] if x > 0 else [0.0]
        top = max(terms)
        return top + log(math.fsum(exp(term - top) for term in terms)) - x
    y = -x
    if y > 2 * (degree + 1):  # The highest power outweighs the others: no cancellation.
        series = 1.0
        for power in range(degree, 0, -1):
            series = 1 - y / power * series
        return log(series) + y if series > 0 else -inf
    # r(x) = 1 +- integral of s^p exp(s) / p! from 0 to y, as a series of positive terms.
    first = (degree + 1) * log(y) - lgamma(degree + 1)
    if first + y > 700:  # Beyond all numbers, and far beyond any use.
        return inf if degree % 2 == 0 else -inf
    term, total, k = exp(first), 0.0, 0
    while (part := term / (degree + k + 1)) > total * 1e-17:
        total += part
        k += 1
        term *= y / k
    if degree % 2 == 0:
        return log1p(total)
    return log1p(-total) if total < 1 else -inf


def random_variance(squared_norm: float, kind: str) -> float:
    """m times the relative variance of the kernel's estimate by m independent features."""
    if squared_norm > 700:
        return inf
    return expm1(squared_norm) if kind == "positive" else 2 * (cosh(squared_norm) - 1)


def _check_square(squared_norm: float) -> None:
    if not squared_norm >= 0:
        raise ValueError(f"squared_norm: expected a number >= 0, got {squared_norm!r}")


def as_range(logit_range: LogitRange) -> tuple[float, float]:
    """(low, high), or an error that says what is wrong."""
    try:
        pair = (-logit_range, logit_range) if isinstance(logit_range, int | float) else logit_range
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
    if isinstance(max_error, bool) or not isinstance(max_error, int | float) or not 0 < max_error < inf:
        raise ValueError(f"max_error: expected a number above 0, the relative error that is allowed, got {max_error!r}")
