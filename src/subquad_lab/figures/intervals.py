"""How much of a figure is chance.

    over n seeds:   mean +- t(0.975, n - 1) * sqrt(variance / n)
    a - b:          +- t * sqrt(variance_a / n_a + variance_b / n_b + variance_i / N)

Of c differences each has the level 1 - 0.05 / c, so that all of them together are right in 95 % of all cases.

The last term is for the test part being a sample itself: on example i of N, d_i is the share of a's seeds that were
right less the share of b's, and variance_i is the variance of the d_i. Both were tested on the same examples, so what
is hard for both does not count. The noise of the seeds is partly in that term too: the interval errs on the wide side.
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
    """A mean, and how far to either side of it the truth may lie."""

    mean: float
    half: float

    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:.4g} +- {self.half:.2g}"


def over_seeds(values: Sequence[float]) -> Interval:
    """At least two values, one for each seed.

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
    least, most = RANGES.get(figure, (-inf, inf))
    low, high = found.mean - found.half, found.mean + found.half
    if least <= low and high <= most:
        return str(found)
    return f"{found.mean:.4g} ({max(low, least):.2g} to {min(high, most):.2g})"


def difference(
    a: Sequence[float], b: Sequence[float], right_a: Sequence[float] | None = None,
    right_b: Sequence[float] | None = None, comparisons: int = 1,
) -> Interval:  # fmt: skip
    """Of the mean of a less that of b, each with at least two seeds.

    Args:
        a: The figure of each seed.
        b: Of what it is compared with.
        right_a: For each test example, the share of a's seeds that were right; where it is known.
        right_b: The same of b, for the same examples.
        comparisons: Differences that are looked at together.

    >>> print(difference([0.90, 0.91, 0.92], [0.80, 0.82, 0.81]))
    0.1 +- 0.023
    """
    parts = variance(a) / len(a), variance(b) / len(b)
    seeds = sum(parts)
    # The degrees of freedom of Welch and Satterthwaite; where no seed differs, those of a common variance.
    below = parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1)
    freedom = seeds**2 / below if below else len(a) + len(b) - 2
    examples = 0.0
    if right_a is not None and right_b is not None and len(right_a) > 1:
        examples = variance([x - y for x, y in zip(right_a, right_b, strict=True)]) / len(right_a)
    return Interval(fmean(a) - fmean(b), quantile(freedom, comparisons) * sqrt(seeds + examples))


def quantile(freedom: float, comparisons: int = 1) -> float:
    """Of Student's t distribution: what it exceeds to either side in 5 % of all cases, shared out to comparisons."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - (1 - LEVEL) / (2 * comparisons)))
