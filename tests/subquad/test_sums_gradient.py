"""Gradients through states: the kernels differentiate the sums that a call reads and the sums that it returns."""

import pytest
import torch
from torch import Tensor

from calls import normal_inputs, relative
from subquad import Linear, RandomFeatures, Taylor, attention, native
from subquad._calls.call import Call
from subquad._engines import run

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=f"no kernels: {native.status().reason}"),
    pytest.mark.filterwarnings("ignore:.*weights can be negative"),
]

SERVED = {
    "taylor1": Taylor(1), "taylor2": Taylor(2), "taylor3": Taylor(3), "positive": RandomFeatures(37),
    "hyperbolic": RandomFeatures(44, "hyperbolic"), "elu": Linear("elu"), "relu": Linear("relu"),
    "identity": Linear("identity"),
}  # fmt: skip
# (is_causal, queries, keys): with a state, keys alone can be added up, and queries alone can read.
CALLS = [(True, 130, 130), (False, 40, 75), (False, 0, 50), (False, 50, 0)]


def resumed(name: str, form: str, is_causal: bool, n: int, m: int, chunk: int | None) -> tuple[set[str], list[Tensor]]:
    """Return the forms, output, true sums and gradients of two calls, the second of which continues the first."""
    first = normal_inputs(1, 3, n=70, d=5, e=4, dtype=torch.float64, std=0.7)
    q = normal_inputs(1, 6, n=n, d=5, e=4, dtype=torch.float64, std=0.7, seed=1)[0]
    _, k, v = normal_inputs(1, 3, n=m, d=5, e=4, dtype=torch.float64, std=0.7, seed=2)
    inputs = [x.requires_grad_() for x in (q, k, v, *first[1:])]
    call = Call.of(q[:, :, :0], *first[1:], enable_gqa=True, return_state=True)
    before = run(SERVED[name], call, form, chunk)
    call = Call.of(q, k, v, enable_gqa=True, is_causal=is_causal, state=before.state, return_state=True)
    found = run(SERVED[name], call, form, chunk)
    state = found.state
    scale = 1.0 if state.log_scale is None else state.log_scale.exp()[..., None]
    results = [found.output, state.sums * scale]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in results]
    grads = torch.autograd.grad(results, inputs, weights, materialize_grads=True)
    return {before.form, found.form}, [x.detach() for x in (*results, *grads)]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("shape", CALLS, ids=str)
@pytest.mark.parametrize("chunk", [None, 17])
def test_gradients_through_a_state_are_those_of_torch(name, shape, chunk) -> None:
    forms, found = resumed(name, "fused", *shape, chunk)
    assert forms == {"fused"}
    forms, expected = resumed(name, "chunked", *shape, chunk)
    assert "fused" not in forms
    for a, b in zip(found, expected, strict=True):
        assert a.numel() == 0 or relative(a, b) < 1e-10


@pytest.mark.parametrize("name", ["taylor2", "positive", "elu"])
def test_second_derivatives_through_a_state(name) -> None:
    q, k, v = (x.requires_grad_() for x in normal_inputs(1, 1, n=5, d=2, e=2, dtype=torch.float64, std=0.5))

    def cut_in_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = dict(is_causal=True, method=SERVED[name])
        head, state = attention(q[..., :3, :], k[..., :3, :], v[..., :3, :], return_state=True, **options)
        return torch.cat([head, attention(q[..., 3:, :], k[..., 3:, :], v[..., 3:, :], state=state, **options)], -2)

    assert torch.autograd.gradcheck(cut_in_two, (q, k, v))
    assert torch.autograd.gradgradcheck(cut_in_two, (q, k, v))


def test_a_state_that_is_not_used_gets_no_gradient_and_costs_none() -> None:
    q, k, v = (x.requires_grad_() for x in normal_inputs(1, 2, n=40, d=4, e=3, dtype=torch.float64))
    output, _ = attention(q, k, v, is_causal=True, method="taylor", return_state=True)
    found = torch.autograd.grad(output.sum(), (q, k, v))
    expected = torch.autograd.grad(attention(q, k, v, is_causal=True, method="taylor").sum(), (q, k, v))
    assert all(relative(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))
