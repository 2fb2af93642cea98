"""Separable in the native kernels, which take no largest exponent out: keys and values of any size are right all the
same, and no earlier row sees which of them were too large for the kernels."""

import pytest
import torch
from torch import Tensor

from calls import INF, NAN, attended, normal_inputs, relative, same_bits, with_gradients
from subquad import Separable, attention, native
from subquad._engines.features import engine
from subquad._engines.features.fused import fused_separable
from subquad._engines.features.separable import SeparableKernel
from subquad._engines.features.sums import Tokens

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no kernels: {native.status().reason}")

LENGTH = 70


def inputs_of(dtype: torch.dtype = torch.float32, batch: int = 2, std: float = 1.0, shift: float = 0.0) -> list[Tensor]:
    q, k, v = normal_inputs(batch, 2, n=LENGTH, dtype=dtype)
    return [q, k * std + shift, v]


def left_to_torch(k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
    """(b, 2, n), of heads k (b, n, d) and v (b, n, e) that two query heads share."""
    q = k[:, None].expand(-1, 2, -1, -1)
    left = fused_separable(SeparableKernel((1.0, 1.0)), Tokens(q, k, v, keep))[1]
    return torch.zeros(q.shape[:3], dtype=torch.bool) if left is None else left


LARGE = {"std 10": (10, 0), "std 40": (40, 0), **{f"shift {s}": (1, s) for s in (30, -30, 70, -70, 1000, -1000)}}


@pytest.mark.parametrize("large", LARGE)
def test_keys_of_any_size(large) -> None:
    """And with several query heads to a key head."""
    inputs = inputs_of(torch.float64, 1, *LARGE[large])
    inputs[0] = torch.cat([inputs[0], inputs[0].flip(-2)], 1)

    def found(form: str, dtype: torch.dtype) -> list[Tensor]:
        return with_gradients(lambda *x: attended(Separable(), *x, form=form)[0], *(x.to(dtype) for x in inputs))

    golden, reference = found("dense", torch.float64), found("dense", torch.float32)
    for a, b in zip(found("fused", torch.float64), golden, strict=True):
        assert relative(a, b) < 1e-11
    fused = found("fused", torch.float32)
    assert (fused[0] - golden[0]).abs().max() <= max(1e-5, 2 * (reference[0] - golden[0]).abs().max())
    for i, floor in enumerate((2e-6, 2e-5, 2e-5, 2e-5)):
        assert relative(fused[i], golden[i]) <= max(3 * relative(reference[i], golden[i]), floor), i


def test_values_of_any_size() -> None:
    """Products with exp(25), which would leave the range of float32."""
    q, k, v = inputs_of()
    k[..., 3, :] = 25
    v[..., 3, :] = torch.tensor([1e30, -1e37, 1.0])
    found, expected = (attended(Separable(), q, k, v, form=form)[0] for form in ("fused", "dense"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_are_left_to_torch_from_the_first_that_sees_too_large_a_number() -> None:
    k, v = torch.zeros(3, 9, 4), torch.zeros(3, 9, 2)
    assert not left_to_torch(k, v).any()
    k[1, 4, 2], v[2, 7, 0] = -33.0, 1e19
    first = torch.tensor([9, 4, 7])[:, None, None].expand(-1, 2, -1)
    assert torch.equal(left_to_torch(k, v), torch.arange(9) >= first)
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[1, 4] = keep[2, 7] = False  # Nobody sees them.
    assert not left_to_torch(k, v, keep).any()
    k[0, 2, 0], v[0, 3, 0] = NAN, INF  # These poison rows, in the kernels too.
    assert not left_to_torch(k, v, keep).any()


@pytest.mark.parametrize("new", [1e3, -1e3, 40.0, 1e30, NAN, INF, -INF])
def test_an_edit_of_the_future_leaves_the_bits_of_the_past(new) -> None:
    """Outputs and gradients; of another sequence in the batch, all of them."""
    cut, rows = 40, torch.ones(2, 1, LENGTH, dtype=torch.bool)
    rows[0, :, 40:] = False
    before, given = rows.expand(2, 2, -1), inputs_of()
    plain = with_gradients(lambda *x: attention(*x, is_causal=True, method=Separable()), *given, rows=rows)
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        changed = [x.clone() for x in given]
        for i in which:
            changed[i][0, :, cut:] = new
        found = with_gradients(lambda *x: attention(*x, is_causal=True, method=Separable()), *changed, rows=rows)
        for a, b in zip(found, plain, strict=True):
            assert bool(same_bits(a, b)[before].all())


def test_rows_of_both_ways_in_one_call_are_differentiated_twice() -> None:
    q, k, v = (x.requires_grad_() for x in normal_inputs(1, 1, n=5, d=2, e=2, dtype=torch.float64))
    large = torch.tensor([0.0, 0.0, 0.0, 50.0, 0.0], dtype=torch.float64)[:, None]

    def function(*x: Tensor) -> Tensor:
        return attended(Separable(), x[0], x[1] + large, x[2], form="fused")[0]

    assert left_to_torch((k + large)[0], v[0]).any()
    assert torch.autograd.gradcheck(function, (q, k, v))
    assert torch.autograd.gradgradcheck(function, (q, k, v))


def test_the_kernels_take_a_causal_call_and_no_other(monkeypatch) -> None:
    taken = []
    monkeypatch.setattr(engine, "fused_separable", lambda *x: taken.append(1) or fused_separable(*x))
    q, k, v = inputs_of()
    for options, expected in (
        ({"is_causal": True}, [1]), ({}, []), ({"is_causal": True, "return_state": True}, []),
        ({"is_causal": True, "segment_ids": torch.arange(LENGTH) // 9}, []),
        ({"is_causal": True, "key_padding_mask": torch.arange(LENGTH) > 3}, [1]),
    ):  # fmt: skip
        attention(q, k, v, method="separable", **options)
        assert taken == expected, options
        taken.clear()
    attention(q[..., :9, :], k, v, is_causal=True, method="separable")
    assert not taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype) -> None:
    inputs = [x.to(dtype) for x in inputs_of()]
    found, expected = (attended(Separable(), *x, form="fused")[0] for x in (inputs, [x.float() for x in inputs]))
    assert torch.equal(found, expected.to(dtype))
