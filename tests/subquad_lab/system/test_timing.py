import time

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from subquad_lab.system.timing import MeasureError, Request, best_seconds, in_turn, measure, peak_bytes, relative_error


@pytest.mark.parametrize("backward", [False, True])
def test_exact_attention_is_measured_in_a_fresh_process(backward):
    found = measure(Request("exact", length=256, heads=2, width=16, backward=backward, repeats=2))
    assert 0 < found.seconds < 10
    assert 0 <= found.peak_bytes < 2**30
    assert found.relative_error < 1e-5


def test_an_approximation_has_the_larger_error():
    coarse, fine = (
        measure(Request(method, length=256, heads=2, width=16, repeats=1)).relative_error
        for method in ("linear:elu", "taylor:2")
    )
    assert 0 < fine < coarse


def test_failure_in_the_process_is_told():
    with pytest.raises(MeasureError, match=r"softmax at length 8: .*expected one of 'exact', .* got 'softmax'"):
        measure(Request("softmax", length=8, heads=1, width=4))


def test_peak_counts_memory_that_is_freed_again():
    size = 512 * 2**20  # More than this process can have lying free already.
    peak = peak_bytes(lambda: torch.ones(size // 4).sum())
    assert 0.95 * size <= peak < 1.5 * size


def test_best_time_is_the_quickest_call():
    delays = iter([0.05, 0.0, 0.05])
    assert best_seconds(lambda: time.sleep(next(delays)), repeats=3, at_least=0) < 0.04


def test_short_calls_are_repeated_for_longer():
    calls = []
    best_seconds(lambda: (calls.append(1), time.sleep(0.01)), repeats=1, at_least=0.05)
    assert 2 <= len(calls) <= 5


def test_relative_error_of_a_known_change():
    q, k, v = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    exact = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert relative_error(exact, q, k, v) < 1e-6
    assert relative_error(1.25 * exact, q, k, v, rows=16) == pytest.approx(0.25, rel=1e-5)
    assert relative_error(torch.zeros_like(exact), q, k, v) == pytest.approx(1)


def test_calls_take_turns():
    called = []
    best = in_turn({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, rounds=3, at_least=0, at_most=1)
    assert called == ["a", "b"] * 3
    assert all(0 < seconds < 1 for seconds in best.values())


def test_no_round_begins_after_the_time_is_up():
    called = []
    in_turn({"a": lambda: called.append(time.sleep(0.02))}, rounds=100, at_least=0, at_most=0.01)
    assert len(called) == 1
