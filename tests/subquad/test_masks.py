"""Masks that hide keys, are causal, or both, whatever they are written in: booleans, 0 and -inf, a row or a matrix."""

import pytest
import torch
from torch import Tensor

from calls import METHODS
from subquad import Exact, Multipole, Window, attention
from subquad._calls.masks import unexpanded

ALL = {
    **{name: method for name, method in METHODS.items() if getattr(method, "warning", None) is None},
    "window": Window(5),
    "multipole": Multipole(),
    "exact": Exact(),
}
N = 40
KEEP = torch.arange(N) % 7 != 2  # the first key is shown, so that every causal row sees one
HIDDEN = {"-inf": -torch.inf, "least": torch.finfo(torch.float32).min, "-10,000": -1e4}


def drawn(heads: int = 4, key_heads: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(0.5 * torch.randn(2, h, N, 8, generator=generator) for h in (heads, key_heads, key_heads))


def as_numbers(shown: Tensor, hidden: float = -torch.inf) -> Tensor:
    return torch.where(shown, 0.0, hidden)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_numbers_that_only_hide_are_a_boolean_mask(name: str, hidden: str) -> None:
    q, k, v = drawn()
    expected = attention(q, k, v, method=ALL[name], key_padding_mask=KEEP.expand(2, N))
    for shown in (KEEP, KEEP[None], KEEP.expand(2, 1, 1, N), KEEP.expand(2, 4, 1, N), KEEP.expand(N, N)):
        found = attention(q, k, v, as_numbers(shown, HIDDEN[hidden]), method=ALL[name])
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if name != "exact" else 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_matrix_that_is_causal_means_is_causal(name: str) -> None:
    q, k, v = drawn()
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    expected = attention(q, k, v, method=ALL[name], is_causal=True)
    padded = attention(q, k, v, method=ALL[name], is_causal=True, key_padding_mask=KEEP.expand(2, N))
    for convert in (lambda x: x, as_numbers, lambda x: x.expand(2, 4, N, N)):
        torch.testing.assert_close(attention(q, k, v, convert(causal), method=ALL[name]), expected, rtol=0, atol=1e-6)
        found = attention(q, k, v, convert(causal & KEEP), method=ALL[name])
        torch.testing.assert_close(found, padded, rtol=0, atol=1e-6)


def test_query_heads_that_share_a_key_head_may_have_their_own_matrix() -> None:
    q, k, v = drawn(4, 2)
    shown = torch.arange(N) % torch.arange(2, 6)[:, None, None] != 1  # (4, 1, N)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    for method in ("taylor", "random", "multipole"):
        repeated = (q, *(x.repeat_interleave(2, 1) for x in (k, v)))
        expected = attention(*repeated, shown, is_causal=True, method=method)
        found = attention(q, k, v, as_numbers(shown & causal), method=method, enable_gqa=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_boolean_mask() -> None:
    inputs = [x.requires_grad_() for x in drawn()]
    mask = torch.ones(N, N, dtype=torch.bool).tril() & KEEP
    options = dict(is_causal=True, key_padding_mask=KEEP.expand(2, N))
    for method in ("taylor", "linear", "multipole"):
        expected = torch.autograd.grad(attention(*inputs, method=method, **options).square().sum(), inputs)
        found = torch.autograd.grad(attention(*inputs, as_numbers(mask), method=method).square().sum(), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_with_a_state_a_causal_matrix_is_refused_and_a_row_is_remembered(name: str) -> None:
    q, k, v = drawn()
    _, state = attention(q, k, v, as_numbers(KEEP[None]), is_causal=True, method=ALL[name], return_state=True)
    _, expected = attention(
        q, k, v, is_causal=True, key_padding_mask=KEEP.expand(2, N), method=ALL[name], return_state=True
    )
    step = [x[:, :, :1] for x in (q, k, v)]
    found, wanted = (attention(*step, is_causal=True, method=ALL[name], state=each) for each in (state, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    if name != "exact":
        with pytest.raises(ValueError, match=r"^attn_mask: "):
            attention(
                q, k, v, torch.ones(N, N, dtype=torch.bool).tril(), method=ALL[name], state=state, is_causal=False
            )


@pytest.mark.parametrize("name", ALL)
def test_a_row_whose_keys_are_all_far_below_is_a_bias(name: str) -> None:
    """Exact attention averages its values, so that it is not hidden."""
    q, k, v = drawn()
    mask = torch.zeros(N, N)
    mask[3] = -1e9
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    for given in (mask, mask[3:4]):
        if name == "exact":
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, given)
            torch.testing.assert_close(attention(q, k, v, given, method="exact"), expected)
        else:
            with pytest.raises(ValueError, match="a bias added to each logit"):
                attention(q, k, v, given, method=ALL[name])


def test_numbers_above_minus_ten_thousand_are_a_bias() -> None:
    q, k, v = drawn()
    mask = torch.zeros(N)
    mask[1] = -1e4
    expected = attention(q, k, v, method="taylor", key_padding_mask=(mask == 0).expand(2, N))
    assert torch.equal(attention(q, k, v, mask, method="taylor"), expected)
    mask[1] = -9999.5
    with pytest.raises(ValueError, match="a bias"):
        attention(q, k, v, mask, method="taylor")


def test_a_mask_that_repeats_itself_is_read_once() -> None:
    causal = as_numbers(torch.ones(N, N, dtype=torch.bool).tril())
    assert unexpanded(causal.expand(2, 4, N, N)).shape == (1, 1, N, N)
    assert unexpanded(KEEP.expand(2, 4, N, N)).shape == (1, 1, 1, N)
    q, k, v = drawn()
    found = attention(q, k, v, causal.expand(2, 4, N, N), method="taylor")
    assert torch.equal(found, attention(q, k, v, is_causal=True, method="taylor"))


def test_a_bias_for_keys_is_refused_by_name() -> None:
    q, k, v = drawn()
    for mask in (torch.rand(N), torch.rand(1, N), torch.rand(2, 1, 1, N)):
        with pytest.raises(ValueError, match=r"^attn_mask: got torch.float32, a bias"):
            attention(q, k, v, mask, method="taylor")
