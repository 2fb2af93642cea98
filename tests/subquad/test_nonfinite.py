"""What is not finite reaches exactly the rows that see it."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calls import (
    ALL_METHODS,
    INF,
    KEEP,
    MASKS,
    NAN,
    by_any_method,
    by_mask,
    forms_of,
    in_form,
    normal_inputs,
    same_bits,
    visible,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def zero_times_nan(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """The fault: hidden keys and values are multiplied by 0."""
    w = ((F.elu(q) + 1) @ ((F.elu(k) + 1) * keep[:, None, :, None]).mT).tril()
    return w @ (v * keep[:, None, :, None]) / w.sum(-1, keepdim=True)


def poisoned_rows(found: Tensor, plain: Tensor) -> Tensor:
    """(n,): the rows that are NaN, in every batch, head and channel; all the others must have the bits of `plain`."""
    poisoned = found.isnan().flatten(0, 1)
    assert torch.equal(poisoned.any(-1).any(0), poisoned.all(-1).all(0))
    rows = poisoned.any(-1).any(0)
    assert bool(same_bits(found, plain)[..., ~rows, :].all())
    return rows


def test_zero_times_nan_is_noticed():
    inputs = normal_inputs(2, 2, n=21)

    def function(*x: Tensor) -> Tensor:
        return zero_times_nan(*x, KEEP.expand(2, -1))

    plain = function(*inputs)[..., 2:, :]
    assert plain.isfinite().all()
    inputs[2][..., 8, :] = NAN  # hidden
    assert poisoned_rows(function(*inputs)[..., 2:, :], plain).any()


@by_any_method
@by_mask
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(name, mask):
    inputs, seen = normal_inputs(2, 2, n=21), visible(mask)
    for form in ("dense", *forms_of(mask)):
        plain = in_form(form, ALL_METHODS[name], *inputs, **MASKS[mask])
        for which, (place, garbage) in itertools.product(
            range(3), [(0, NAN), (5, INF), (8, NAN), (12, -INF), (20, NAN)]
        ):
            changed = [x.clone() for x in inputs]
            changed[which][..., place, :] = garbage
            found = in_form(form, ALL_METHODS[name], *changed, **MASKS[mask])
            expected = torch.arange(21) == place if which == 0 else seen[:, place]
            assert torch.equal(poisoned_rows(found, plain), expected), (form, which, place)


@by_any_method
@pytest.mark.parametrize("mask", ["segments", "causal, segments"])
@pytest.mark.parametrize("is_dense", [True, False])
def test_what_is_not_finite_leaves_the_gradients_of_other_segments_alone(name, mask, is_dense):
    inputs, form = normal_inputs(2, 2, n=21), "dense" if is_dense else forms_of(mask)[0]
    rows = ~visible("segments")[:, 10]

    def gradients(k: Tensor, v: Tensor) -> list[Tensor]:
        found = with_gradients(
            lambda *x: in_form(form, ALL_METHODS[name], *x, **MASKS[mask]), inputs[0], k, v, rows=rows
        )
        return [grad[..., rows, :] for grad in found[1:]]

    here = torch.arange(21)[:, None] == 10
    poisoned = gradients(*(x.masked_fill(here, NAN) for x in inputs[1:]))
    for found, plain in zip(poisoned, gradients(*inputs[1:]), strict=True):
        assert torch.equal(found, plain)


@by_any_method
def test_a_query_that_is_not_finite_gets_no_gradient_from_a_row_that_does_not_count(name):
    """As in the slots of padding, whose rows are left out of a loss."""
    inputs = normal_inputs(2, 2, n=21)
    inputs[0][..., 8, :] = NAN
    for form in ("dense", "chunked", "fused"):

        def function(*x: Tensor, form=form) -> Tensor:
            return in_form(form, ALL_METHODS[name], *x, is_causal=True)

        _, *grads = with_gradients(function, *inputs, rows=torch.arange(21) != 8)
        assert all(bool(grad.isfinite().all()) for grad in grads)
        assert not bool(grads[0][..., 8, :].any())
