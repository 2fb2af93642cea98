"""What is not supported is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from calls import METHODS, attended, normal_inputs
from subquad import Exact, Multipole, Window, attention

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weights can be negative"),
]


def drops_what_it_cannot_do(q: Tensor, k: Tensor, v: Tensor, **_ignored) -> Tensor:
    """The fault."""
    return attention(q, k, v, method="taylor")


REFUSED = {
    "attn_mask, bias": {"attn_mask": torch.linspace(-1, 1, 9).expand(6, 9)},
    "attn_mask, bias without queries": {"attn_mask": torch.linspace(-1, 1, 9).expand(1, 9)},
    "attn_mask, pairs": {"attn_mask": torch.arange(54).reshape(6, 9) % 5 > 0},
    "attn_mask, pairs after the query": {"attn_mask": torch.ones(6, 9, dtype=torch.bool).triu()},
    "attn_mask, pairs by head": {"attn_mask": torch.ones(2, 2, 6, 9, dtype=torch.bool).tril(2)},
    "attn_mask, small numbers": {"attn_mask": torch.tensor([0.0, -100.0]).repeat(5)[:9].expand(6, 9)},
    "dropout_p": {"dropout_p": 0.1},
    "key_padding_mask, not boolean": {"key_padding_mask": torch.zeros(2, 9)},
    "segment_ids, of unequal lengths": {"segment_ids": torch.zeros(2, 9, dtype=torch.int64)},
}


def refusal(function: Callable[..., Tensor], options: dict) -> str:
    """The message of the refusal, or nothing."""
    try:
        function(*normal_inputs(2, 2, n=6, m=9), **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case):
    argument = case.partition(",")[0]
    assert argument not in refusal(drops_what_it_cannot_do, REFUSED[case])
    for method in METHODS.values():
        message = refusal(lambda *x, m=method, **options: attention(*x, method=m, **options), REFUSED[case])
        assert message.startswith(f"{argument}: "), (method, message)


def test_a_mask_of_keys_is_supported():
    q, k, v = normal_inputs(2, 2, n=6, m=9)
    keep = torch.arange(9) % 4 > 0
    for method in METHODS.values():
        expected = attended(method, q, k[..., keep, :], v[..., keep, :], is_causal=False, form="dense")[0]
        for mask in (keep, keep[None], keep.expand(2, 1, 1, 9), keep.expand(2, 2, 1, 9)):
            found = attention(q, k, v, attn_mask=mask, method=method)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (dict(scale=float("nan")), ValueError),
        (dict(scale=-float("inf")), ValueError),
        (dict(scale="big"), TypeError),
        (dict(scale=[1.0]), TypeError),
        (dict(dropout_p=1.5), ValueError),
        (dict(dropout_p=-0.1), ValueError),
        (dict(dropout_p="0.1"), TypeError),
    ],
)
def test_factors_that_are_not_usable_numbers_are_refused_by_name(options, kind):
    padding = torch.ones(6, dtype=torch.bool)  # Exact attention without a mask raises what torch raises.
    for method in (Exact(), Window(3), Multipole(), *METHODS.values()):
        with pytest.raises(kind, match=f"^{next(iter(options))}: expected a "):
            attention(*normal_inputs(2, 2, n=6), method=method, key_padding_mask=padding, **options)
