"""How large the error of a method will be, before the run. The formulas are with the methods.

    relative error = |out - exact| / |exact|     Frobenius norms over the call; above 1, zeros would be a better answer

Logits x, and q and k here, are scaled: x = q.k * scale, and q and k each carry the root of the scale.
"""

import math
from math import inf

from subquad.methods import MethodLike, resolve
from subquad.methods.error_estimate import UNKNOWN_ERROR, ErrorEstimate, LogitRange, as_range, check_max_error
from subquad.methods.method import Method
from subquad.methods.random_features import Kind, RandomFeatures, Scale
from subquad.methods.series_error import series_error

MAX_DEGREE = 500


def error(
    method: MethodLike, *, logit_range: LogitRange, spread: float | None = None, squared_norm: float | None = None,
    head_dim: int | None = None,
) -> ErrorEstimate:  # fmt: skip
    """Return the relative error of `method` on logits in `logit_range`, after its `key_shift` if it has one.

    Args:
        method: A method or its name.
        logit_range: (lowest, highest) scaled logit, or one number for both signs; `subquad.logit_range` finds it.
        spread: The diameter of the values over the root mean square norm of the exact output's rows. With it Taylor's
            error is a bound; without, a prediction for values that do not depend on the logits, such as random ones.
        squared_norm: |q+k|^2 of a pair, scaled, for random features (|q-k|^2 for trigonometric ones); where pairs
            differ, the largest weigh most. It replaces the range for these methods. By default that of equal norms at right angles, whose logits could reach the
            range: where keys are much larger than queries, or the reverse, the error is larger too.
        head_dim: Width of queries and keys, for random features with a `scale` other than 0.

    Example:
        >>> from subquad import RandomFeatures, Taylor
        >>> print(error(Taylor(2), logit_range=0.5))
        up to about 0.022
        >>> print(error(Taylor(2), logit_range=0.5, spread=3.0))
        at most 0.033
        >>> print(error(RandomFeatures(256), logit_range=3))
        can be worse than returning zeros
        >>> print(error(RandomFeatures(256, scale=-0.1), logit_range=2, head_dim=16))
        up to about 0.26
        >>> print(error("separable", logit_range=0.5))
        unknown until measured
    """
    found, (low, high) = resolve(method), as_range(logit_range)
    return found.error(low, high, spread, squared_norm, head_dim) if isinstance(found, Method) else UNKNOWN_ERROR


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
    max_error: float, squared_norm: float, kind: Kind = "positive", *, scale: Scale = 0.0, head_dim: int | None = None
) -> float:
    """Return the smallest number of random features whose predicted `error` is at most `max_error`, or infinity.

    Args:
        max_error: The relative error that is allowed.
        squared_norm: As for `error`.
        kind: The kind of `RandomFeatures`.
        scale: The scale of `RandomFeatures`.
        head_dim: As for `error`.

    Example:
        >>> needed_features(0.05, 1.0), needed_features(0.05, 6.0)
        (688, 160972)
        >>> from subquad import optimal_scale
        >>> needed_features(0.05, 6.0, scale=optimal_scale(16, 6.0), head_dim=16)
        20039
    """
    check_max_error(max_error)
    method = RandomFeatures(2, kind, scale=scale)
    count = method.relative_variance(squared_norm, head_dim) / max_error / max_error
    if count == inf:
        return inf
    pairs = 2 // method.rows
    return max(pairs, pairs * math.ceil(count / pairs))
