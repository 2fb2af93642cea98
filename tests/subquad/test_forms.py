"""Which form a call takes, and how many tokens it computes at once: `choose_form` and `sizes_of`.

Any form and any size gives the right result, so no test of results sees this decision; it is pinned here instead.

Axes: n queries, m keys, d width, e value width, r features; `group` query heads share each of `heads` key heads.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from subquad import Linear, RandomFeatures, Separable, Taylor
from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._engines.features.choose_form import Sizes, choose_form, sizes_of
from subquad._engines.features.engine import _form_of
from subquad._engines.features.schedule import KernelSizes, schedule


def layout_of(n, m=None, *, batch=(), heads=1, group=1, d=64, e=None) -> Layout:
    return Layout(batch, heads, group, n, n if m is None else m, d, d if e is None else e, torch.device("cpu"))


def decided(method, layout: Layout, is_causal=False, stateful=False, resumed=False):
    form = choose_form(method, layout, is_causal=is_causal, is_fusable=False, is_stateful=stateful, is_resumed=resumed)
    return form, sizes_of(method.size(layout.width), layout)


METHODS = {
    "taylor1": Taylor(1),
    "taylor2": Taylor(2),
    "taylor4": Taylor(4),
    "random64": RandomFeatures(64),
    "random256": RandomFeatures(256),
    "elu": Linear("elu"),
    "separable": Separable(),
}
DIAGONAL = Taylor(2, basis="diagonal")  # Not in the table: its pairs cost r, unlike those of other series.
LAYOUTS = {
    "short": layout_of(100, heads=8),
    "long": layout_of(4096, heads=8),
    "longest": layout_of(65_536, heads=2),
    "wide": layout_of(1024, heads=4, d=256),
    "narrow": layout_of(2048, heads=8, d=8),
    "many-heads": layout_of(512, heads=128),
    "grouped": layout_of(2048, heads=4, group=8),
    "few-queries": layout_of(16, 4096, heads=8),
    "many-queries": layout_of(4096, 77, heads=8),
    "batch": layout_of(256, batch=(4, 8), heads=12, d=32),
    "narrow-values": layout_of(600, heads=8, e=4),
}
# The form of a call that is not causal and of one that is, and the sizes of both.
TABLE = """
layout          method     plain    causal   chunk   wave   unit   rows  batch
short           taylor1    linear   dense      100   1000   1000    100     81
short           taylor2    dense    dense      100    200   1000    100     19
short           taylor4    dense    dense        5      5   1020    100      1
short           random64   linear   dense      100   1000   1000    100     81
short           random256  dense    dense      100   1000   1000    100     81
short           elu        linear   dense      100   1000   1000    100     81
short           separable  linear   chunked    100   1000   1000    100     81
long            taylor1    linear   chunked     64   1024   1024     64    128
long            taylor2    linear   dense       64    192    960     64     30
long            taylor4    dense    dense        5      5   1020     64      1
long            random64   linear   chunked     64   1024   1024     64    128
long            random256  linear   chunked     64   1024   1024     64    128
long            elu        linear   chunked     64   1024   1024     64    128
long            separable  linear   chunked     64   1024   1024     64    128
longest         taylor1    linear   chunked     64   4096   4096     64    128
longest         taylor2    linear   chunked     64    960    960     64     30
longest         taylor4    dense    dense        5      5   1020     64      1
longest         random64   linear   chunked     64   4096   4096     64    128
longest         random256  linear   chunked     64   4096   4096     64    128
longest         elu        linear   chunked     64   4096   4096     64    128
longest         separable  linear   chunked     64   4096   4096     64    128
wide            taylor1    linear   chunked     64   2048   2048    512    128
wide            taylor2    dense    dense       64     64   1024    512      1
wide            taylor4    dense    dense        1      1   1024    512      1
wide            random64   linear   chunked     64   2048   2048    512    128
wide            random256  linear   chunked     64   2048   2048    512    128
wide            elu        linear   chunked     64   2048   2048    512    128
wide            separable  linear   chunked     64   2048   2048    512    128
narrow          taylor1    linear   chunked     64   1024   1024    128    128
narrow          taylor2    linear   chunked     64   1024   1024    128    128
narrow          taylor4    linear   chunked     64   1024   1024    128    128
narrow          random64   linear   chunked     64   1024   1024    128    128
narrow          random256  linear   chunked     64   1024   1024    128    128
narrow          elu        linear   chunked     64   1024   1024    128    128
narrow          separable  linear   chunked     64   1024   1024    128    128
many-heads      taylor1    linear   chunked     64     64   1024     64    128
many-heads      taylor2    dense    dense       64     64   1024     64     30
many-heads      taylor4    dense    dense        5      5   1020     64      1
many-heads      random64   linear   chunked     64     64   1024     64    128
many-heads      random256  linear   chunked     64     64   1024     64    128
many-heads      elu        linear   chunked     64     64   1024     64    128
many-heads      separable  linear   chunked     64     64   1024     64    128
grouped         taylor1    linear   chunked     64    256   1024     64     16
grouped         taylor2    linear   dense       64     64   1024     64      3
grouped         taylor4    dense    dense        5      5   1020     64      1
grouped         random64   linear   chunked     64    256   1024     64     16
grouped         random256  linear   chunked     64    256   1024     64     16
grouped         elu        linear   chunked     64    256   1024     64     16
grouped         separable  linear   chunked     64    256   1024     64     16
few-queries     taylor1    dense    dense       16   1024   1024     16    512
few-queries     taylor2    dense    dense       16    240    960     16    122
few-queries     taylor4    dense    dense        5      5   1020     16      1
few-queries     random64   dense    dense       16   1024   1024     16    512
few-queries     random256  dense    dense       16   1024   1024     16    512
few-queries     elu        dense    dense       16   1024   1024     16    512
few-queries     separable  linear   chunked     16   1024   1024     16    512
many-queries    taylor1    linear   chunked     64   1024   1024   3404    128
many-queries    taylor2    dense    dense       64    192    960   3404     30
many-queries    taylor4    dense    dense        5      5   1020   3404      1
many-queries    random64   linear   chunked     64   1024   1024   3404    128
many-queries    random256  linear   chunked     64   1024   1024   3404    128
many-queries    elu        linear   chunked     64   1024   1024   3404    128
many-queries    separable  linear   chunked     64   1024   1024   3404    128
batch           taylor1    linear   chunked     64     64   1024     64    128
batch           taylor2    dense    dense       64     64   1024     64    116
batch           taylor4    dense    dense       64     64   1024     64      1
batch           random64   linear   chunked     64     64   1024     64    128
batch           random256  linear   chunked     64     64   1024     64    128
batch           elu        linear   chunked     64     64   1024     64    128
batch           separable  linear   chunked     64     64   1024     64    128
narrow-values   taylor1    linear   chunked     64   1024   1024    436    128
narrow-values   taylor2    dense    dense       64    192    960    436     30
narrow-values   taylor4    dense    dense        5      5   1020    436      1
narrow-values   random64   linear   chunked     64   1024   1024    436    128
narrow-values   random256  linear   chunked     64   1024   1024    436    128
narrow-values   elu        linear   chunked     64   1024   1024    436    128
narrow-values   separable  linear   chunked     64   1024   1024    436    128
"""
DECISIONS = [line.split() for line in TABLE.split("\n")[2:-1]]


def test_the_table_is_whole():
    assert [(layout, method) for layout, method, *_ in DECISIONS] == list(itertools.product(LAYOUTS, METHODS))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: " ".join(decision[:2]))
def test_the_decision_is_that_of_the_table(decision, training):
    """The table records today's decision, right or wrong: it is the output of `choose_form` on the day it was written.

    A change must be meant: who changes a line here says why it is better, with a measurement. Training has no say in it
    today, so each line holds with gradients and without.
    """
    name, method, plain, causal, *sizes = decision
    with torch.set_grad_enabled(training):
        found = [decided(METHODS[method], LAYOUTS[name], is_causal) for is_causal in (False, True)]
    expected = Sizes(*map(int, sizes))
    assert found == [(plain, expected), (causal, expected)]


@pytest.mark.parametrize(
    ("method", "layout", "expected"),
    [
        # A sequence of up to two chunks is one chunk.
        (Linear("elu"), layout_of(128), Sizes(128, 8192, 8192, 128, 64)),
        (Linear("elu"), layout_of(129), Sizes(64, 8192, 8192, 129, 128)),
        # So many features that those of a chunk fill the cache; of two tokens; that those of one do not fit.
        (RandomFeatures(1 << 16), layout_of(256), Sizes(64, 64, 1024, 256, 1)),
        (RandomFeatures((1 << 16) + 1), layout_of(256), Sizes(63, 63, 1008, 256, 1)),
        (RandomFeatures(1 << 21), layout_of(256), Sizes(2, 2, 1024, 256, 1)),
        (RandomFeatures((1 << 21) + 1), layout_of(256), Sizes(1, 1, 1024, 256, 1)),
        (RandomFeatures((1 << 22) + 1), layout_of(256), Sizes(1, 1, 1024, 256, 1)),
        # So many features that those of a wave fill the cache.
        (RandomFeatures(512), layout_of(256), Sizes(64, 8192, 8192, 256, 128)),
        (RandomFeatures(513), layout_of(256), Sizes(64, 8128, 8128, 256, 127)),
        # So many heads that a wave has two chunks, or one.
        (Linear("elu"), layout_of(256, heads=64), Sizes(64, 128, 1024, 128, 128)),
        (Linear("elu"), layout_of(256, heads=65), Sizes(64, 64, 1024, 126, 128)),
        (Linear("elu"), layout_of(256, heads=128), Sizes(64, 64, 1024, 64, 128)),
        (Linear("elu"), layout_of(256, heads=129), Sizes(64, 64, 1024, 64, 128)),
        # The same with query heads, which a batch cannot part from their key head.
        (Linear("elu"), layout_of(256, group=64), Sizes(64, 128, 1024, 128, 2)),
        (Linear("elu"), layout_of(256, group=65), Sizes(64, 64, 1024, 126, 1)),
        (Linear("elu"), layout_of(256, group=129), Sizes(64, 64, 1024, 64, 1)),
        (Linear("elu"), layout_of(256, batch=(8,), heads=8, group=2), Sizes(64, 64, 1024, 64, 64)),
        # Waves of about a unit: it holds two of them, or one, and grows with a wave that is longer.
        (Linear("elu"), layout_of(256, heads=7), Sizes(64, 1152, 1152, 256, 128)),
        (Linear("elu"), layout_of(256, heads=8), Sizes(64, 1024, 1024, 256, 128)),
        (Linear("elu"), layout_of(256, heads=9), Sizes(64, 896, 896, 256, 128)),
        (Linear("elu"), layout_of(256, heads=16), Sizes(64, 512, 1024, 256, 128)),
        # Rows of the dense form: no more than there are, no fewer than a chunk.
        (Linear("elu"), layout_of(1448), Sizes(64, 8192, 8192, 1448, 128)),
        (Linear("elu"), layout_of(1449), Sizes(64, 8192, 8192, 1447, 128)),
        (Linear("elu"), layout_of(1000, 32_263), Sizes(64, 8192, 8192, 65, 128)),
        (Linear("elu"), layout_of(1000, 32_264), Sizes(64, 8192, 8192, 64, 128)),
        (Linear("elu"), layout_of(1000, 40_000), Sizes(64, 8192, 8192, 64, 128)),
        (Linear("elu"), layout_of(3_000_000, 1), Sizes(64, 8192, 8192, 1 << 21, 128)),
        # Nothing at all: no query, no key, no width, no batch.
        (Linear("elu"), layout_of(0, 5), Sizes(1, 8192, 8192, 1, 8192)),
        (Linear("elu"), layout_of(5, 0), Sizes(5, 8190, 8190, 5, 1638)),
        (Linear("elu"), layout_of(5, d=0, e=3), Sizes(5, 8190, 8190, 5, 1638)),
        (Linear("elu"), layout_of(5, batch=(0,), heads=8), Sizes(5, 8190, 8190, 5, 1638)),
    ],
)
def test_sizes_at_their_limits_and_just_beyond(method, layout, expected):
    for is_causal in (False, True):
        assert decided(method, layout, is_causal)[1] == expected


@pytest.mark.parametrize(
    ("method", "layout", "is_causal"),
    [
        # Where pairs cost d, and d = e, it is as many queries as features; twice as many where half of the pairs count.
        (Linear("identity"), layout_of(64), False),
        (Linear("elu"), layout_of(64), False),
        (Linear("elu"), layout_of(128), True),
        (Taylor(2), layout_of(2145), False),
        (Taylor(2), layout_of(4290), True),
        (Taylor(4), layout_of(814_385), False),
        # The pairs of other maps cost r.
        (DIAGONAL, layout_of(97), False),
        (RandomFeatures(256), layout_of(128), False),
        (RandomFeatures(256), layout_of(256), True),
        # Of unequal lengths all pairs count.
        (RandomFeatures(256), layout_of(80, 320), False),
        (RandomFeatures(256), layout_of(80, 320), True),
        (RandomFeatures(256), layout_of(320, 80), True),
        (Linear("elu"), layout_of(32, 64, e=16), True),
        (Linear("elu"), layout_of(64, 32, e=16), True),
        # Query heads that share a key head count in both forms, their keys once; heads and batches in neither.
        (Linear("elu"), layout_of(48, group=2), False),
        (Linear("elu"), layout_of(32, 64, group=2), False),
        (Linear("elu"), layout_of(64, batch=(3,), heads=5), False),
    ],
)
def test_equal_work_is_done_by_sums_and_a_query_less_is_dense(method, layout, is_causal):
    n, m = layout.queries, layout.keys
    shorter = replace(layout, queries=n - 1, keys=m - 1 if n == m else m)
    by_sums = "chunked" if is_causal else "linear"
    assert (decided(method, layout, is_causal)[0], decided(method, shorter, is_causal)[0]) == (by_sums, "dense")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "stateful", "resumed", "expected"),
    [
        (1, 1, True, True, "step"),
        (1, 1, True, False, "sums"),  # the first token of a stream
        (1, 1, False, False, "dense"),
        (1, 2, True, True, "sums"),
        (2, 1, True, True, "sums"),
        (2, 2, True, True, "sums"),
        (2, 2, True, False, "sums"),
    ],
)
def test_one_token_after_others_is_a_step_and_no_other_call_with_a_state_is(
    n, m, stateful, resumed, expected, is_causal
):
    by_sums = "chunked" if is_causal else "linear"
    found = decided(Taylor(2), layout_of(n, m), is_causal, stateful, resumed)[0]
    assert found == (by_sums if expected == "sums" else expected)


@pytest.mark.parametrize("form", ["dense", "chunked", "linear", "step", "fused"])
def test_the_form_that_is_asked_for_is_taken_whatever_the_rest(form):
    """As far as the call has it: sums are chunked if it is causal, else linear; kernels need a call of their kind."""
    nothing = torch.empty(0)
    for layout, is_causal, stateful in itertools.product(LAYOUTS.values(), (False, True), (False, True)):
        call = Call(
            layout, nothing, nothing, nothing, torch.float32, is_causal=is_causal, return_state=stateful
        )  # fmt: skip
        by_sums = "chunked" if is_causal else "linear"
        for method, is_served in itertools.product(METHODS.values(), (False, True)):
            expected = form if form in ("dense", "step") or (form == "fused" and is_served) else by_sums
            assert _form_of(method, call, is_served, stateful, form) == expected


def test_the_chunk_that_is_asked_for_decides_the_other_sizes():
    """A test with short chunks crosses the borders of waves and units too, and its batch is whole."""
    for method in METHODS.values():
        layout = layout_of(1000, 4000, batch=(2,), heads=3, group=2)
        assert sizes_of(method.size(layout.width), layout, chunk=5) == Sizes(5, 10, 20, 64, 6)
    sizes = KernelSizes(6, 2, 1000, 1000, 64, 64, 2145)
    assert schedule("forward", "taylor", sizes, True, False, threads=1, chunk=5)[1:3] == (5, False)  # nor pairs
