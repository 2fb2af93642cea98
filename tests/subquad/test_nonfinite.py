"""What is not finite reaches exactly the rows that see it; a row that sees no key is 0, whatever its query is."""

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
from subquad import BlockSparse, Hedgehog, Multipole, Window, attention, native

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
            expected = (torch.arange(21) == place) & seen.any(-1) if which == 0 else seen[:, place]
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


# --- Rows that see no key ---------------------------------------------------------------------------------------------

EVERY_METHOD = ALL_METHODS | {
    "hedgehog": Hedgehog(4, 2), "window": Window(5, sinks=2), "wide window": Window(None),
    "learned sinks": Window(4, sink_logits=torch.tensor([0.3, -1.0])), "blocks": BlockSparse(torch.eye(3).bool()[None]),
    "multipole": Multipole(), "small multipole": Multipole(window=4, sinks=1, top=1, block=2),
    "hybrid": "window:5+taylor:2", "hybrid of random features": "window:3+random:16",
}  # fmt: skip
FIRST_HIDDEN = torch.tensor([[i >= 8 for i in range(21)], [True] * 21])
ALL_HIDDEN = torch.tensor([[False] * 21, [True] * 21])
BLIND_ROWS = {  # masks, and the rows that see no key
    "first keys, causal": (dict(is_causal=True, key_padding_mask=FIRST_HIDDEN), ~FIRST_HIDDEN),
    "all keys": (dict(key_padding_mask=ALL_HIDDEN), ~ALL_HIDDEN),
    "all keys, causal": (dict(is_causal=True, key_padding_mask=ALL_HIDDEN), ~ALL_HIDDEN),
    "a segment": (dict(segment_ids=(~FIRST_HIDDEN).long(), key_padding_mask=FIRST_HIDDEN), ~FIRST_HIDDEN),
    "a segment, causal": (
        dict(segment_ids=(~FIRST_HIDDEN).long(), key_padding_mask=FIRST_HIDDEN, is_causal=True), ~FIRST_HIDDEN,
    ),
}  # fmt: skip
by_every_method = pytest.mark.parametrize("name", EVERY_METHOD)
with_and_without_kernels = pytest.mark.parametrize("has_kernels", [True, False])


@pytest.fixture
def kernels(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernels:
        monkeypatch.setattr(native, "available", lambda: False)


def rows_of(output: Tensor, rows: Tensor) -> Tensor:
    """(..., e): some rows (b, n) of all heads."""
    return output.transpose(1, 2)[rows]


@by_every_method
@pytest.mark.filterwarnings("ignore:Taylor")
@with_and_without_kernels
@pytest.mark.parametrize("mask", BLIND_ROWS)
def test_a_row_without_keys_is_0_whatever_its_query_is(name, mask, kernels):
    options, blind = BLIND_ROWS[mask]
    if "hybrid" in name and ("segment_ids" in options or "is_causal" not in options):
        pytest.skip("Hybrid is causal and has no segments")
    method, inputs = EVERY_METHOD[name], normal_inputs(2, 2, n=21)
    plain = attention(*inputs, method=method, **options)
    assert not bool(rows_of(plain, blind).any())
    for bad, place in itertools.product((NAN, INF), (slice(None), slice(2, 15))):
        changed = [inputs[0].clone(), *inputs[1:]]
        changed[0][:, :, place, 1] = bad
        is_bad = changed[0].isfinite().logical_not().any(-1)  # (b, h, n)
        leaves = [x.clone().requires_grad_() for x in changed]
        for given in (changed, leaves):
            found = attention(*given, method=method, **options)
            assert torch.equal(found.isnan().any(-1), is_bad & ~blind[:, None])
            assert not bool(rows_of(found, blind).any())
        grads = torch.autograd.grad(rows_of(found, blind).sum(), leaves, materialize_grads=True)
        assert not any(bool(grad.any()) for grad in grads)  # NaN would be True.


@by_every_method
@pytest.mark.filterwarnings("ignore:Taylor")
@with_and_without_kernels
def test_a_row_without_keys_is_0_after_a_state_of_hidden_keys(name, kernels):
    if name == "blocks":
        pytest.skip("BlockSparse has no state")
    q, k, v = normal_inputs(2, 2, n=21)
    q[:, :, :, 0] = NAN
    state, outputs = None, []
    for part in (slice(0, 1), slice(1, 4), slice(4, 7), slice(7, 8), slice(8, 9), slice(9, 21)):
        output, state = attention(
            q[:, :, part], k[:, :, part], v[:, :, part], method=EVERY_METHOD[name], is_causal=True,
            key_padding_mask=FIRST_HIDDEN[:, part], state=state, return_state=True,
        )  # fmt: skip
        outputs.append(output)
    found = torch.cat(outputs, -2)
    assert torch.equal(found.isnan().all(-1), FIRST_HIDDEN[:, None].expand(-1, 2, -1))
    assert not bool(rows_of(found, ~FIRST_HIDDEN).any())
    if "hybrid" not in name:
        output = attention(q, k[:, :, :0], v[:, :, :0], method=EVERY_METHOD[name], is_causal=True)
        assert output.shape == v.shape and not bool(output.any())
