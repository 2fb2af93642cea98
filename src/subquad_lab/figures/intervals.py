"""Confidence intervals over seeds.

    over n seeds:   mean +- t(0.975, n - 1) * sqrt(variance / n)
    a - b:          +- t * sqrt(variance_a / n_a + variance_b / n_b + variance_i / N)

With c differences, each has the level 1 - 0.05 / c (Bonferroni), for a family-wise confidence of 95 %.

The last term accounts for the test set being a sample: on example i of N, d_i is the fraction of a's seeds that were
correct minus that of b's, and variance_i is the variance of the d_i. Both are tested on the same examples, so examples
that are hard for both cancel. The noise of the seeds is partly in that term too, so the interval is conservative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, variance

LEVEL = 0.95
# What a figure can be. Of two or three seeds the interval is often wider than that.
RANGES = {
    "accuracy": (0.0, 1.0), "jaccard": (0.0, 1.0), "cosine": (0.0, 1.0), "damerau": (0.0, 1.0),
    "cross_entropy": (0.0, inf), "perplexity": (1.0, inf), "character_error": (0.0, inf), "word_error": (0.0, inf),
}  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean and the half-width of its confidence interval."""

    mean: float
    half: float

    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{rounded(self.mean, 4)} +- {rounded(self.half, 2)}"


def over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % confidence interval for at least two values, one per seed.

    >>> print(over_seeds([0.80, 0.82, 0.81]))
    0.81 +- 0.025
    """
    return Interval(fmean(values), quantile(len(values) - 1) * sqrt(variance(values) / len(values)))


def shown(values: Sequence[float], figure: str) -> str:
    """Return the mean with its interval; with the ends of that, cut to the figure's range, where +- would leave it.

    >>> shown([0.80, 0.82, 0.81], "accuracy")
    '0.81 +- 0.025'
    >>> shown([0.55, 0.75], "accuracy")
    '0.65 (0 to 1)'
    """
    found = over_seeds(values)
    least, most = range_of(figure)
    low, high = found.mean - found.half, found.mean + found.half
    if least <= low and high <= most:
        return str(found)
    return f"{rounded(found.mean, 4)} ({rounded(max(low, least), 4)} to {rounded(min(high, most), 4)})"


def rounded(value: float, digits: int) -> str:
    """Return a number with some significant digits, and without an exponent unless it is very small or large.

    >>> rounded(184.2, 2), rounded(0.02519, 2), rounded(12345.6, 4)
    ('180', '0.025', '12,350')
    """
    return f"{float(f'{value:.{digits}g}'):,.12g}"


def range_of(figure: str) -> tuple[float, float]:
    """Return the range of a figure; "accuracy_8_pairs" has that of "accuracy"."""
    own = (limits for name, limits in RANGES.items() if figure == name or figure.startswith(f"{name}_"))
    return next(own, (-inf, inf))


def difference(
    a: Sequence[float], b: Sequence[float], right_a: Sequence[float] | None = None,
    right_b: Sequence[float] | None = None, comparisons: int = 1,
) -> Interval:  # fmt: skip
    """Return the interval of mean(a) - mean(b), each with at least two seeds.

    Args:
        a: Value of each seed.
        b: Value of each seed of the baseline.
        right_a: For each test example, the fraction of a's seeds that were correct, if known.
        right_b: The same for b, on the same examples.
        comparisons: Number of differences that share the confidence level.

    >>> print(difference([0.90, 0.91, 0.92], [0.80, 0.82, 0.81]))
    0.1 +- 0.023
    """
    parts = variance(a) / len(a), variance(b) / len(b)
    seeds = sum(parts)
    # Welch-Satterthwaite degrees of freedom; if all variances are 0, those of a pooled variance.
    below = parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1)
    freedom = seeds**2 / below if below else len(a) + len(b) - 2
    examples = 0.0
    if right_a is not None and right_b is not None and len(right_a) > 1:
        examples = variance([x - y for x, y in zip(right_a, right_b, strict=True)]) / len(right_a)
    return Interval(fmean(a) - fmean(b), quantile(freedom, comparisons) * sqrt(seeds + examples))


def quantile(freedom: float, comparisons: int = 1) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution, Bonferroni-corrected for `comparisons`."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - (1 - LEVEL) / (2 * comparisons)))
