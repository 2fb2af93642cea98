"""The maps: random ones right on average, Taylor's right to the last digit."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from calls import normal
from subquad import RandomFeatures, Taylor

pytestmark = pytest.mark.usefixtures("one_thread")


def estimates(make: Callable[[int], RandomFeatures], q: Tensor, k: Tensor, seeds: int) -> Tensor:
    """(seeds, pairs): phi(q).phi(k), for pairs of rows of q and k."""

    def one(method: RandomFeatures) -> Tensor:
        (q_features, q_scale), (k_features, k_scale) = method(q, is_query=True), method(k, is_query=False)
        return (q_features * k_features).sum(-1) * (q_scale + k_scale).exp()

    return torch.stack([one(make(seed)) for seed in range(seeds)])


PAIRS = [normal(4, 4, seed=seed, std=0.4, dtype=torch.float64) for seed in (0, 1)]


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trigonometric"])
def test_variance_of_independent_random_features_falls_with_their_number(kind):
    counts, pairs = (4, 16, 64), [x / 2 for x in PAIRS]  # Near zero the tails are light, and variances easy to measure.
    variances = [
        estimates(lambda seed, m=m: RandomFeatures(m, kind, "independent", seed), *pairs, 600).var(0) for m in counts
    ]
    products = torch.stack([m * variance for m, variance in zip(counts, variances, strict=True)])
    assert bool((products / products.mean(0) - 1).abs().max() < 0.25)


@pytest.mark.parametrize("degree", range(7))
@pytest.mark.parametrize("width", range(1, 9))
def test_taylor_features_are_the_monomials_and_their_products_the_series(degree, width):
    """Monomials are listed one by one: the formula of the library is not used to check itself."""
    method = Taylor(degree)
    q, k = (normal(5, width, seed=seed, dtype=torch.float64) for seed in (0, 1))
    features = method(k, is_query=False)
    variables = [
        chosen for power in range(degree + 1) for chosen in itertools.combinations_with_replacement(range(width), power)
    ]
    assert features.shape == (5, len(variables))
    assert method.size(width) == len(variables)
    expected = [
        k[:, list(chosen)].prod(-1) / math.sqrt(math.prod(math.factorial(chosen.count(i)) for i in set(chosen)))
        for chosen in variables
    ]
    torch.testing.assert_close(
        features.sort(-1).values, torch.stack(expected, -1).sort(-1).values, rtol=1e-12, atol=1e-12
    )
    x = q @ k.mT
    series = sum(x**power / math.factorial(power) for power in range(degree + 1))
    error = (method(q, is_query=True) @ features.mT - series).abs()
    # Relative to the sum of the sizes of the terms, which is what is added up.
    size = sum((q.abs() @ k.abs().mT) ** power / math.factorial(power) for power in range(degree + 1))
    assert bool((error <= 1e-12 * size).all())
    assert bool(((method.series(x) - series).abs() <= 1e-12 * size).all())
