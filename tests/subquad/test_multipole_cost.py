"""The cost of Multipole: counted once more, query by query, with a loop for every sum."""

import pytest
import torch

from subquad import Cost, Multipole, attention, cost, crossover, native
from subquad.methods import multipole as settings
from subquad.planning.cost import cost_of
from subquad.planning.multipole_cost import met
from subquad.planning.shape import Shape

METHODS = [Multipole(), Multipole(window=5, sinks=0, block=4, top=3, rank=2), Multipole(window=1, top=0, rank=0)]


def met_by_one(method: Multipole, sees: int, is_causal: bool) -> int:
    far = max(0, sees - method.sinks - is_causal * method.window) // method.block
    size = settings.group_size(far)
    looked_at = far if size == 1 else min(settings.OPENED_GROUPS, far // size) * size + far % size
    groups = 0 if size == 1 else far // size
    keys = sees - far * method.block + min(method.top, looked_at) * method.block
    return keys + looked_at * (1 + method.rank) + groups * (1 + 2 * method.rank)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("grouped", "opened"), [(1024, 16), (300, 16), (20, 1)])
def test_keys_and_pseudo_keys_that_are_met(method, grouped, opened, monkeypatch) -> None:
    monkeypatch.setattr(settings, "GROUPED_FROM_BLOCKS", grouped)
    monkeypatch.setattr(settings, "OPENED_GROUPS", opened)
    for n, m in ((1, 1), (5, 5), (90, 90), (4000, 4000), (700, 300), (300, 700), (20_011, 20_011)):
        expected = sum(met_by_one(method, min(i + 1, m), True) for i in range(n))
        assert met(method, Shape(n, m, 8, 8, is_causal=True)) == expected
        assert met(method, Shape(n, m, 8, 8)) == n * met_by_one(method, m, False)


def by_the_kernel(**sizes) -> Cost:
    """The cost with the native kernel, also where there is none."""
    return cost_of(Multipole(), Shape.of(**sizes, is_causal=True), "fused")


def test_costs_of_a_call() -> None:
    short, long = (by_the_kernel(query_length=n, head_dim=64, heads=8) for n in (16_384, 65_536))
    assert long.flops < 10 * short.flops  # 4^1.5 = 8, where exact attention has 16
    assert long.peak_bytes < 4.2 * short.peak_bytes


def test_the_form_is_the_one_that_runs() -> None:
    """Torch's operations read for all rows of a tile what any of them chose: more than exact attention."""
    found, length = cost("multipole", query_length=16_384, head_dim=64, is_causal=True), 2048
    assert found.form == ("fused" if native.available() else "dense")
    crossing = crossover("exact", "multipole", head_dim=64, is_causal=True)
    assert crossing < length if native.available() else crossing is None


def test_lengths_that_no_machine_could_hold() -> None:
    found = [by_the_kernel(query_length=1 << power, head_dim=64).flops for power in (36, 40)]
    assert found[1] == pytest.approx(found[0] * 16**1.5, rel=0.1)


def test_training_meets_what_exact_attention_does_and_more() -> None:
    shape = dict(query_length=10_000, head_dim=64, is_causal=True, training=True)
    assert cost("multipole", **shape).flops > cost("exact", **shape).flops
    assert "time O(n m (d + e))" in cost("multipole", **shape).order


def test_times_that_nobody_measured_are_refused() -> None:
    with pytest.raises(ValueError, match=r"method: no timing model for Multipole\(\) in training"):
        crossover("exact", "multipole", head_dim=64, is_causal=True, by="time", training=True)


def test_bytes_of_a_state() -> None:
    q, k, v = torch.randn(3, 1, 2, 500, 16).unbind()
    _, state = attention(q, k, v, is_causal=True, method="multipole", return_state=True)
    predicted = cost("multipole", query_length=500, head_dim=16, heads=2, is_causal=True).state_bytes
    assert predicted <= state.nbytes < 2 * predicted  # It has room for more.
