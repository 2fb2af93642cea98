"""A sequence cut anywhere and resumed is the whole."""

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calls import (
    ALL_METHODS,
    MASKS,
    assert_same,
    attended,
    by_any_method,
    by_method,
    normal,
    normal_inputs,
    relative,
    resumed,
    totals,
    with_gradients,
)
from subquad import Exact, Taylor

pytestmark = pytest.mark.usefixtures("one_thread")


def without_normalizer(q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """The fault: the state holds the numerator alone, so each call divides by the weights of its own keys."""
    q_features, k_features = F.elu(q) + 1, F.elu(k) + 1
    w = (q_features @ k_features.mT).tril()
    numerator = w @ v + (0 if sums is None else q_features @ sums)
    return numerator / w.sum(-1, keepdim=True), k_features.mT @ v + (0 if sums is None else sums)


def random_pieces(n: int, seed: int) -> list[int]:
    """Lengths of pieces that add up to n, cut at random places."""
    generator = random.Random(seed)
    cuts = [0, *sorted(generator.sample(range(1, n), generator.randint(1, n // 3))), n]
    return [end - start for start, end in itertools.pairwise(cuts)]


def test_a_state_without_its_normalizer_is_noticed():
    q, k, v = normal_inputs(2, n=21, dtype=torch.float64)
    head, sums = without_normalizer(*(x[:, :13] for x in (q, k, v)), None)
    tail, _ = without_normalizer(*(x[:, 13:] for x in (q, k, v)), sums)
    whole, _ = without_normalizer(q, k, v, None)
    assert relative(torch.cat([head, tail], 1), whole) > 0.5


@pytest.mark.parametrize("name", ["exact", *ALL_METHODS])
@pytest.mark.parametrize("mask", [mask for mask in MASKS if MASKS[mask]["is_causal"]])
def test_whole_is_chunks_is_steps_is_cut_and_resumed(name, mask):
    """Outputs, gradients and the sums with their normalizer, with two query heads for each key head."""
    method, options, n = {"exact": Exact(), **ALL_METHODS}[name], MASKS[mask], 21
    inputs = [
        normal(2, heads, n, d, seed=i, dtype=torch.float64) for i, (heads, d) in enumerate([(4, 4), (2, 4), (2, 3)])
    ]
    cuts = [[n], [1] * n, [20, 1], [1, 20], [13, 1, 1, 1, 5], *(random_pieces(n, seed) for seed in range(5))]
    expected = with_gradients(lambda *x: attended(method, *x, **options, form="dense")[0], *inputs)
    _, whole = attended(method, *inputs, **options, return_state=True)
    for pieces in cuts:
        found = with_gradients(lambda *x, pieces=pieces: resumed(method, *x, pieces=pieces, **options)[0], *inputs)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= 1e-10 * max(1.0, b.abs().max()), pieces
        _, state = resumed(method, *inputs, pieces=pieces, chunk=3, **options)
        assert state.length == whole.length == n
        if name != "exact":
            assert_same(totals(state), totals(whole))


@by_method
def test_the_state_holds_the_sums_of_the_formula(name):
    """The normalizer, the last column, is the sum of the features themselves."""
    method, (q, k, v) = ALL_METHODS[name], normal_inputs(2, n=21, dtype=torch.float64)
    _, state = attended(method, q, k, v, chunk=4, return_state=True)
    if name == "separable":
        features = (k * 4**-0.25).exp()
    else:
        features = method(k * 4**-0.25, is_query=False)
        features = features[0] * features[1].exp()[..., None] if isinstance(features, tuple) else features
    if isinstance(method, Taylor):  # The weights of the monomials stand in the sums, not half in each feature.
        features = features * method(torch.ones(1, 4, dtype=torch.float64))
    assert_same(totals(state), features.mT @ F.pad(v, (0, 1), value=1.0))


@by_any_method
def test_keys_without_causality_are_added_piece_by_piece(name):
    """Queries see what the state holds and the new keys, all of them."""
    q, k, v = normal_inputs(2, n=9, m=30, dtype=torch.float64)
    method = ALL_METHODS[name]
    _, state = attended(method, q[:, :0], k[:, :17], v[:, :17], is_causal=False, return_state=True)
    found, state = attended(method, q, k[:, 17:], v[:, 17:], is_causal=False, state=state, return_state=True)
    assert_same(found, attended(method, q, k, v, is_causal=False, form="dense")[0])
    again, _ = attended(method, q, k[:, :0], v[:, :0], is_causal=False, state=state, return_state=True)
    assert_same(again, found)
