"""Rows without keys, and calls without rows."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calls import ALL_METHODS, NAN, attended, by_any_method, in_form, normal_inputs, with_gradients
from subquad import attention

pytestmark = pytest.mark.usefixtures("one_thread")


def divided_by_nothing(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """The fault: 0 / 0."""
    w = (F.elu(q) + 1) @ (F.elu(k) + 1).mT * keep[:, None, None]
    return w @ v / w.sum(-1, keepdim=True)


def gives_nothing(function: Callable[..., Tensor], inputs: list[Tensor]) -> bool:
    """Whether output and gradients are exactly 0."""
    return all(bool((x == 0).all()) for x in with_gradients(function, *inputs))


def test_zero_divided_by_zero_is_noticed():
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    assert not gives_nothing(lambda *x: divided_by_nothing(*x, hidden), normal_inputs(2, 2, n=9))


@by_any_method
def test_rows_without_keys_are_zero_with_zero_gradient(name):
    method, inputs = ALL_METHODS[name], normal_inputs(2, 2, n=9)
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    for form, is_causal in (("dense", True), ("chunked", True), ("step", True), ("dense", False), ("linear", False),
                            ("fused", True), ("fused", False)):  # fmt: skip

        def function(*x: Tensor, form=form, is_causal=is_causal) -> Tensor:
            return in_form(form, method, *x, keep=hidden, is_causal=is_causal)

        assert gives_nothing(function, inputs), form
        assert gives_nothing(function, [inputs[0], *(x * NAN for x in inputs[1:])]), form
    one_hidden = torch.arange(9).expand(2, -1) > 3
    for form in ("dense", "chunked", "fused", "step"):
        found = with_gradients(lambda *x, f=form: in_form(f, method, *x, keep=one_hidden, is_causal=True), *inputs)
        assert not any(bool(x[..., :4, :].any()) for x in found), form
        assert all(bool(x.isfinite().all()) for x in found)


by_few_tokens = pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 5), (5, 0), (1, 1), (1, 5), (5, 1), (0, 1), (1, 0)])


@by_any_method
@by_few_tokens
def test_calls_with_no_token_or_one(name, n, m):
    method, inputs = ALL_METHODS[name], normal_inputs(2, 2, n=n, m=m)
    for is_causal, return_state in itertools.product((True, False), repeat=2):
        out = attended(method, *inputs, is_causal=is_causal, return_state=return_state)[0]
        expected = attended(method, *inputs, is_causal=is_causal, form="dense")[0]
        assert out.shape == expected.shape == (2, 2, n, 3)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert m > 0 or not bool(out.any())
        for shape in ((0, 2), (2, 0)):  # no batch, no heads
            none = attended(method, *normal_inputs(*shape, n=n, m=m), is_causal=is_causal, return_state=return_state)[0]
            assert none.shape == (*shape, n, 3)


@by_any_method
@by_few_tokens
def test_gradients_of_calls_with_no_token_or_one(name, n, m):
    inputs = normal_inputs(2, 2, n=n, m=m)
    for is_causal in (True, False):
        _, *grads = with_gradients(lambda *x, c=is_causal: attended(ALL_METHODS[name], *x, is_causal=c)[0], *inputs)
        assert [grad.shape for grad in grads] == [x.shape for x in inputs]
        assert all(bool(grad.isfinite().all()) for grad in grads)


def test_exact_keeps_the_behavior_of_torch():
    q, k, v = normal_inputs(2, 2, n=6, m=9)
    hidden = torch.zeros(6, 9, dtype=torch.bool)
    poisoned = v.clone()
    poisoned[..., 8, :] = NAN
    cases = [
        ((q, k, v), {"attn_mask": hidden}),
        ((q, k, poisoned), {"attn_mask": ~hidden.index_fill(1, torch.tensor([8]), True)}),
        ((q[..., :0, :], k, v), {}),
        ((q, k[..., :0, :], v[..., :0, :]), {}),
        ((q, k, v), {"is_causal": True, "scale": -2.0}),
    ]
    for inputs, options in cases:
        expected = F.scaled_dot_product_attention(*inputs, **options)
        torch.testing.assert_close(attention(*inputs, **options), expected, rtol=0, atol=0, equal_nan=True)
