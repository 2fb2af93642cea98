"""A padded call is the call without the hidden tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calls import (
    ALL_METHODS,
    INF,
    NAN,
    assert_same,
    attended,
    by_any_method,
    in_form,
    normal_inputs,
    relative,
    resumed,
    totals,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PADDINGS = {"left": range(7), "right": range(18, 24), "scattered": (0, 3, 4, 5, 11, 12, 20, 23)}  # hidden, of 24 tokens


def padding(which: str) -> Tensor:
    keep = torch.ones(24, dtype=torch.bool)
    keep[list(PADDINGS[which])] = False
    return keep


def padding_error(function: Callable[..., Tensor], keep: Tensor, garbage: float | None) -> float:
    """The largest difference, in outputs and gradients, between a padded call and the call without the hidden tokens.

    function(q, k, v, keep). `garbage` fills the hidden keys and values, which are ordinary numbers otherwise.
    """
    q, *inputs = normal_inputs(2, 2, n=len(keep), dtype=torch.float64)
    inputs = [q, *(x if garbage is None else torch.where(keep[:, None], x, garbage) for x in inputs)]
    hidden = with_gradients(lambda *x: function(*x, keep.expand(2, -1))[..., keep, :], *inputs)
    shorter = with_gradients(lambda *x: function(*x, None), *(x[..., keep, :] for x in inputs))
    if any(bool(grad[..., ~keep, :].any()) for grad in hidden[1:]):  # They must be exactly 0, and not NaN.
        return INF
    found = [hidden[0], *(grad[..., keep, :] for grad in hidden[1:])]
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, shorter, strict=True)]
    return torch.stack(errors).max().nan_to_num(INF).item()


def masks_only_values(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """The fault: hidden keys stay in the normalizer."""
    v = v if keep is None else v * keep[:, None, :, None]
    w = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    return w @ v / w.sum(-1, keepdim=True)


@pytest.mark.parametrize("which", PADDINGS)
def test_a_mask_on_values_alone_is_noticed(which):
    assert padding_error(masks_only_values, padding(which), None) == INF  # The hidden keys have gradients.
    keep, inputs = padding(which), normal_inputs(2, 2, n=24)
    found = masks_only_values(*inputs, keep.expand(2, -1))[..., keep, :]
    assert relative(found, masks_only_values(*(x[..., keep, :] for x in inputs), None)) > 0.2


@by_any_method
@pytest.mark.parametrize("which", PADDINGS)
@pytest.mark.parametrize("garbage", [None, NAN, INF])
def test_padded_is_unpadded_in_outputs_and_gradients(name, which, garbage):
    for is_causal, forms in ((True, ("dense", "chunked", "fused", "step")), (False, ("dense", "linear", "fused"))):
        for form in forms:

            def function(
                q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, form=form, is_causal=is_causal
            ) -> Tensor:
                return in_form(form, ALL_METHODS[name], q, k, v, keep=keep, is_causal=is_causal)

            assert padding_error(function, padding(which), garbage) < 1e-10, (form, is_causal)


@by_any_method
@pytest.mark.parametrize("which", PADDINGS)
def test_padded_is_unpadded_in_the_state(name, which):
    keep, inputs = padding(which), normal_inputs(2, 2, n=24, dtype=torch.float64)
    shorter = totals(attended(ALL_METHODS[name], *(x[..., keep, :] for x in inputs), return_state=True)[1])
    hidden = [torch.where(keep[:, None], x, NAN) for x in inputs]
    for options in ({"is_causal": True, "chunk": 4}, {"is_causal": False}):
        _, whole = attended(ALL_METHODS[name], *hidden, keep=keep.expand(2, -1), return_state=True, **options)
        assert_same(totals(whole), shorter)
    _, steps = resumed(ALL_METHODS[name], *hidden, pieces=[1] * 24, keep=keep.expand(2, -1))
    assert_same(totals(steps), shorter)
