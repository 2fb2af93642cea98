"""Random features with every scale and coupling: right on average, with the variance that is predicted."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from subquad import RandomFeatures, attention, error, needed_features, optimal_scale
from subquad.methods.feature_variance import relative_variance
from subquad.methods.projections import COUPLINGS

KINDS = ["positive", "hyperbolic", "trigonometric"]
NORMS = (0.5, 1.0, 2.0, 4.0, 8.0)  # |q+k|^2
WIDTHS = (8, 16, 64)
DRAWS = 60_000


def pair(squared_norm: float, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """q and k (1, width) with this |q+k|^2."""
    q, k = torch.randn(2, 1, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return tuple(x * math.sqrt(squared_norm) / (q + k).norm() for x in (q, k))


def estimates(method: RandomFeatures, matrices: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """(draws, pairs): phi(q).phi(k) / exp(q.k) for each of the matrices (draws, rows, width)."""
    (a, log_a), (b, log_b) = (method.features(x, matrices) for x in (q, k))
    return (a * b).sum(-1) * (log_a + log_b - (q * k).sum(-1)).exp()


def of_each(method: RandomFeatures, w: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """(draws,): the estimate by each of the projections (draws, width) alone, one pair q and k."""
    many = replace(method, num_features=method.num_features * len(w))
    (a, log_a), (b, log_b) = (many.features(x, w) for x in (q, k))
    return (a * b).view(-1, len(w)).sum(0) * (log_a + log_b - (q * k).sum(-1)).exp() * len(w)


@cache
def unit_normal(draws: int, width: int) -> Tensor:
    return torch.randn(draws, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


# --- Unbiased -----------------------------------------------------------------------------------------------------


@cache
def draws_of(coupling: str) -> Tensor:
    """2,000 draws (2000, 10, 4): two blocks and a short one."""
    return torch.stack([RandomFeatures(10, coupling=coupling, seed=seed).draw(4) for seed in range(2000)])


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("kind", "scale"),
    [("positive", 0.0), ("positive", -0.15), ("positive", 0.02), ("positive", "auto"), ("hyperbolic", 0.0),
     ("hyperbolic", -0.15), ("trigonometric", 0.0)],
)  # fmt: skip
def test_every_kind_and_coupling_is_unbiased(kind, scale, coupling) -> None:
    """Within three standard errors, which exist below a scale of 1/16: from there on fourth moments are infinite."""
    rows = 10 if kind == "positive" else 20
    q, k = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.4
    found = estimates(RandomFeatures(rows, kind, scale=scale), draws_of(coupling), q, k)
    assert ((found.mean(0) - 1).abs() / (found.std(0) / math.sqrt(2000))).max() <= 3
    assert kind == "trigonometric" or bool((found > 0).all())


def test_orthogonal_draws_without_random_lengths_are_noticed() -> None:
    """The fault: all projections of length sqrt(d), which is biased."""
    q, k = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.4
    found = estimates(RandomFeatures(10), F.normalize(draws_of("orthogonal"), dim=-1) * 2, q, k)
    assert ((found.mean(0) - 1).abs() / (found.std(0) / math.sqrt(2000))).max() > 6


def test_other_constants_are_noticed() -> None:
    """The faults: the constant of one vector for that of a pair, and none at all."""
    q, k = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.4
    found = estimates(RandomFeatures(10, scale=-0.15), draws_of("independent"), q, k)
    for power in (1, -1):  # (1 - 4A)^(d/4) for each of q and k
        wrong = found * (1 + 4 * 0.15) ** (power * 4 / 2)
        assert ((wrong.mean(0) - 1).abs() / (wrong.std(0) / math.sqrt(2000))).max() > 6


# --- Variance -----------------------------------------------------------------------------------------------------


def measured_moments(method: RandomFeatures, squared_norm: float, width: int, draws: int) -> tuple[float, float]:
    """Return the mean, and the variance of one projection, both relative, by importance sampling.

    The square of a feature is heavy-tailed: at |q+k|^2 = 8 and scale 0, its own mean comes from draws that are 5.7
    standard deviations out, which no feasible number of plain draws contains. Projections are drawn instead from two
    normal distributions, three quarters of the way to where the square is largest, with a variance between that of the
    draws and of the square, and each is weighted by the ratio of densities. Neither is the distribution that would make
    every weighted square equal, so nothing of the closed form enters the result.
    """
    q, k = pair(squared_norm, width)
    scale = method.scale_at(width)
    rho = 1 / (1 - 8 * scale)
    center, spread = 1.5 * math.sqrt(1 - 4 * scale) * rho * (q + k), math.sqrt((1 + rho) / 2)
    w = unit_normal(draws, width) * spread + center * torch.where(torch.arange(draws) % 2 == 0, 1.0, -1.0)[:, None]
    square, along, reach = w.square().sum(-1), (w @ center.mT)[:, 0], float(center.square().sum())
    densities = torch.stack([-(square - 2 * sign * along + reach) / (2 * spread**2) for sign in (1, -1)])
    ratio = (-square / 2 - densities.logsumexp(0) + math.log(2) + width * math.log(spread)).exp()
    found = of_each(method, w, q, k)
    return float((ratio * found).mean()), float((ratio * found.square()).mean()) - 1


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_the_variance_is_that_of_the_closed_form(kind, width) -> None:
    features = 1 if kind == "positive" else 2
    for square in NORMS:
        for scale in (0.0, optimal_scale(width, square), 0.01):
            method = RandomFeatures(features, kind, scale=scale)
            mean, variance = measured_moments(method, square, width, DRAWS)
            assert mean == pytest.approx(1, abs=0.05)
            assert features * variance == pytest.approx(method.relative_variance(square, width), rel=0.1)


@pytest.mark.parametrize("width", WIDTHS)
def test_plain_draws_have_that_variance_too(width) -> None:
    """Where the tails allow it; the number of draws makes the standard error of the variance about 2 %."""
    for square in (0.5, 1.0):
        method = RandomFeatures(1, scale=optimal_scale(width, square))
        variance = float(of_each(method, unit_normal(DRAWS, width), *pair(square, width)).var())
        assert variance == pytest.approx(method.relative_variance(square, width), rel=0.1)


@pytest.mark.parametrize("width", WIDTHS)
def test_plain_draws_have_the_variance_of_trigonometric_features(width) -> None:
    """Cosines have no tails. Their variance depends on |q-k|^2."""
    for square in NORMS:
        method, (q, k) = RandomFeatures(2, "trigonometric"), pair(square, width)
        variance = 2 * float(of_each(method, unit_normal(DRAWS, width), q, -k).var())
        assert variance == pytest.approx(method.relative_variance(square), rel=0.1)


def test_closed_forms_agree_with_known_cases() -> None:
    for f in NORMS:
        assert relative_variance(f, "positive") == pytest.approx(math.expm1(f))
        assert relative_variance(f, "hyperbolic") == pytest.approx(2 * math.cosh(f) - 2)
        assert relative_variance(f, "trigonometric") == pytest.approx(2 * math.cosh(f) - 2)
    assert relative_variance(8.0, "positive", optimal_scale(16, 8.0), 16) == pytest.approx(123, rel=0.01)
    assert relative_variance(1e4, "positive") == relative_variance(1e4, "hyperbolic", -0.1, 8) == math.inf


@pytest.mark.parametrize("width", [1, *WIDTHS, 256])
@pytest.mark.parametrize("square", [0.01, *NORMS, 1e3])
def test_the_optimal_scale_is_a_minimum(width, square) -> None:
    best = optimal_scale(width, square)
    assert best < 0

    def log_variance(scale: float) -> float:
        rho = 1 / (1 - 8 * scale)
        return square * rho + width * math.log((rho + 1) / (2 * math.sqrt(rho)))

    for factor in (0.9, 0.99, 1.01, 1.1):
        assert log_variance(best) <= log_variance(best * factor)


def test_hyperbolic_pairs_have_less_variance_at_every_scale_and_profit_from_the_same_one() -> None:
    for width in (8, 16, 64):
        for square in (0.1, *NORMS):
            best = optimal_scale(width, square)
            one, pairs = (relative_variance(square, kind, best, width) for kind in ("positive", "hyperbolic"))
            assert pairs < one
            assert pairs < relative_variance(square, "hyperbolic")
            others = [relative_variance(square, "hyperbolic", best * i / 100, width) for i in range(151)]
            assert pairs <= 1.11 * min(others)


def test_optimal_scale_at_64_features() -> None:
    """Width 16 and |q+k| = 2: an error of 0.915 with FAVOR+, and of at most 0.55 with the optimal scale."""
    plain, best = (error(RandomFeatures(64, scale=scale), logit_range=0, squared_norm=4.0, head_dim=16).relative
                   for scale in (0.0, optimal_scale(16, 4.0)))  # fmt: skip
    assert plain == pytest.approx(0.915, abs=0.001)
    assert best <= 0.55
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(20_000, 64, 16, generator=generator, dtype=torch.float64)
    found = estimates(RandomFeatures(64, scale=optimal_scale(16, 4.0)), matrices, *pair(4.0, 16))
    assert float((found - 1).square().mean().sqrt()) <= 0.55


@pytest.mark.parametrize(("width", "fewer"), [(16, 15), (64, 3)])
def test_features_that_an_error_needs(width, fewer) -> None:
    """|q+k|^2 = 8: 15 times fewer than FAVOR+ at width 16 and 3 times fewer at width 64, predicted and measured."""
    best = optimal_scale(width, 8.0)
    counts = [needed_features(0.1, 8.0, scale=scale, head_dim=width) for scale in (0.0, best)]
    assert counts[0] >= fewer * counts[1]
    variances = [measured_moments(RandomFeatures(1, scale=scale), 8.0, width, DRAWS)[1] for scale in (0.0, best)]
    assert variances[0] >= fewer * variances[1]


@pytest.mark.parametrize("scaled", [False, True])
def test_couplings_reduce_the_variance(scaled) -> None:
    """Simplex blocks that of positive features most, orthogonal blocks that of hyperbolic ones."""
    width, square, blocks = 8, 1.0, 4000
    scale = optimal_scale(width, square) if scaled else 0.0

    def variance(coupling: str, kind: str) -> float:
        count = width if kind == "positive" else 2 * width
        matrices = RandomFeatures(blocks * width, coupling=coupling).draw(width).view(blocks, width, width)
        return float(estimates(RandomFeatures(count, kind, scale=scale), matrices, *pair(square, width)).var()) * count

    for kind, best, other in (("positive", "simplex", "orthogonal"), ("hyperbolic", "orthogonal", "simplex")):
        predicted = relative_variance(square, kind, scale, width)
        assert variance("independent", kind) == pytest.approx(predicted, rel=0.1)
        assert variance(best, kind) < 0.9 * variance(other, kind) < 0.9 * predicted


# --- The method as a value ----------------------------------------------------------------------------------------


def test_scale_0_is_the_plain_map_to_the_bit() -> None:
    x, plain, method = torch.randn(3, 5), RandomFeatures(8), RandomFeatures(8, scale=0)
    assert plain == method
    table = plain.draw(5).float()
    projected = x @ table.mT
    largest = projected.amax(-1)
    assert torch.equal(method(x)[0], (projected - largest[:, None]).exp())
    assert method.exponents(table) == (1.0, None)


def test_auto_is_a_constant_of_the_width() -> None:
    method = RandomFeatures(8, scale="auto")
    assert method.scale_at(64) == optimal_scale(64, 16.0)  # entries of unit variance: |q+k|^2 = 2 sqrt(64)
    assert method.scale_at(0) == 0
    assert method.label == "RandomFeatures(8, 'positive', scale='auto')"
    q, k, v = torch.randn(3, 1, 2, 9, 16).unbind()
    expected = attention(q, k, v, is_causal=True, method=RandomFeatures(8, scale=optimal_scale(16, 8.0)))
    assert torch.equal(attention(q, k, v, is_causal=True, method=method), expected)


def test_the_matrix_is_drawn_without_the_scale() -> None:
    plain, scaled = RandomFeatures(8), RandomFeatures(8, scale=-0.2)
    assert torch.equal(plain.draw(4), scaled.draw(4))
    stored = RandomFeatures(8, scale=-0.2, matrix=plain.draw(4))
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(stored(x)[0], scaled(x)[0])


def test_a_state_belongs_to_its_scale_and_coupling() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 4).unbind()
    _, state = attention(q, k, v, is_causal=True, method=RandomFeatures(8, scale=-0.1), return_state=True)
    for other in (
        RandomFeatures(8),
        RandomFeatures(8, scale=-0.2),
        RandomFeatures(8, "positive", "simplex", scale=-0.1),
    ):
        with pytest.raises(ValueError, match="state: expected one made by RandomFeatures"):
            attention(q, k, v, is_causal=True, method=other, state=state)


def test_an_error_without_the_width_is_refused() -> None:
    for scale in (-0.1, "auto"):
        with pytest.raises(ValueError, match=r"head_dim: the error of RandomFeatures\(8, .* depends on the width"):
            error(RandomFeatures(8, scale=scale), logit_range=1.0)
        with pytest.raises(ValueError, match="head_dim: "):
            needed_features(0.1, 1.0, scale=scale)
    stored = RandomFeatures(8, scale=-0.1, matrix=torch.zeros(8, 4))
    assert error(stored, logit_range=1.0) == error(RandomFeatures(8, scale=-0.1), logit_range=1.0, head_dim=4)
