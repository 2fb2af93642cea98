"""Bounds and predictions before the run, against what happens."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import Auto, Linear, RandomFeatures, Separable, Taylor, error, needed_degree, needed_features
from subquad.methods.error_estimate import ErrorEstimate
from subquad.methods.series_error import log_factor, series_log_ratio


def series(degree: int, x: float) -> Fraction:
    total, term = Fraction(0), Fraction(1)
    for power in range(degree + 1):
        total, term = total + term, term * Fraction(x) / (power + 1)
    return total


@settings(max_examples=300)
@given(degree=st.integers(0, 40), x=st.floats(-60, 60))
def test_the_factor_of_a_weight_has_no_cancellation(degree, x) -> None:
    """T(x) exp(-x), against the series in whole fractions."""
    exact = series(degree, x)
    wanted = -math.inf if exact <= 0 else math.log(exact) - x
    found = log_factor(degree, x)
    if abs(exact) > Fraction(1, 10**12):  # At a root of an odd series its sign is a matter of the last digit.
        assert found == wanted or math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9)


@settings(max_examples=100)
@given(degree=st.integers(0, 9), low=st.floats(-4, 4), width=st.floats(0, 4), inside=st.floats(0, 1))
def test_no_logit_of_the_range_is_off_by_more(degree, low, width, inside) -> None:
    ends = log_factor(degree, low), log_factor(degree, low + width)
    within = log_factor(degree, low + inside * width)
    log_rho = series_log_ratio(degree, low, low + width)
    assert all(abs(within - end) <= log_rho + 1e-9 for end in ends if math.isfinite(end) and math.isfinite(within))


def worst_case(degree: int, low: float, high: float) -> float:
    """The largest move of an average of values 0 and 1, over two logits and the best numbers of keys for each."""
    share = torch.linspace(0, 1, 100_001, dtype=torch.float64)[1:-1]  # of exact weight, at the higher logit
    factor = math.exp(log_factor(degree, high) - log_factor(degree, low))
    moved = share * factor / (share * factor + 1 - share)
    return float((moved - share).abs().max())


@pytest.mark.parametrize("degree", [0, 2, 4, 6])
@pytest.mark.parametrize("reach", [1.0, 3.0, 6.0])
def test_the_bound_of_taylor_is_sharp(degree, reach) -> None:
    bound = error(Taylor(degree), logit_range=reach, spread=1.0)
    assert bound.known_by == "bound"
    found = worst_case(degree, -reach, reach)
    assert found <= bound.relative * (1 + 1e-12)
    assert found >= 0.99 * bound.relative  # The issue asks for a factor of 2; two values are enough for all of it.


@pytest.mark.parametrize("adversarial", [False, True])
def test_the_bound_of_taylor_is_never_exceeded(adversarial) -> None:
    """100,000 cases in all: random ones, and ones that put the extreme logits against the extreme values."""
    generator = torch.Generator().manual_seed(int(adversarial))
    cases, keys, violations, tightest = 50_000, 12, 0, 0.0
    for degree in (0, 1, 2, 3, 4):
        count = cases // 5
        reach = torch.rand(count, 1, generator=generator, dtype=torch.float64) * 4
        if degree % 2:
            reach = reach / 8  # Where an odd series is positive.
        if adversarial:
            logits = reach * torch.randint(0, 2, (count, keys), generator=generator).mul(2).sub(1)
            values = logits.sign()[..., None] + 0.01 * torch.randn(
                count, keys, 2, generator=generator, dtype=torch.float64
            )
        else:
            logits = reach * (2 * torch.rand(count, keys, generator=generator, dtype=torch.float64) - 1)
            values = torch.randn(count, keys, 2, generator=generator, dtype=torch.float64)
        exact = (logits.softmax(-1)[..., None] * values).sum(1)
        weights = Taylor(degree).series(logits)
        found = (weights[..., None] * values).sum(1) / weights.sum(-1, keepdim=True)
        diameter = torch.cdist(values, values).amax((1, 2))
        low, high = logits.amin(1).tolist(), logits.amax(1).tolist()
        bound = torch.tensor([math.tanh(series_log_ratio(degree, a, b) / 4) for a, b in zip(low, high, strict=True)])
        moved, allowed = (found - exact).norm(dim=-1), bound.double() * diameter
        violations += int((moved > allowed * (1 + 1e-6) + 1e-12).sum())
        tightest = max(tightest, float((moved / allowed.clamp(min=1e-12)).max()))
    assert violations == 0
    assert tightest > 0.5 if adversarial else tightest > 0.1  # The bound is not so wide that it could not be exceeded.


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trigonometric"])
def test_the_variance_of_independent_random_features_is_as_predicted(kind) -> None:
    """The relative error of the kernel's estimate over 2,000 draws, within 10 %, for |q+k| <= sqrt(2)."""
    generator = torch.Generator().manual_seed(0)
    draws, count, width = 2000, 128, 4
    rows = count if kind == "positive" else count // 2
    for norm in (0.5, 1.0, math.sqrt(2)):
        q, k = torch.randn(2, 1, width, generator=generator, dtype=torch.float64)
        combined = q - k if kind == "trigonometric" else q + k
        q, k = q * norm / combined.norm(), k * norm / combined.norm()
        matrix = torch.randn(draws * rows, width, generator=generator, dtype=torch.float64)
        (a, log_a), (b, log_b) = (RandomFeatures(draws * count, kind, matrix=matrix)(x) for x in (q, k))
        parts = (a * b * (log_a + log_b).exp()[:, None] * draws).reshape(-1, draws, rows)  # pairs, draws, projections
        found = parts.sum((0, 2)) / math.exp(float(q @ k.mT)) - 1
        predicted = error(RandomFeatures(count, kind), logit_range=0, squared_norm=norm**2).relative
        assert abs(float(found.mean())) < 4 * predicted / math.sqrt(draws)
        assert math.isclose(float(found.square().mean().sqrt()), predicted, rel_tol=0.1)


def test_what_a_wanted_error_needs() -> None:
    for wanted in (0.5, 0.05, 0.001):
        for reach in (0.2, 1.0, 4.0):
            degree = needed_degree(wanted, reach)
            assert error(Taylor(degree), logit_range=reach).relative <= wanted
            assert degree == 0 or error(Taylor(degree - 1), logit_range=reach).relative > wanted
            for kind in ("positive", "hyperbolic", "trigonometric"):
                count = needed_features(wanted, reach, kind)
                assert error(RandomFeatures(count, kind), logit_range=0, squared_norm=reach).relative <= wanted
                less = count - (1 if kind == "positive" else 2)
                assert (
                    less < 1 or error(RandomFeatures(less, kind), logit_range=0, squared_norm=reach).relative > wanted
                )
    assert needed_features(0.1, 1e6) == math.inf


def test_where_nothing_is_known_it_says_so() -> None:
    for method in (Linear("identity"), Linear("elu"), Separable(), Taylor(2, basis="diagonal")):
        found = error(method, logit_range=0.1)
        assert found == ErrorEstimate(None, "nothing")
        assert str(found) == "unknown until measured"
        assert not found.is_within(10.0)
    assert str(error("exact", logit_range=100)) == "0"
    for spread in (None, 0.05):
        assert error(Taylor(1), logit_range=2.0, spread=spread).relative == math.inf  # 1 + x is negative there.
    for arguments, message in (
        (dict(spread=-3), "spread: expected a number >= 0"),
        (dict(method="auto"), "method: expected one of .*, got 'auto'"),
        (dict(method="random", squared_norm=-1), "squared_norm: expected a number >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            error(**dict(method="taylor", logit_range=1.0) | arguments)
    with pytest.raises(TypeError, match=r"method: expected a name, a method such as .*, got Auto"):
        error(Auto(), logit_range=1.0)
    with pytest.raises(ValueError, match="kind: expected one of 'positive'"):
        needed_features(0.1, 1.0, "foo")
    assert "worse than returning zeros" in str(error(RandomFeatures(16), logit_range=20))
    assert ErrorEstimate(math.nan, "sample").worse_than_zeros


@pytest.mark.parametrize("bad", [-1, (1, 0), math.nan, math.inf, "3", (1, 2, 3), None])
def test_a_range_that_is_none_is_refused(bad) -> None:
    with pytest.raises(ValueError, match=r"logit_range: expected a finite number >= 0, or a pair"):
        error("taylor", logit_range=bad)


@pytest.mark.parametrize("bad", [0, -1, math.nan])
def test_an_error_that_is_none_is_refused(bad) -> None:
    with pytest.raises(ValueError, match="max_error: expected a positive number"):
        needed_degree(bad, 1.0)
