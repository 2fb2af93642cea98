"""The future: no edit of it, whatever the numbers, changes a bit of the past."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from calls import (
    ALL_METHODS,
    INF,
    NAN,
    attended,
    by_any_method,
    by_causal_form,
    normal_inputs,
    relative,
    same_bits,
    with_gradients,
)
from subquad import RandomFeatures, attention

pytestmark = pytest.mark.usefixtures("one_thread")

COPIES, ROUNDS, LENGTH = 500, 20, 32  # 10,000 edits
POISON, HUGE, MILD = ("nan", "inf", "-inf"), ("huge",), ("times 1.1", "times 3", "others")


def edited(x: Tensor, cut: Tensor, kinds: tuple[str, ...], generator: torch.Generator) -> Tensor:
    """x (b, 1, n, d) with some or all tokens from the `cut` (b,) of each copy on replaced, each copy in its own way."""
    copies, _, n, _ = x.shape
    others = torch.randn(x.shape, generator=generator)
    powers = torch.rand(copies, 1, n, 1, generator=generator) * 30
    new = {
        "nan": torch.full_like(x, NAN),
        "inf": torch.full_like(x, INF),
        "-inf": torch.full_like(x, -INF),
        "huge": others.sign() * 10**powers,
        "times 1.1": x * 1.1,
        "times 3": x * 3,
        "others": others,
    }
    kind = torch.randint(len(kinds), (copies,), generator=generator)
    replaced = torch.stack([new[name] for name in kinds])[kind, torch.arange(copies)]
    share = torch.rand(copies, 1, 1, 1, generator=generator)
    chosen = torch.rand(copies, 1, n, 1, generator=generator) < share
    return torch.where(chosen & ~before(cut, n)[..., None], replaced, x)


def before(cut: Tensor, n: int) -> Tensor:
    """(b, 1, n): the rows of each copy that lie before its cut."""
    return torch.arange(n) < cut[:, None, None]


def leaks(function: Callable[..., Tensor], kinds: tuple[str, ...], rounds: int = ROUNDS, of_gradients=False) -> int:
    """How many of `rounds` * COPIES edits of the future change a bit of the past: of its outputs, or of the gradients
    of a loss of them. Each copy is compared with an unedited one at the same place of a call of the same shape.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [x.expand(COPIES, -1, -1, -1).contiguous() for x in normal_inputs(1, 1, n=LENGTH)]
    plain, leaking = function(*inputs), 0
    for _ in range(rounds):
        cut = torch.randint(1, LENGTH, (COPIES,), generator=generator)
        past = before(cut, LENGTH)
        changed = [edited(x, cut, kinds, generator) for x in inputs]
        if of_gradients:
            pairs = zip(
                with_gradients(function, *changed, rows=past)[1:],
                with_gradients(function, *inputs, rows=past)[1:],
                strict=True,
            )
        else:
            pairs = iter([(function(*changed), plain)])
        differs = [~(same_bits(a, b).all(-1) | ~past).flatten(1).all(1) for a, b in pairs]
        leaking += int(torch.stack(differs).any(0).sum())
    return leaking


def stabilized_over_all_keys(epsilon: float) -> Callable[..., Tensor]:
    """The fault: one maximum over all keys, future ones too, taken out of the features of every key."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        projections, root = RandomFeatures(16).draw(q.shape[-1]).to(q), q.shape[-1] ** -0.25

        def features(x: Tensor, dims: tuple[int, ...]) -> Tensor:
            projected = x * root @ projections.mT
            half_norm = (x * root).square().sum(-1, keepdim=True) / 2
            return (projected - half_norm - projected.amax(dims, keepdim=True)).exp() + epsilon

        w = (features(q, (-1,)) @ features(k, (-2, -1)).mT).tril()
        return w @ v / w.sum(-1, keepdim=True)

    return function


def test_a_maximum_over_all_keys_is_noticed():
    """Also without the epsilon, where the formula is causal except for its rounding: only the bits show that."""
    half = LENGTH // 2
    q, k, v = normal_inputs(1, 1, n=LENGTH)
    k_edited = torch.cat([k[..., :half, :], 3 * k[..., half:, :]], -2)

    def change_of_the_past(function: Callable[..., Tensor]) -> float:
        return relative(function(q, k_edited, v)[..., :half, :], function(q, k, v)[..., :half, :])

    leaking, rounding = stabilized_over_all_keys(epsilon=1e-4), stabilized_over_all_keys(epsilon=0.0)
    assert change_of_the_past(leaking) > 0.05
    assert 0 < change_of_the_past(rounding) < 1e-6
    assert leaks(leaking, MILD, rounds=2) > 200
    assert leaks(rounding, MILD, rounds=2) > 200
    assert leaks(rounding, POISON, rounds=2) > 200


@by_any_method
@by_causal_form
def test_ten_thousand_edits_of_the_future_leave_the_past_bitwise_the_same(name, form):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attended(ALL_METHODS[name], q, k, v, form=form, chunk=6)[0]

    assert leaks(function, (*POISON, *HUGE, *MILD)) == 0


@by_any_method
def test_the_form_that_a_call_chooses_keeps_the_past_too(name):
    """Several chunks of the default length, and more copies than are computed at once."""
    copies, n, generator = 200, 300, torch.Generator().manual_seed(1)
    inputs = [x.expand(copies, -1, -1, -1).contiguous() for x in normal_inputs(1, 1, n=n)]
    cut = torch.randint(1, n, (copies,), generator=generator)
    changed = [edited(x, cut, (*POISON, *HUGE, *MILD), generator) for x in inputs]
    plain, found = (attention(*x, is_causal=True, method=ALL_METHODS[name]) for x in (inputs, changed))
    assert bool((same_bits(found, plain).all(-1) | ~before(cut, n)).all())


@by_any_method
@by_causal_form
@pytest.mark.parametrize("kinds", [MILD, POISON], ids=["mild", "poison"])
def test_edits_of_the_future_leave_the_gradients_of_the_past_bitwise_the_same(name, form, kinds):

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attended(ALL_METHODS[name], q, k, v, form=form, chunk=6)[0]

    assert leaks(function, kinds, rounds=1, of_gradients=True) == 0
