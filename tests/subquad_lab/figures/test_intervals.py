"""Intervals: those of scipy, and as often right as they say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from subquad_lab.experiments import ALL
from subquad_lab.figures.intervals import RANGES, difference, over_seeds, shown

numbers = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


@given(numbers)
def test_the_interval_over_seeds_is_that_of_student(values):
    found = over_seeds(values)
    error = stats.sem(values)
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), error) if error else (np.mean(values),) * 2
    assert found.mean - found.half == pytest.approx(low, abs=1e-9)
    assert found.mean + found.half == pytest.approx(high, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "figure", "text"),
    [
        ([0.55, 0.75], "accuracy", "0.65 (0 to 1)"),  # +- 1.3
        ([0.95, 0.99, 1.0], "accuracy", "0.98 (0.9143 to 1)"),
        ([3.0, 9.0], "perplexity", "6 (1 to 44.12)"),
        ([0.9987, 0.9999, 1.0], "accuracy", "0.9995 (0.9977 to 1)"),
        ([0.55, 0.75], "own_figure", "0.65 +- 1.3"),
        ([0.80, 0.82, 0.81], "accuracy", "0.81 +- 0.025"),
        ([1.0, 1.0], "accuracy", "1 +- 0"),
    ],
)
def test_no_interval_leaves_the_range_of_its_figure(values, figure, text):
    assert shown(values, figure) == text


def test_the_figures_of_all_experiments_have_a_range():
    assert {experiment.measure for experiment in ALL} <= RANGES.keys()


@given(numbers, numbers)
def test_the_interval_of_a_difference_is_that_of_welch(a, b):
    found = difference(a, b)
    if np.var(a) + np.var(b) < 1e-12:  # There scipy has no answer.
        assert found.half == pytest.approx(0, abs=1e-4)
        return
    low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert found.mean - found.half == pytest.approx(low, abs=1e-9)
    assert found.mean + found.half == pytest.approx(high, abs=1e-9)


def test_the_test_examples_widen_the_interval():
    """Two models differ on 4 of 100 examples, two each way, the same for all seeds: seeds alone would be certain."""
    one, other = [1.0] * 98 + [0.0] * 2, [0.0] * 2 + [1.0] * 98
    assert difference([0.98] * 3, [0.97] * 3).excludes_zero()
    found = difference([0.98] * 3, [0.97] * 3, one, other)
    assert not found.excludes_zero()
    spread = np.var(np.subtract(one, other), ddof=1) / 100
    assert found.half == pytest.approx(stats.t.ppf(0.975, 4) * spread**0.5)


def test_no_difference_is_seldom_called_one():
    """Two models of the same true accuracy, 5 seeds each, on 200 examples that both find hard or easy."""
    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(400):
        hard = draw.beta(2, 1, size=200)
        right = draw.random((2, 5, 200)) < hard
        figures, shares = right.mean(2), right.mean(1)
        wrong += difference(*figures.tolist(), *shares.tolist()).excludes_zero()
    assert wrong <= 0.05 * 400


def test_a_true_difference_is_found():
    draw = np.random.default_rng(1)
    found = 0
    for _ in range(100):
        hard = draw.beta(2, 1, size=600)
        right = np.stack([draw.random((5, 600)) < hard, draw.random((5, 600)) < 0.85 * hard])
        found += difference(*right.mean(2).tolist(), *right.mean(1).tolist()).excludes_zero()
    assert found >= 95


def test_many_differences_together_are_as_seldom_wrong_as_one():
    """The first of 9 equal variants minus each other one."""
    draw = np.random.default_rng(2)
    wrong = 0
    for _ in range(400):
        first, *others = draw.normal(size=(9, 10)).tolist()
        wrong += any(difference(first, other, comparisons=8).excludes_zero() for other in others)
    assert wrong <= 0.08 * 400  # 0.24 where each has its own 95 %
    assert difference([0.0, 1.0], [2.0, 3.0], [1.0], [0.0]).half > 0  # one example says nothing of the spread


def test_the_level_is_shared_out():
    a, b = [1.0, 2.0, 4.0], [0.0, 1.0, 5.0]
    low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval(1 - 0.05 / 3)
    assert 2 * difference(a, b, comparisons=3).half == pytest.approx(high - low)
