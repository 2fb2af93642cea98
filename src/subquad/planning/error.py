"""How large the error of a method will be, before the run. The formulas are with the methods.

    relative error = |out - exact| / |exact|     Frobenius norms over the call; above 1, zeros would be a better answer

Logits x, and q and k here, are scaled: x = q.k * scale, and q and k each carry the root of the scale.
"""

import math
from math import inf
from typing import Literal

from subquad.methods import MethodLike, resolve
from subquad.methods.checks import check_choice
from subquad.methods.error_estimate import UNKNOWN_ERROR, ErrorEstimate, LogitRange, as_range, check_max_error
from subquad.methods.method import Method
from subquad.methods.random_features import KINDS, relative_variance
from subquad.methods.series_error import series_error

MAX_DEGREE = 500


def error(
    method: MethodLike, *, logit_range: LogitRange, spread: float | None = None, squared_norm: float | None = None
) -> ErrorEstimate:
    """Return the relative error of `method` on logits in `logit_range`, after its `key_shift` if it has one.

    Args:
        method: A method or its name.
        logit_range: (lowest, highest) scaled logit, or one number for both signs; `subquad.logit_range` finds it.
        spread: The diameter of the values over the root mean square norm of the exact output's rows. With it Taylor's
            error is a bound; without, a prediction for values that do not depend on the logits, such as random ones.
        squared_norm: |q+k|^2 of a pair, scaled, for random features (|q-k|^2 for trigonometric ones); where pairs
            differ, the largest weigh most. By default that of equal norms at right angles, whose logits could reach the
            range: where keys are much larger than queries, or the reverse, the error is larger too.

    Example:
        >>> from subquad import RandomFeatures, Taylor
        >>> print(error(Taylor(2), logit_range=0.5))
        up to about 0.022
        >>> print(error(Taylor(2), logit_range=0.5, spread=3.0))
        at most 0.033
        >>> print(error(RandomFeatures(256), logit_range=3))
        can be worse than returning zeros
        >>> print(error("separable", logit_range=0.5))
        unknown until measured
    """
    found, (low, high) = resolve(method), as_range(logit_range)
    return found.error(low, high, spread, squared_norm) if isinstance(found, Method) else UNKNOWN_ERROR


def needed_degree(max_error: float, logit_range: LogitRange, spread: float | None = None) -> float:
    """Return the lowest degree of `Taylor` whose `error` is at most `max_error`, or infinity if it is above 500.

    Args:
        max_error: The relative error that is allowed.
        logit_range: As for `error`.
        spread: As for `error`.

    Example:
        >>> needed_degree(0.05, 0.5), needed_degree(0.05, 3), needed_degree(0.05, 20)
        (2, 10, 71)
    """
    low, high = as_range(logit_range)
    check_max_error(max_error)
    return next((p for p in range(MAX_DEGREE + 1) if series_error(p, low, high, spread) <= max_error), inf)


def needed_features(
    max_error: float, squared_norm: float, kind: Literal["positive", "hyperbolic", "trigonometric"] = "positive"
) -> float:
    """Return the smallest number of random features whose predicted `error` is at most `max_error`, or infinity.

    Args:
        max_error: The relative error that is allowed.
        squared_norm: As for `error`.
        kind: The kind of `RandomFeatures`.

    Example:
        >>> needed_features(0.05, 1.0), needed_features(0.05, 6.0)
        (688, 160972)
    """
    check_max_error(max_error)
    check_choice("kind", kind, KINDS)
    count = relative_variance(squared_norm, kind) / max_error / max_error
    if count == inf:
        return inf
    pairs = 1 if kind == "positive" else 2
    return max(pairs, pairs * math.ceil(count / pairs))
