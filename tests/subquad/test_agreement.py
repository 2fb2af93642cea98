"""One meaning, four forms: they agree, and no small constant in the normalizer parts them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from calls import (
    ALL_METHODS,
    MASKS,
    attended,
    by_any_method,
    by_mask,
    forms_of,
    in_form,
    normal,
    normal_inputs,
    relative,
    with_gradients,
)
from subquad import Linear

pytestmark = pytest.mark.usefixtures("one_thread")

# Their normalizer can vanish, and what is divided by it then is rounding: inputs near zero keep it away from that.
UNSURE = ("odd taylor", "trigonometric")


def assert_agree(inputs: list[Tensor], run_form: Callable[..., Tensor], form: str) -> None:
    """In float32 a form may be as far from the dense one as that is from itself in float64, times 3 in RMS, and times 2
    in the worst number of the output, or by a rounding error: relative to the largest output, because weights that are
    not normalized give outputs of any size. In float64 they are equal except for rounding: an exponent is rounded by
    its size, and so its exponential, relatively.
    """
    wide = [x.double() for x in inputs]
    reference, golden = (with_gradients(lambda *x: run_form("dense", *x), *x) for x in (inputs, wide))
    found, found_wide = (with_gradients(lambda *x: run_form(form, *x), *x) for x in (inputs, wide))
    own_worst = (reference[0] - golden[0]).abs().max()
    assert (found[0] - golden[0]).abs().max() <= max(1e-5, 1e-6 * golden[0].abs().max(), 2 * own_worst), form
    for what, floor in enumerate((2e-6, 2e-5, 2e-5, 2e-5)):  # output, and gradients of query, key, value
        own_error = relative(reference[what], golden[what])
        assert relative(found[what], reference[what]) <= max(3 * own_error, floor), (form, what)
        difference = (found_wide[what] - golden[what]).abs().max()
        rounding = 1e-11 + 4 * torch.finfo(torch.float64).eps * wide[0].abs().max()
        assert difference <= rounding * max(1.0, golden[what].abs().max()), (form, what)


def std_of(name: str) -> float:
    return 0.5 if name in UNSURE else 1.0


@by_any_method
@by_mask
def test_forms_agree(name, mask):
    """Two query heads share each key head."""
    shapes = [(2, 4, 21, 4), (2, 2, 21, 4), (2, 2, 21, 3)]
    inputs = [normal(*shape, seed=i, std=std_of(name)) for i, shape in enumerate(shapes)]

    def run_form(form: str, *x: Tensor) -> Tensor:
        return in_form(form, ALL_METHODS[name], *x, **MASKS[mask])

    for form in forms_of(mask):
        assert_agree(inputs, run_form, form)


@by_any_method
@pytest.mark.parametrize(("n", "m", "chunk"), [(300, 300, 16), (30, 11, 4), (11, 30, 4)])
def test_forms_agree_at_length_and_where_lengths_differ(name, n, m, chunk):
    inputs = normal_inputs(1, 2, n=n, m=m, std=std_of(name))
    for form, is_causal in (("chunked", True), ("linear", False), ("fused", True), ("fused", False)):

        def run_form(form: str, *x: Tensor, is_causal=is_causal) -> Tensor:
            return attended(ALL_METHODS[name], *x, form=form, chunk=chunk, is_causal=is_causal)[0]

        assert_agree(inputs, run_form, form)


@by_any_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forms_agree_in_half_precision(name, dtype):
    inputs = normal_inputs(1, 2, n=100, dtype=dtype)
    golden = attended(ALL_METHODS[name], *(x.double() for x in inputs), form="dense")[0]
    reference = attended(ALL_METHODS[name], *inputs, form="dense")[0]
    found = attended(ALL_METHODS[name], *inputs, form="chunked", chunk=16)[0]
    assert found.dtype == dtype
    assert (found - golden).abs().max() <= 2 * (reference - golden).abs().max()


# --- No small constant in the normalizer -----------------------------------------------------------------------------

SCALES = [10.0**power for power in (-8, -6, -4, -2, 0, 2, 4)]


def with_epsilon(q: Tensor, k: Tensor, v: Tensor, epsilon: float) -> Tensor:
    """The fault: a constant that the normalizer of small queries drowns in."""
    w = (q.relu() @ k.relu().mT).tril()
    return w @ v / (w.sum(-1, keepdim=True) + epsilon)


def test_a_constant_in_the_normalizer_is_noticed():
    q, k, v = normal_inputs(2, n=40)
    prefill, decode = (with_epsilon(q * 1e-8, k, v, epsilon) for epsilon in (1e-6, 1e-10))
    assert relative(decode, prefill) > 0.5
    assert relative(prefill, with_epsilon(q, k, v, 1e-6)) > 0.5
    for scale in SCALES:  # relu's weights grow with the query, so its outputs do not.
        assert relative(attended(Linear("relu"), q * scale, k, v)[0], with_epsilon(q, k, v, 0.0).nan_to_num(0.0)) < 1e-6


@by_any_method
@pytest.mark.parametrize("scale", SCALES)
def test_forms_agree_whatever_the_size_of_the_queries(name, scale):
    inputs = normal_inputs(2, n=20, std=std_of(name))
    inputs[0] = inputs[0] * (min(scale, 1.0) if name in UNSURE else scale)
    for form, is_causal in (("chunked", True), ("step", True), ("linear", False), ("fused", True), ("fused", False)):

        def run_form(form: str, *x: Tensor, is_causal=is_causal) -> Tensor:
            return in_form(form, ALL_METHODS[name], *x, is_causal=is_causal)

        assert_agree(inputs, run_form, form)
