"""Derivatives of derivatives, and torch's function transforms."""

import pytest
import torch

from reference import METHODS
from subquad import Exact, RandomFeatures, Separable, Taylor, Window, attention
from subquad._calls.call import Call
from subquad._engines import run
from subquad.methods import label_of

pytestmark = pytest.mark.filterwarnings("ignore:.*weights can be negative")

NAMES = [name for name in METHODS if name != "user"]
KEEP = torch.tensor([[1, 1, 0, 1, 1, 1, 1]]).bool()
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])


def inputs(n: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, n, 4), (1, 2, n, 4), (1, 2, n, 2)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)


def by(method, form, is_causal, keep=None, segments=None):
    def compute(q, k, v):
        call = Call.of(q, k, v, is_causal=is_causal, key_padding_mask=keep, segment_ids=segments)
        return run(method, call, form, chunk=2).output

    return compute


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("form", ["dense", "chunked"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", ["plain", "padded", "packed"])
def test_first_and_second_derivatives(name, form, is_causal, masked) -> None:
    keep, segments = KEEP if masked == "padded" else None, SEGMENTS if masked == "packed" else None
    compute = by(METHODS[name], form, is_causal, keep, segments)
    q, k, v = inputs()
    assert torch.autograd.gradcheck(compute, (q, k, v), fast_mode=True)
    if name == "taylor0":  # It does not depend on q and k at all, for which torch's second check is not made.
        assert torch.autograd.gradgradcheck(lambda v: compute(q.detach(), k.detach(), v).square(), (v,), fast_mode=True)
    else:
        assert torch.autograd.gradgradcheck(compute, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["dense", "chunked"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_grad_and_vmap(name, form, is_causal) -> None:
    compute = by(METHODS[name], form, is_causal)

    def loss(q, k, v):
        return compute(q, k, v).square().sum()

    q, k, v = inputs()
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v), materialize_grads=True)
    for found, wanted in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    many = [torch.stack([x.detach(), x.detach() * 0.5, -x.detach()]) for x in (q, k, v)]
    one_by_one = torch.stack([compute(*x) for x in zip(*many, strict=True)])
    torch.testing.assert_close(torch.func.vmap(compute)(*many), one_by_one)
    rows = torch.func.vmap(torch.func.grad(loss))(*many)
    torch.testing.assert_close(rows[1], torch.func.grad(loss)(*(x[1] for x in many)))
    shared = torch.func.vmap(compute, in_dims=(0, None, None))(many[0], k, v)  # One set of keys for all.
    torch.testing.assert_close(shared[1], compute(many[0][1], k, v))


def test_tables_made_inside_a_transform_serve_outside_it() -> None:
    """A random matrix that is first drawn inside vmap(grad) must not belong to it."""
    method = RandomFeatures(6, seed=12345)
    q, k, v = (x.detach() for x in inputs())
    torch.func.vmap(torch.func.grad(lambda q: attention(q, k[0], v[0], method=method).sum()))(q)
    assert attention(q, k, v, method=method).isfinite().all()
    method = Taylor(4)
    torch.func.grad(lambda q: attention(q, k, v, method=method, return_state=True)[0].sum())(q)
    assert attention(q, k, v, method=method, return_state=True)[0].isfinite().all()


def test_a_state_passes_through_a_transform() -> None:
    q, k, v = (x.detach() for x in inputs())
    _, state = torch.func.vmap(lambda q, k, v: attention(q, k, v, method="taylor", return_state=True))(q, k, v)
    _, expected = attention(q, k, v, method="taylor", return_state=True)
    torch.testing.assert_close(state.sums, expected.sums)


FITTED = [
    Taylor(2, key_shift=[[0.5, -0.25, 0.1, 0.0], [0.1, 0.2, 0.3, -0.4]], query_shift=[0.2, 0.1, -0.4, 0.3]),
    RandomFeatures(8, scale=-0.05, key_shift=[0.5, -0.25, 0.1, 0.0], balance=[0.5, 2.0, 1.0, 3.0]),
]


@pytest.mark.parametrize(
    "method", [Taylor(2), RandomFeatures(8), Separable(), Window(5, sinks=2), Exact(), *FITTED], ids=label_of
)
def test_compiles_as_one_graph(method) -> None:
    q, k, v = (x.detach().requires_grad_() for x in inputs(70))
    torch.compiler.reset()

    def compute(q, k, v):
        head, state = attention(q, k, v, is_causal=True, method=method, return_state=True)
        return head, attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], is_causal=True, method=method, state=state)

    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    compiled(*(x.detach() for x in inputs(90)))  # Another length, after which the length is a symbol.
    found, wanted = compiled(q, k, v), compute(q, k, v)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    gradients = [torch.autograd.grad(pair[0].sum() + pair[1].sum(), (q, k, v)) for pair in (found, wanted)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_on_the_dense_form(name) -> None:
    q, k, v = (x.detach() for x in inputs())
    compute = by(METHODS[name], "dense", True, KEEP, SEGMENTS)
    moves = tuple(torch.ones_like(x) for x in (q, k, v))
    _, found = torch.func.jvp(compute, (q, k, v), moves)
    step = 1e-6
    ahead = compute(*(x + step * move for x, move in zip((q, k, v), moves, strict=True)))
    behind = compute(*(x - step * move for x, move in zip((q, k, v), moves, strict=True)))
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)
