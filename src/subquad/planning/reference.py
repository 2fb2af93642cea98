"""Reference figures: how long calls take on two cores, in round numbers.

A calibration that runs out of time takes the kinds of calls that it could not measure completely from here, scaled.
"""

from typing import Any

from subquad.planning.seconds import EXACT_LENGTHS, EXACT_WIDTHS, family, work
from subquad.planning.shape import Shape

# Seconds of each kind of work, in the order of `work`.
BY_FORM = {
    "exact": [width * 2e-11 for _ in EXACT_LENGTHS for width in EXACT_WIDTHS],
    "dense": [2e-4, 1.2e-11, 4e-10, 2e-11, 1e-9],
    "fused": [3e-5, 1.2e-11, 2e-11, 1.2e-11, 1e-9],
    "chunked": [3e-4, 1e-5, 2e-11, 1.2e-11, 2e-10, 1.2e-11, 2e-10, 1e-9],
}
BY_FAMILY = {"multipole": [2e-3, 1.2e-11, 1e-6, 1e-11, 1e-9], "sparse": [5e-5, 1e-11, 5e-10, 5e-12, 1e-7]}
TRAINING_FACTOR = 3  # a forward and a backward pass, relative to a forward pass


def reference_coefficients(method: Any, form: str, shape: Shape) -> list[float]:
    """Return the coefficients of a call's family, form and direction."""
    row = BY_FAMILY.get(family(method)) or BY_FORM[form]
    return [c * (TRAINING_FACTOR if shape.training else 1) for c in row]


def reference_seconds(method: Any, form: str, shape: Shape) -> float:
    """Return how long a call takes by these figures."""
    coefficients = reference_coefficients(method, form, shape)
    return sum(c * w for c, w in zip(coefficients, work(method, form, shape), strict=True))
