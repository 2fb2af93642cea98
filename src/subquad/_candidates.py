"""The methods that a plan looks at, and their errors: predicted from the range of the logits, or measured on a sample.

Taylor            every degree with a payable number of features, with a sample also with centred keys
RandomFeatures    powers of two, and without a sample the number that just keeps the error
Linear, Separable as they are, for comparison
Multipole         only on a sample, and only where it can be the quickest
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from math import ceil, comb, sqrt

import torch
from torch import Tensor

from subquad._error import Error, LogitRange, as_range, error, needed_features
from subquad._features import Exact, Linear, RandomFeatures, Taylor
from subquad._methods import Approximation, Named
from subquad._multipole import Multipole
from subquad._sample import Call, exact_rows, method_rows, pick_rows, relative
from subquad._separable import Separable

MOST_FEATURES = 1 << 14  # of a candidate
COUNTS, REFERENCE = [1 << power for power in range(4, 14)], 256  # of random features; the second one is measured
ROWS, PAIRS = 64, 1 << 21  # of a sample: rows of each head, and pairs that they meet in all


def taylor(degree: int, key_shift: Tensor | None = None) -> Taylor:
    """An odd degree warns that its weights can be negative; here the error has been looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Taylor(degree, key_shift=key_shift)  # type: ignore[arg-type]


def degrees(width: int) -> list[int]:
    """All that could pay."""
    return [p for p in range(9) if comb(width + p, p) <= MOST_FEATURES]


def predicted_errors(logit_range: LogitRange | None, width: int, max_error: float) -> dict[Named, Error]:
    """Candidates and their errors, from the range of the logits alone."""
    nothing = Error(None, "nothing")
    maps: list[Approximation] = [*map(taylor, degrees(width))]
    for kind in ("positive", "hyperbolic"):
        maps += [RandomFeatures(count, kind) for count in _counts(logit_range, max_error, kind)]
    found: dict[Named, Error] = {Exact(): Error(0.0, "definition")}
    for method in (*maps, Linear("elu"), Separable()):
        found[method] = nothing if logit_range is None else error(method, logit_range=logit_range)
    return found


def _counts(logit_range: LogitRange | None, max_error: float, kind: str) -> list[int]:
    """Numbers of random features: powers of two, and the one that just keeps the error."""
    counts = set(COUNTS)
    if logit_range is not None:
        needed = needed_features(max_error, 2 * max(map(abs, as_range(logit_range))), kind)  # type: ignore[arg-type]
        if needed <= COUNTS[-1]:
            counts.add(16 * ceil(needed / 16))
    return sorted(counts)


def error_meter(call: Call) -> Callable[[Approximation | Multipole], Error]:
    """A function that tells the error of a method on the sample."""
    with torch.no_grad():
        heads = call.layout.rows * call.layout.group
        picked = pick_rows(call, max(8, min(ROWS, PAIRS // (heads * call.layout.keys))))
        exact = exact_rows(call, picked)
    norm = picked.total(exact.square().sum(-1))[0]

    @torch.no_grad()
    def measured(method: Approximation | Multipole) -> Error:
        difference = picked.total((method_rows(method, call, picked) - exact).square().sum(-1))[0]
        return Error(relative(difference, norm), "sample")

    return measured


def measured_errors(
    call: Call, width: int, measure: Callable[[Approximation | Multipole], Error], offered: tuple[Multipole, ...]
) -> dict[Named, Error]:
    """Candidates and their errors on a sample, with the keys as they are and with their mean taken from them."""
    keys = call.layout.fold_key(call.key).unflatten(0, (-1, call.layout.key_heads))
    centre = keys.double().mean((0, 2))  # (key heads, d)
    found: dict[Named, Error] = {Exact(): Error(0.0, "definition")}
    for shift in (None, centre):
        for method in (taylor(p, shift) for p in degrees(width)):
            found[method] = measure(method)
        for kind in ("positive", "hyperbolic"):
            # One number of features is measured. For others the error should change with the root of it; where the
            # weights are far off it does not, so nothing is taken for that alone.
            reference = RandomFeatures(REFERENCE, kind, key_shift=shift)
            own = measure(reference)
            for count in COUNTS:
                inferred = Error((own.relative or 0.0) * sqrt(REFERENCE / count), "prediction")
                found[replace(reference, num_features=count)] = own if count == REFERENCE else inferred
    plain: tuple[Approximation | Multipole, ...] = (Linear("elu"), Separable(), *offered)
    for simple in plain:
        found[simple] = measure(simple)
    return found
