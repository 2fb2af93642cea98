"""The rules of benchmarks/attention_rules.py: causal, within their budget, and equal to their definitions in loops."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packages import script
from subquad import Multipole

catalog, selection, budget = script("attention_rules"), script("block_selection"), script("budget")

LENGTH, SCALE = 500, 0.4
SMALL = Multipole(window=32, top=4)
NAMES = ["exact", SMALL.label, "window + sinks", "blocks by centroid", "blocks by min-max bound (Quest)",
         "blocks by antidiagonal (XAttention)", "blocks by true mass (oracle)"]  # fmt: skip


def inputs(length: int = LENGTH, value: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries of 6 heads, and keys and values of 3."""
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 6, length, 8, generator=draw), torch.randn(1, 3, length, 8, generator=draw)
    value = torch.randn(1, 3, length, 8, generator=draw) if value is None else value.expand(1, 3, -1, -1)
    return 2 * query, key, value


def weights(rule: Any) -> Tensor:
    """Return the weights (heads, n, m) of a rule: its output for values that are unit vectors."""
    return rule(*inputs(value=torch.eye(LENGTH)), SCALE, 0)[0]


def test_all_rules_are_covered(catalog: Any) -> None:
    assert list(catalog.rules(SMALL)) == NAMES


@pytest.mark.parametrize("name", NAMES[2:])
def test_a_rule_that_can_afford_all_keys_is_exact(catalog: Any, name: str) -> None:
    query, key, value = inputs()
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)
    # What is left of the budget after the scan has to pay for all keys; each rule scans in its own way.
    large = Multipole(top=LENGTH) if "antidiagonal" in name else Multipole(window=4096)
    torch.testing.assert_close(catalog.rules(large)[name](query, key, value, SCALE, 0), expected)


@pytest.mark.parametrize("name", NAMES[2:])
def test_a_query_reads_what_its_budget_allows(catalog: Any, budget: Any, name: str) -> None:
    method, largest_rest = SMALL, 16 + LENGTH // 16  # less than a block, and the scan
    if "antidiagonal" in name:  # It always reads two blocks of 128 keys, more than the small budget.
        method, largest_rest = Multipole(window=32, top=12), 128 + LENGTH // 32
    read = (weights(catalog.rules(method)[name]) > 0).sum(-1)
    allowed = budget.budget(method, torch.arange(LENGTH))
    if "antidiagonal" in name:  # The queries of a block share their budget.
        read, allowed = (x[..., 384:].float().mean(-1, keepdim=True) for x in (read, allowed))
    assert (read <= allowed).all()
    assert (read[..., -1] > allowed[-1] - largest_rest).all()


def test_budgets_add_up_to_the_work_of_multipole(budget: Any) -> None:
    assert int(budget.budget(SMALL, torch.arange(LENGTH)).sum()) == budget.total_work(SMALL, LENGTH)
    assert 0 < budget.share_of_exact(SMALL, 4096) < budget.share_of_exact(SMALL, 1024) < 1


@pytest.mark.parametrize("name", NAMES)
def test_the_last_queries_alone_get_the_same_rows(catalog: Any, name: str) -> None:
    rule, (query, key, value), start = catalog.rules(SMALL)[name], inputs(), 384  # a multiple of XAttention's block
    expected = rule(query, key, value, SCALE, 0)[:, :, start:]
    torch.testing.assert_close(rule(query[:, :, start:], key, value, SCALE, 0), expected)


@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_do_not_change_earlier_rows(catalog: Any, name: str) -> None:
    rule, given, start = catalog.rules(SMALL)[name], inputs(), 384
    before = rule(*given, SCALE, 0)[:, :, :start]
    changed = [torch.cat([x[:, :, :start], -3 * x[:, :, start:]], 2) for x in given]
    torch.testing.assert_close(rule(*changed, SCALE, 0)[:, :, :start], before)


@pytest.mark.parametrize(("score", "scan"), [("by_centroid", 0.5), ("by_bound", 1.0), ("by_mass", 0.0)])
def test_a_query_reads_near_keys_and_the_best_blocks(selection: Any, budget: Any, score: str, scan: float) -> None:
    query, key, _ = inputs()
    found = weights(selection.select(SMALL, getattr(selection, score), scan)) > 0
    size = SMALL.block
    for head, row in [(0, 60), (1, 300), (4, 499)]:
        q, k = query[0, head] * SCALE, key[0, head // 2]
        far = max(0, row + 1 - SMALL.sinks - SMALL.window) // size
        blocks = [range(SMALL.sinks + size * i, SMALL.sinks + size * (i + 1)) for i in range(far)]
        definition = {
            "by_centroid": lambda block, q=q[row], k=k: float(q @ k[list(block)].mean(0)),
            "by_bound": lambda block, q=q[row], k=k: float((q * k[list(block)]).amax(0).sum()),
            "by_mass": lambda block, q=q[row], k=k: float((k[list(block)] @ q).exp().sum()),
        }[score]
        near = set(range(row + 1)) - {j for block in blocks for j in block}
        count = int(int(budget.budget(SMALL, torch.tensor([row]))) - len(near) - scan * far) // size
        expected = near | {j for block in sorted(blocks, key=definition, reverse=True)[:count] for j in block}
        assert set(found[head, row].nonzero()[:, 0].tolist()) == expected


def test_antidiagonal_scores_are_sums_over_antidiagonals(selection: Any) -> None:
    query, key, _ = inputs(384)
    start, group = 256, 2
    chunk = query[0].unflatten(0, (3, group))[:, :, start:]
    rows = selection.Rows(chunk.flatten(1, 2), key[0], torch.arange(start, 384).repeat(group), group)
    found = selection.antidiagonal_scores(rows)
    assert found.shape == (3, group, 3)
    q, k, stride = query[0, 3], key[0, 1], selection.STRIDE
    expected = torch.zeros(3)
    for tile in range(start // stride, 384 // stride):
        sums = [sum(q[tile * stride + stride - 1 - i] @ k[other * stride + i] for i in range(stride)) / stride
                for other in range(tile + 1)]  # fmt: skip
        for other, weight in enumerate(torch.stack(sums).softmax(0)):
            expected[other * stride // 128] += weight
    torch.testing.assert_close(found[1, 1], expected)
