"""The cost of Multipole: counted once more, query by query, with a loop for every sum."""

import pytest
import torch

from subquad import Cost, Multipole, attention, cost, crossover, native
from subquad.methods import multipole as settings
from subquad.planning.cost import cost_of
from subquad.planning.multipole_cost import met
from subquad.planning.shape import Shape

METHODS = [Multipole(), Multipole(window=5, sinks=0, block=4, top=3), Multipole(window=1, top=0)]


def met_by_one(method: Multipole, sees: int) -> int:
    far = max(0, sees - method.sinks - method.window) // method.segment
    grouped = far >= settings.GROUPED_FROM_SEGMENTS
    considered = 16 * (min(settings.OPENED_SEGMENTS, far) if grouped else far)
    keys = sees - far * method.segment + min(method.top, considered) * method.block
    looks = min(method.looks, considered) * method.block // 8
    return keys + looks + considered + (far if grouped else 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("grouped", "opened"), [(64, 24), (10, 24), (3, 1)])
def test_keys_and_pseudo_keys_that_are_met(method, grouped, opened, monkeypatch) -> None:
    monkeypatch.setattr(settings, "GROUPED_FROM_SEGMENTS", grouped)
    monkeypatch.setattr(settings, "OPENED_SEGMENTS", opened)
    for n, m in ((1, 1), (5, 5), (90, 90), (4000, 4000), (700, 300), (300, 700), (20_011, 20_011)):
        expected = sum(met_by_one(method, min(i + 1, m)) for i in range(n))
        assert met(method, Shape(n, m, 8, 8, is_causal=True)) == expected
        assert met(method, Shape(n, m, 8, 8)) == n * met_by_one(method, m)


def by_the_kernel(**sizes) -> Cost:
    """The cost with the native kernel, also where there is none."""
    return cost_of(Multipole(), Shape.of(**sizes, is_causal=True), "fused")


def test_costs_of_a_call() -> None:
    short, long = (by_the_kernel(query_length=n, head_dim=64, heads=8) for n in (16_384, 65_536))
    assert long.flops < 6 * short.flops  # where exact attention has 16
    assert long.peak_bytes < 4.2 * short.peak_bytes


def test_the_form_is_the_one_that_runs() -> None:
    """Torch's operations read for all rows of a tile what any of them chose: more than exact attention."""
    found, length = cost("multipole", query_length=16_384, head_dim=64, is_causal=True), 2048
    assert found.form == ("fused" if native.available() else "dense")
    crossing = crossover("exact", "multipole", head_dim=64, is_causal=True)
    assert crossing < length if native.available() else crossing is None


def test_lengths_that_no_machine_could_hold() -> None:
    found = [by_the_kernel(query_length=1 << power, head_dim=64).flops for power in (36, 40)]
    assert found[1] == pytest.approx(found[0] * 16**2, rel=0.1)  # One pseudo-key for 256 keys: 256 times less.


def test_torch_meets_what_exact_attention_does_and_more() -> None:
    shape = dict(query_length=10_000, head_dim=64, is_causal=True, training=True)
    by_torch = cost_of(Multipole(), Shape.of(**shape), "dense")
    assert by_torch.flops > cost("exact", **shape).flops
    assert "time O(n m (d + e))" in by_torch.order
    assert cost("multipole", **shape).form == ("fused" if native.available() else "dense")
    assert cost_of(Multipole(), Shape.of(**shape), "fused").flops < cost("exact", **shape).flops / 3


def test_bytes_of_a_state() -> None:
    for n in (500, 3000):
        q, k, v = torch.randn(3, 1, 2, n, 16).unbind()
        _, state = attention(q, k, v, is_causal=True, method="multipole", return_state=True)
        predicted = cost("multipole", query_length=n, head_dim=16, heads=2, is_causal=True).state_bytes
        assert predicted == pytest.approx(state.nbytes, rel=0.01)
