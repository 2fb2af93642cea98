"""Hybrid against all pairs in float64: near keys by exp, far keys by features, one normalizer.

The oracle takes nothing from the library but random projections and a learned map's parameters. Each of three faulty
oracles, a key counted twice at the border, a window off by one, two normalizers, must differ from the library's result.
"""

import io
import math

import pytest
import torch
from torch import Tensor, nn

from subquad import (
    Decoder,
    Exact,
    Hedgehog,
    Hybrid,
    Linear,
    MultiheadAttention,
    RandomFeatures,
    Separable,
    State,
    Taylor,
    Window,
    attention,
    cost,
    crossover,
    decompositions,
    measure_error,
)
from subquad._calls.call import Call
from subquad._engines import run
from subquad.methods import for_layer, resolve

NAN = float("nan")
LENGTH, HEADS, KEY_HEADS, WIDTH = 41, 4, 2, 8
KEEP = torch.tensor([[j not in (0, 1, 9, 10, 30) for j in range(LENGTH)], [j > 8 for j in range(LENGTH)]])
SHIFT = (0.1, 0.5, -0.3, 0.2, 0.1, -0.5, 0.3, 0.2)


def hedgehog() -> Hedgehog:
    made = Hedgehog(WIDTH, HEADS, key_heads=KEY_HEADS).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) / 3)
    return made


FAR = {
    "taylor": Taylor(2),
    "shifted": Taylor(2, key_shift=SHIFT),
    "both sides": Taylor(2, key_shift=SHIFT, query_shift=[0.3 * x + 0.2 for x in SHIFT]),
    "balanced": RandomFeatures(16, key_shift=SHIFT, balance=[1.0 + 0.5 * i for i in range(WIDTH)]),
    "elu": Linear("elu"),
    "positive": RandomFeatures(16),
    "hyperbolic": RandomFeatures(16, "hyperbolic", key_shift=SHIFT),
    "hedgehog": hedgehog(),
}
SIZES = [(1, 0), (7, 0), (7, 3), (16, 4), (40, 0), (50, 2)]
by_far = pytest.mark.parametrize("far", FAR)
by_size = pytest.mark.parametrize(("size", "sinks"), SIZES)
by_padding = pytest.mark.parametrize("keep", [None, KEEP], ids=["open", "padded"])


def draw(dtype: torch.dtype = torch.float64, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, HEADS, length, WIDTH), (2, KEY_HEADS, length, WIDTH), (2, KEY_HEADS, length, 5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def hybrid(far: str, size: int = 7, sinks: int = 0, has_factor: bool = True) -> Hybrid:
    made = Hybrid(Window(size, sinks), FAR[far], heads=HEADS if has_factor else None).double()
    if made.log_factor is not None:
        with torch.no_grad():
            made.log_factor.copy_(torch.tensor([0.5, -1.0, 0.0, 2.0]))
    return made


def features(far: object, x: Tensor, is_query: bool) -> Tensor:
    if isinstance(far, Linear):
        return torch.where(x > 0, x + 1, x.exp())
    if isinstance(far, Hedgehog):
        weight = far.query_weight if is_query else far.key_weight.repeat_interleave(HEADS // KEY_HEADS, 0)
        x = torch.einsum("bhnd,hrd->bhnr", x, weight)
        top = torch.cat([x, -x], -1).exp()
        return top / top.sum(-1, keepdim=True)
    assert isinstance(far, RandomFeatures)
    x_w = x @ far.draw(WIDTH).mT
    x_w = torch.cat([x_w, -x_w], -1) if far.kind == "hyperbolic" else x_w
    return (x_w - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(far.num_features)


def far_weights(far: object, q: Tensor, k: Tensor, scale: float) -> Tensor:
    shift = getattr(far, "key_shift", None)
    center = torch.zeros(WIDTH, dtype=q.dtype) if shift is None else torch.tensor(shift, dtype=q.dtype)
    own = (q @ center * scale).exp()[..., None]  # exp(q.k) = exp(q.(k - c)) exp(q.c)
    if getattr(far, "query_shift", None) is not None:  # exp((q - b).(k - c)) exp(b.(k - c)) exp(q.c)
        b = torch.tensor(far.query_shift, dtype=q.dtype)
        own, q = own * ((k - center) @ b * scale).exp()[..., None, :], q - b
    if getattr(far, "balance", None) is not None:
        factors = torch.tensor(far.balance, dtype=q.dtype)
        q, k, center = q * factors, k / factors, center / factors
    if isinstance(far, Taylor):
        x = q @ (k - center).mT * scale
        return own * sum(x**p / math.factorial(p) for p in range(far.degree + 1))
    root = math.sqrt(scale)
    return own * (features(far, q * root, True) @ features(far, (k - center) * root, False).mT)


def oracle(method: Hybrid, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, fault: str = "") -> Tensor:
    scale, n = 1 / math.sqrt(WIDTH), q.shape[2]
    k, v = (x.repeat_interleave(HEADS // k.shape[1], 1) for x in (k, v))
    i, j, size = torch.arange(n)[:, None], torch.arange(n), method.window.size
    shown = torch.ones(2, n, dtype=torch.bool) if keep is None else keep
    sinks = (shown & (shown.cumsum(1) <= method.window.sinks))[:, None, None]
    near = ((j <= i) & (j > i - size - int(fault == "border"))) | (sinks & (j <= i))
    far = (j <= i - size) & ~sinks
    if fault == "window":
        near, far = near & (j > i - size + 1), far | (j == i - size + 1)
    weights = far_weights(method.far, q, k, scale)
    if method.log_factor is not None:
        weights = weights * method.log_factor.exp()[:, None, None]
    parts = [near * (q @ k.mT * scale).exp(), far * weights]
    parts = [part * shown[:, None, None] for part in parts]
    if fault == "normalizer":
        return sum(part @ v / part.sum(-1, keepdim=True).clamp(min=1e-300) for part in parts) / 2
    total = parts[0] + parts[1]
    z = total.sum(-1, keepdim=True)
    return torch.where(z == 0, 0.0, total @ v / torch.where(z == 0, 1.0, z))


def attend(method: Hybrid, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, **options) -> Tensor:
    return attention(
        q, k, v, is_causal=True, enable_gqa=True, method=method, key_padding_mask=keep, **options
    )  # fmt: skip


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(1.0, largest))


@by_far
@by_size
@by_padding
def test_output_and_gradients_are_those_of_all_pairs(far, size, sinks, keep) -> None:
    method, inputs = hybrid(far, size, sinks), [x.requires_grad_() for x in draw()]
    learned = (*inputs, *method.parameters())
    expected = oracle(method, *inputs, keep)
    upward = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = dict(allow_unused=True, materialize_grads=True)
    gradients = torch.autograd.grad(expected, learned, upward, **options)
    for form in (None, "dense", "chunked"):
        call = Call.of(*inputs, is_causal=True, enable_gqa=True, key_padding_mask=keep)
        output = run(method, call, form, chunk=None if form is None else 4).output
        assert_close(output, expected)
        for own, wanted in zip(torch.autograd.grad(output, learned, upward, **options), gradients, strict=True):
            assert_close(own, wanted)


@pytest.mark.parametrize("fault", ["border", "window", "normalizer"])
@by_far
def test_a_faulty_oracle_differs(far, fault) -> None:
    method, inputs = hybrid(far), draw()
    found, wrong = attend(method, *inputs), oracle(method, *inputs, None, fault)
    assert (found - wrong).abs().max() > 1e-3
    assert_close(found, oracle(method, *inputs, None))


@by_far
@by_size
@by_padding
def test_pieces_give_the_result_of_the_whole(far, size, sinks, keep) -> None:
    method, inputs = hybrid(far, size, sinks), draw()
    whole = attend(method, *inputs, keep)
    for cuts in ([3, 1, 1, 10, 1, 1, 4, 20], [LENGTH], [1] * LENGTH):
        state, outputs = None, []
        for part in torch.arange(LENGTH).split(cuts):
            own = (x[:, :, part] for x in inputs)
            shown = None if keep is None else keep[:, part]
            output, state = attend(method, *own, shown, state=state, return_state=True)
            outputs.append(output)
        assert_close(torch.cat(outputs, 2), whole)
        assert state.length == LENGTH


def test_gradients_pass_through_states() -> None:
    for far in ("taylor", "hedgehog", "positive"):
        method, inputs = hybrid(far), [x.requires_grad_() for x in draw()]
        learned = (*inputs, *method.parameters())
        expected = torch.autograd.grad(attend(method, *inputs).square().sum(), learned)
        state, loss = None, torch.zeros((), dtype=torch.float64)
        for part in torch.arange(LENGTH).split([3, 10, 1, 1, 26]):
            output, state = attend(method, *(x[:, :, part] for x in inputs), state=state, return_state=True)
            loss = loss + output.square().sum()
        for own, wanted in zip(torch.autograd.grad(loss, learned), expected, strict=True):
            assert_close(own, wanted)


@pytest.mark.parametrize("queries", [0, 1, 5, 12])
def test_keys_without_queries_enter_the_state(queries) -> None:
    q, k, v = draw()
    for far in ("taylor", "positive", "hedgehog"):
        method = hybrid(far)
        whole = attend(method, q, k, v)
        _, state = attend(method, q[:, :, :0], k[:, :, :20], v[:, :, :20], return_state=True)
        rows = slice(32 - queries, 32)
        output, state = attend(method, q[:, :, rows], k[:, :, 20:32], v[:, :, 20:32], state=state, return_state=True)
        assert_close(output, whole[:, :, rows])
        assert_close(attend(method, *(x[:, :, 32:] for x in (q, k, v)), state=state), whole[:, :, 32:])


@by_far
@pytest.mark.parametrize(("size", "sinks"), [(1, 0), (7, 0), (7, 3), (50, 0)])
def test_the_decoder_continues_and_its_state_resumes(far, size, sinks) -> None:
    method, inputs = hybrid(far, size, sinks), draw(length=120)
    whole = attend(method, *inputs)
    _, state = attend(method, *(x[:, :, :30] for x in inputs), return_state=True)
    decoder = Decoder(state, enable_gqa=True)
    outputs = [decoder(*(x[:, :, t : t + 1] for x in inputs)) for t in range(30, 110)]
    assert_close(torch.cat(outputs, 2), whole[:, :, 30:110])
    assert_close(attend(method, *(x[:, :, 110:] for x in inputs), state=decoder.state), whole[:, :, 110:])
    again = attend(method, *(x[:, :, 30:40] for x in inputs), state=state)  # The decoder did not change it.
    assert_close(again, whole[:, :, 30:40])


@by_far
def test_the_future_does_not_change_a_bit_of_the_past(far) -> None:
    method = hybrid(far)
    for dtype in (torch.float64, torch.float32):
        inputs = draw(dtype)
        past = attend(method, *inputs)[:, :, :23]
        for edit in (1e3, NAN, float("inf")):
            edited = (x.index_fill(2, torch.arange(23, LENGTH), edit) for x in inputs)
            assert torch.equal(attend(method, *edited)[:, :, :23], past)


@by_far
def test_what_is_not_finite_poisons_the_rows_that_see_it_and_no_gradient(far) -> None:
    method = hybrid(far)
    q, k, v = draw()
    k[0, 1, 20, 3] = NAN  # Key head 1 is that of query heads 2 and 3.
    q[1, 0, 30, 0] = float("inf")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    output = attend(method, *inputs)
    is_nan = output.isnan().all(-1)
    assert torch.equal(is_nan, output.isnan().any(-1))
    expected = torch.zeros_like(is_nan)
    expected[0, 2:, 20:] = expected[1, 0, 30] = True
    assert torch.equal(is_nan, expected)
    gradients = torch.autograd.grad(torch.where(is_nan[..., None], 0.0, output).sum(), inputs)
    assert all(bool(x.isfinite().all()) for x in gradients)


def test_hidden_keys_leave_no_trace_and_a_row_without_keys_is_0() -> None:
    for far in FAR:
        method = hybrid(far)
        q, k, v = draw()
        expected = attend(method, q, k, v, KEEP)
        hidden = ~KEEP[:, None, :, None]
        k, v = (x.masked_fill(hidden, NAN).requires_grad_() for x in (k, v))
        output = attend(method, q, k, v, KEEP)
        assert torch.equal(output, expected) and not output[1, :, :9].any()
        assert not any(x.masked_select(hidden).any() for x in torch.autograd.grad(output.sum(), (k, v)))


@by_far
def test_large_logits_do_not_overflow(far) -> None:
    inputs = [x.float() for x in draw()]
    q, k, v = inputs[0] * 6, inputs[1] * 6, inputs[2]
    output = attend(hybrid(far, has_factor=False), q, k, v)
    expected = oracle(hybrid(far, has_factor=False), q.double(), k.double(), v.double(), None)
    assert_close(output.double(), expected, 1e-3)
    huge = attend(hybrid(far, has_factor=False), q * 1e3, k * 1e3, v)
    assert bool(huge.isfinite().all()) and huge.abs().max() <= v.abs().max() * 1.001


def test_second_derivatives() -> None:
    inputs = [x[:1, :2, :5, :2].detach().requires_grad_() for x in draw()]
    method = Hybrid(Window(2), Taylor(2))
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: attention(q, k, v, is_causal=True, method=method), inputs, fast_mode=True
    )


def test_half_precision_and_autocast_are_computed_wide() -> None:
    method = Hybrid(Window(7), Taylor(2))
    half, wide = draw(torch.bfloat16), [x.float() for x in draw(torch.bfloat16)]
    expected = attend(method, *wide)
    assert torch.equal(attend(method, *half), expected.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(method, *wide), expected.bfloat16())


def test_transforms_agree() -> None:
    method, inputs = hybrid("hedgehog"), draw()
    expected = attend(method, *inputs)
    assert_close(torch.func.vmap(lambda *x: attend(method, *x))(*inputs), expected)
    compiled = torch.compile(lambda *x: attend(method, *x), backend="eager", fullgraph=True)
    assert_close(compiled(*inputs), expected)


def test_exported_programs_agree_with_and_without_our_operators() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.method = hybrid("hedgehog")

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.method, q, k, v)

    model, inputs = Model(), tuple(draw())
    program = torch.export.export(model, inputs)
    assert_close(program.module()(*inputs), model(*inputs))
    assert_close(program.run_decompositions(decompositions()).module()(*inputs), model(*inputs), 1e-9)


def test_calls_that_it_does_not_serve() -> None:
    method, (q, k, v) = Hybrid(Window(7), Taylor(2)), draw()
    options = dict(method=method, enable_gqa=True)
    with pytest.raises(ValueError, match=r"is_causal: far keys of .* expected True"):
        attention(q, k, v, **options)
    with pytest.raises(ValueError, match=r"segment_ids: .* packed sequences"):
        attention(q, k, v, is_causal=True, segment_ids=torch.zeros(2, LENGTH, dtype=torch.long), **options)
    with pytest.raises(ValueError, match=r"query: .* expected 41 queries, one per key, got 5"):
        attention(q[:, :, :5], k, v, is_causal=True, **options)
    _, state = attend(method, q, k, v, return_state=True)
    with pytest.raises(ValueError, match="expected at most 1 queries"):
        attention(q[:, :, :2], k[:, :, :1], v[:, :, :1], is_causal=True, state=state, **options)
    with pytest.raises(ValueError, match="state: expected one made by Hybrid"):
        attend(Hybrid(Window(8), Taylor(2)), q, k, v, state=state)
    with pytest.raises(ValueError, match="factors for 3 query heads, got 4"):
        attend(Hybrid(Window(7), Taylor(2), heads=3).double(), q, k, v)
    with pytest.raises(ValueError, match="merge: expected states of a feature method"):
        State.merge(state, state)


@pytest.mark.parametrize("window", [Window(None), 64, Taylor(2)])
def test_windows_that_it_does_not_take(window) -> None:
    with pytest.raises(ValueError, match="window: expected"):
        Hybrid(window, Taylor(2))


@pytest.mark.parametrize("far", [Exact(), Separable(), Linear("identity"), Window(3), "taylor", Hybrid])
def test_far_methods_that_it_does_not_take(far) -> None:
    with pytest.raises(ValueError, match="far: expected"):
        Hybrid(Window(3), far)


def test_names() -> None:
    assert resolve("window:64+taylor:3") == Hybrid(Window(64), Taylor(3))
    assert hash(resolve("window:64+taylor")) == hash(Hybrid(Window(64), Taylor(2)))
    assert str(resolve("window:9+hedgehog:4")) == "Hybrid(Window(9), Hedgehog(rank=4))"
    for spec, text in {"taylor+taylor": "window: expected", "window:8+exact": "far: expected",
                       "window:8+": "expected one of", "window:8+tailor": "did you mean 'taylor'"}.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"method: .*{text}"):
            resolve(spec)


def test_each_layer_has_its_own_map_and_factor_and_they_are_saved() -> None:
    layers = [MultiheadAttention(16, 4, batch_first=True, method="window:3+hedgehog") for _ in range(2)]
    assert layers[0].method.log_factor is not layers[1].method.log_factor
    assert [name for name in layers[0].state_dict() if name.startswith("method")] == [
        "method.log_factor", "method.far.query_weight", "method.far.key_weight",
    ]  # fmt: skip
    with torch.no_grad():
        layers[0].method.log_factor.add_(1)
        layers[0].method.far.key_weight.mul_(2)
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 9, 16)
    first, second = (layer(x, x, x, is_causal=True, need_weights=False)[0] for layer in layers)
    assert torch.equal(first, second)
    shared = Hybrid(Window(3), Taylor(2))
    assert for_layer(shared, 4, 4) is shared


def test_a_state_is_saved_and_loaded_without_running_code() -> None:
    for far in ("taylor", "hedgehog"):
        _, state = attend(hybrid(far), *draw(), return_state=True)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded.sums, state.sums) and torch.equal(loaded.keys, state.keys)
        assert str(loaded.method) == str(state.method)


def test_a_state_does_not_grow() -> None:
    method = Hybrid(Window(7), Taylor(2))
    sizes = {
        attend(method, *draw(length=length), return_state=True)[1].nbytes for length in (20, 200, 2000)
    }  # fmt: skip
    assert len(sizes) == 1


def test_cost_is_that_of_both_parts() -> None:
    shape = dict(query_length=1000, head_dim=WIDTH, heads=HEADS, key_heads=KEY_HEADS, value_dim=5, batch=2)
    method, window = Hybrid(Window(64), Taylor(2)), Window(64)
    far = cost(Taylor(2), is_causal=True, **shape | dict(query_length=936, value_dim=6))
    near, found = (cost(m, is_causal=True, **shape) for m in (window, method))
    assert found.flops == near.flops + far.flops
    _, state = attend(method, *draw(torch.float32, 1000), return_state=True)
    buffers = state.permit.prepared
    held = sum(x.nbytes for x in (state.sums, state.poison, buffers.keys, buffers.values, buffers.keep))
    assert found.state_bytes == held
    learned = cost("window:64+hedgehog", is_causal=True, **shape)
    assert learned.parameters == (HEADS + KEY_HEADS) * WIDTH**2 + HEADS
    step = cost(method, form="step", **shape | dict(query_length=1, key_length=1000))
    assert step.form == "step" and step.state_bytes == found.state_bytes
    assert crossover("exact", method, head_dim=64, is_causal=True) is not None
    with pytest.raises(ValueError, match="is_causal"):
        cost(method, **shape)


def test_its_error_is_measured_on_all_of_its_pairs() -> None:
    q, k, v = draw(torch.float32, 300)
    options = dict(is_causal=True, enable_gqa=True, rows=300)
    near, both, all_keys = (
        measure_error(q, k, v, method=m, **options).relative
        for m in (Window(30), Hybrid(Window(30), Taylor(2)), Hybrid(Window(299), Taylor(2)))
    )
    assert all_keys < 1e-3 < both < near
