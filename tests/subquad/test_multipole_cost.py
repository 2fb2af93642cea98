"""The cost of Multipole: counted once more, query by query, with a loop for every sum."""

import pytest
import torch

from subquad import Multipole, attention, cost, crossover
from subquad import _multipole as multipole
from subquad._layout import check_shapes
from subquad._multipole_cost import met

METHODS = [Multipole(), Multipole(window=5, sinks=0, block=4, top=3, rank=2), Multipole(window=1, top=0, rank=0)]


def met_by_one(method: Multipole, sees: int, is_causal: bool) -> int:
    far = max(0, sees - method.sinks - is_causal * method.window) // method.block
    size = multipole.group_size(far)
    looked_at = far if size == 1 else min(multipole.OPENED, far // size) * size + far % size
    groups = 0 if size == 1 else far // size
    keys = sees - far * method.block + min(method.top, looked_at) * method.block
    return keys + looked_at * (1 + method.rank) + groups * (1 + 2 * method.rank)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("grouped", "opened"), [(1024, 16), (300, 16), (20, 1)])
def test_keys_and_pseudo_keys_that_are_met(method, grouped, opened, monkeypatch) -> None:
    monkeypatch.setattr(multipole, "GROUPED", grouped)
    monkeypatch.setattr(multipole, "OPENED", opened)
    for n, m in ((1, 1), (5, 5), (90, 90), (4000, 4000), (700, 300), (300, 700), (20_011, 20_011)):
        layout = check_shapes(*(torch.empty(1, x, 8, device="meta") for x in (n, m, m)), enable_gqa=False)
        expected = sum(met_by_one(method, min(i + 1, m), True) for i in range(n))
        assert met(method, layout, True) == expected
        assert met(method, layout, False) == n * met_by_one(method, m, False)


def test_costs_of_a_call() -> None:
    short, long = (cost("multipole", query_length=n, head_dim=64, heads=8, is_causal=True) for n in (16_384, 65_536))
    assert short.form == "multipole" and long.flops < 10 * short.flops  # 4^1.5 = 8, where exact attention has 16
    assert long.peak_bytes < 4.2 * short.peak_bytes
    assert crossover("exact", "multipole", head_dim=64, is_causal=True) < 2048


def test_lengths_that_no_machine_could_hold() -> None:
    found = [cost("multipole", query_length=1 << power, head_dim=64, is_causal=True).flops for power in (36, 40)]
    assert found[1] == pytest.approx(found[0] * 16**1.5, rel=0.1)


def test_training_meets_what_exact_attention_does_and_more() -> None:
    shape = dict(query_length=10_000, head_dim=64, is_causal=True, training=True)
    assert cost("multipole", **shape).flops > cost("exact", **shape).flops
    assert "time O(n m (d + e))" in cost("multipole", **shape).order


def test_times_that_nobody_measured_are_refused() -> None:
    with pytest.raises(ValueError, match="method: no time is known of Multipole in training"):
        crossover("exact", "multipole", head_dim=64, is_causal=True, by="time", training=True)


def test_bytes_of_a_state() -> None:
    q, k, v = torch.randn(3, 1, 2, 500, 16).unbind()
    _, state = attention(q, k, v, is_causal=True, method="multipole", return_state=True)
    predicted = cost("multipole", query_length=500, head_dim=16, heads=2, is_causal=True).state_bytes
    assert predicted <= state.nbytes < 2 * predicted  # It has room for more.
