"""How far a Taylor polynomial of the exponential moves the output of attention.

Each weight is off by the factor r(x) = T(x) exp(-x). With rho = max r / min r over the logits, an output moves by at
most tanh(ln(rho)/4) times the diameter of the values: rigorous and sharp.
"""

import math
from math import exp, inf, lgamma, log, log1p, sinh, sqrt, tanh


def series_error(degree: int, low: float, high: float, spread: float | None) -> float:
    """Return the relative error of Taylor(degree) on logits in [low, high], in a time that does not grow with degree.

    Args:
        degree: The highest power.
        low: The lowest logit.
        high: The highest logit.
        spread: The diameter of the values over the root mean square norm of the output's rows: the result is then a
            bound. None: a prediction for values that do not depend on the logits.
    """
    log_rho = series_log_ratio(degree, low, high)
    if log_rho == inf and degree % 2:  # Weights that are not positive: their sum can vanish, and nothing bounds that.
        return inf
    if spread is not None:
        return tanh(log_rho / 4) * spread
    # Values that do not depend on the weights move by about the weights' coefficient of variation: for weights spread
    # over the whole range, at most this.
    return sinh(log_rho / 2) if log_rho < 700 else inf


def series_log_ratio(degree: int, low: float, high: float) -> float:
    """Return ln(rho), the logarithm of max r / min r over [low, high]; infinite where a weight is not positive.

    r' = -x^degree exp(-x) / degree!, so r falls throughout for an even degree; for an odd one it rises up to x = 0.
    """
    ends = [log_factor(degree, low), log_factor(degree, high)]
    top = max([*ends, 0.0]) if degree % 2 and low < 0 < high else max(ends)
    return inf if inf in ends else top - min(ends)


def log_factor(degree: int, x: float) -> float:
    """Return ln r(x) = ln(T(x) exp(-x)) without cancellation; -inf where T is not positive."""
    if x == 0:
        return 0.0
    if 0 < x < degree:  # r(x) is 1 minus the powers that are left out, which are few.
        term, total, power = exp((degree + 1) * log(x) - lgamma(degree + 2) - x), 0.0, degree + 1
        while term > total * 1e-17:
            total += term
            power += 1
            term *= x / power
        return log1p(-total)
    if x > 0:
        # The terms are those of a Poisson distribution with mean x: only those near the highest power count.
        powers = range(max(0, int(degree - 40 * sqrt(x + 1) - 100)), degree + 1)
        terms = [power * log(x) - lgamma(power + 1) for power in powers]
        top = max(terms)
        return top + log(math.fsum(exp(term - top) for term in terms)) - x
    y = -x
    if y > 2 * (degree + 1):  # The highest power outweighs the others: no cancellation.
        series = 1.0
        for power in range(degree, 0, -1):
            series = 1 - y / power * series
            if math.isinf(series):  # Each further power doubles it at least, and changes its sign.
                return inf if degree % 2 == 0 else -inf
        return log(series) + y if series > 0 else -inf
    # r(x) = 1 +- integral of s^p exp(s) / p! from 0 to y, as a series of positive terms.
    first = (degree + 1) * log(y) - lgamma(degree + 1)
    if first + y > 700:  # beyond the range of floating point, and far beyond any use
        return inf if degree % 2 == 0 else -inf
    term, total, k = exp(first), 0.0, 0
    while (part := term / (degree + k + 1)) > total * 1e-17:
        total += part
        k += 1
        term *= y / k
    if degree % 2 == 0:
        return log1p(total)
    return log1p(-total) if total < 1 else -inf
