"""Gradients are right, and the backward computes states again: it never recovers them by subtraction."""

import math

import pytest
import torch
from torch import Tensor

from calls import MASKS, METHODS, RANDOM, attended, by_mask, by_method, forms_of, in_form, normal, normal_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


@by_method
@by_mask
def test_gradients_are_those_of_finite_differences(name, mask):
    """The forms share the constants that they hide from the derivative, so that agreement alone proves nothing."""
    options = {key: x[:1, 3:9] if isinstance(x, Tensor) else x for key, x in MASKS[mask].items()}
    inputs = [x.requires_grad_() for x in normal_inputs(1, 1, n=6, d=2, e=2, dtype=torch.float64)]
    for form in ("dense", *forms_of(mask)[:2]):

        def function(*x: Tensor, form=form) -> Tensor:
            return in_form(form, METHODS[name], *x, **options)

        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        # test_transforms.py has the second derivatives of the forms in torch's operations.
        assert form != "fused" or torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def query_gradient_by_subtraction(k: Tensor, v: Tensor, grad: Tensor) -> Tensor:
    """The fault: from the last state back, each key taken out of the sum that it was added to. For w = x."""
    sums, rows = k.mT @ v, []
    for i in reversed(range(len(k))):
        rows.append(sums @ grad[i])
        sums = sums - k[i, :, None] * v[i]
    return torch.stack(rows[::-1]) / math.sqrt(k.shape[-1])


def worst_row(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row; rows that are zero up to rounding, as the first one is, do not count."""
    size = expected.norm(dim=-1)
    counts = size > 1e-6 * size.square().mean().sqrt()
    return ((found - expected).norm(dim=-1) / size)[counts].max().item()


@by_method
def test_worst_row_of_the_query_gradient_at_length_8192(name):
    q, k, v = normal_inputs(n=8192, d=16, e=16)
    grad = normal(8192, 16, seed=9)

    def query_gradient(form: str, dtype: torch.dtype) -> Tensor:
        x = q.to(dtype).requires_grad_()
        out, _ = attended(METHODS[name], x, k.to(dtype), v.to(dtype), form=form)
        return torch.autograd.grad(out, x, grad.to(dtype))[0].double()

    # In float64 the forms are equal, and the dense one is slow at this length.
    golden = query_gradient("dense" if name == "taylor" else "chunked", torch.float64)
    allowed = 5e-6
    if name in (*RANDOM, "odd taylor", "relu"):
        # Some rows of these are small differences of large terms, in any float32 computation; which rows it hits, and
        # how, depends on the order of the sums, which is another on another processor. So up to 3 times that.
        allowed = max(allowed, 3 * worst_row(query_gradient("dense", torch.float32), golden))
    for form in ("chunked", "fused"):
        assert worst_row(query_gradient(form, torch.float32), golden) <= allowed, form
    if name == "identity":
        assert worst_row(query_gradient_by_subtraction(k, v, grad), golden) > 20 * allowed
