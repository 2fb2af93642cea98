"""fit: coordinates that leave softmax as it is, and their search on a sample.

Axes: b batch, h heads, n queries, m keys, d width.
"""

import io
import math
from dataclasses import astuple, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calls import normal, normal_inputs
from subquad import (
    Auto,
    Decoder,
    Hybrid,
    Linear,
    MultiheadAttention,
    RandomFeatures,
    Taylor,
    Window,
    attention,
    fit,
    fit_attention,
    measure_error,
    normalizer,
    plan,
    replace_attention,
)
from subquad._calls.call import Call
from subquad._engines import run
from subquad._engines.features.alignment import aligned
from subquad._engines.features.kernel import root_scales
from subquad.planning.asker import Asker
from subquad.planning.auto import _shape, _with_fitted
from subquad.planning.coordinates import Moments
from subquad.planning.rows import sampled_call

HEADS = torch.tensor([[0.5, -0.25, 0.1, 0.3], [1.0, 2.0, -1.0, 0.0]])
VECTORS = ("key_shift", "query_shift", "balance")
BOTH = Taylor(2, key_shift=HEADS, query_shift=-HEADS)
BALANCED = RandomFeatures(16, key_shift=HEADS, balance=HEADS.abs() + 0.5)


def offset_inputs(*batch: int, n: int = 512, d: int = 16) -> list[Tensor]:
    """Queries and keys with means far from 0 that differ from head to head, and widths of different size."""
    q, k, v = normal_inputs(*batch, n=n, d=d, std=0.5)
    place = torch.linspace(0, 1, batch[-1])[:, None, None]
    spread = torch.linspace(0.4, 2.5, d)
    return [q * spread + place, k / spread - 2 * place + 0.5, v]


@pytest.mark.parametrize("method", [BOTH, BALANCED], ids=["taylor", "features"])
def test_the_coordinates_leave_softmax_as_it_is(method) -> None:
    """A series of a high degree, or very many features, is exact attention in any coordinates."""
    q, k, v = normal_inputs(1, 2, n=9, std=0.5, dtype=torch.float64)
    many = replace(method, degree=40) if isinstance(method, Taylor) else replace(method, num_features=1 << 16)
    found = attention(q, k, v, is_causal=True, method=many)
    tolerance = 1e-9 if isinstance(method, Taylor) else 0.1
    torch.testing.assert_close(found, attention(q, k, v, is_causal=True), rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", [BOTH, BALANCED], ids=["taylor", "features"])
@pytest.mark.parametrize("form", ["dense", "linear", "chunked", "step", "fused"])
def test_each_head_has_its_own_coordinates_in_every_form(method, form) -> None:
    q, k, v = normal_inputs(2, 4, n=10)
    k, v = k[:, ::2], v[:, ::2]  # Two query heads share a key head.
    is_causal = form in ("chunked", "step")
    found = _in_form(method, form, q, k, v, is_causal)
    for head in range(4):
        vectors = {name: getattr(method, name) for name in VECTORS}
        own = replace(method, **{name: x[head // 2] for name, x in vectors.items() if x is not None})
        alone = _in_form(own, form, q[:, head : head + 1], k[:, head // 2, None], v[:, head // 2, None], is_causal)
        torch.testing.assert_close(found[:, head : head + 1], alone, rtol=1e-5, atol=1e-6)


def _in_form(method, form: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    if form != "step":
        return run(method, Call.of(q, k, v, is_causal=is_causal, enable_gqa=True), form).output
    state, outputs = None, []
    for token in zip(q.split(1, -2), k.split(1, -2), v.split(1, -2), strict=True):
        output, state = attention(
            *token, is_causal=True, enable_gqa=True, method=method, state=state, return_state=True
        )
        outputs.append(output)
    return torch.cat(outputs, -2)


@pytest.mark.parametrize("method", [BOTH, BALANCED], ids=["taylor", "features"])
@pytest.mark.parametrize("form", ["dense", "chunked", "fused"])
def test_gradients_pass_through_the_weight_of_a_key(method, form) -> None:
    inputs = [x.requires_grad_() for x in normal_inputs(1, 2, n=5, dtype=torch.float64)]
    keep = torch.tensor([[True, True, False, True, True]])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(method, Call.of(q, k, v, is_causal=True, key_padding_mask=keep), form).output

    torch.autograd.gradcheck(function, inputs)
    torch.autograd.gradgradcheck(function, inputs, atol=1e-4)


@pytest.mark.parametrize(("n", "d"), [(70, 32), (200, 32), (200, 4)])
@pytest.mark.parametrize(("std", "dtype"), [(0.5, torch.float32), (4.0, torch.float32), (40.0, torch.float64)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernels_are_the_formula_with_small_and_large_log_scales(n, d, std, dtype, is_causal) -> None:
    """Short calls meet pair by pair, in blocks of 64, longer ones by sums; a key may weigh exp(100) times another."""
    q, k, v = normal_inputs(1, 2, n=n, d=d, e=5, dtype=dtype)
    method = Taylor(2, query_shift=normal(d, seed=7, std=std))
    keep = torch.rand(1, n, generator=torch.Generator().manual_seed(0)) > 0.3
    x = [a.requires_grad_() for a in (q, k, v)]
    results = []
    for form in ("dense", "fused"):
        call = Call.of(*x, is_causal=is_causal, key_padding_mask=keep)
        output = run(method, call, form).output
        results.append([output, *torch.autograd.grad(output.square().sum(), x)])
    for expected, found in zip(*results, strict=True):
        tolerance = 2e-4 if dtype == torch.float32 else 1e-9
        torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=tolerance)


def test_a_large_query_shift_neither_overflows_nor_leaks() -> None:
    q, k, v = normal_inputs(1, 2, n=300)
    method = Taylor(2, query_shift=[200.0, -300.0, 100.0, 50.0])  # log-scales of several hundred
    found = attention(q, k, v, is_causal=True, method=method)
    assert found.isfinite().all()
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, 150:] = 1e3 * x[:, :, 150:].flip(-1)
    again = attention(*changed, is_causal=True, method=method)
    assert torch.equal(found[:, :, :150], again[:, :, :150])


@pytest.mark.parametrize("method", [BOTH, BALANCED], ids=["taylor", "features"])
def test_a_decoder_continues_in_the_same_coordinates(method) -> None:
    inputs = normal_inputs(2, 2, n=12, e=4)
    whole = attention(*inputs, is_causal=True, method=method)
    first, rest = ([x[:, :, part] for x in inputs] for part in (slice(0, 5), slice(5, None)))
    _, state = attention(*first, is_causal=True, method=method, return_state=True)
    assert state.method == method
    decoder = Decoder(state)
    steps = [decoder(*token) for token in zip(*(x.split(1, -2) for x in rest), strict=True)]
    torch.testing.assert_close(torch.cat(steps, -2), whole[:, :, 5:], rtol=1e-4, atol=1e-5)
    other = replace(method, key_shift=None)
    with pytest.raises(ValueError, match="state: expected one made by"):
        attention(*[x[:, :, :1] for x in rest], is_causal=True, method=other, state=state)


def test_messages_and_modules_do_not_print_fitted_numbers() -> None:
    q, k, v = normal_inputs(2, 2, n=4)
    _, state = attention(q, k, v, is_causal=True, method=Taylor(2, key_shift=[1.0] * 4), return_state=True)
    with pytest.raises(ValueError, match=r"by Taylor\(2\), keys centered, got .* the same with another key_shift$"):
        attention(q, k, v, is_causal=True, method=Taylor(2, key_shift=[2.0] * 4), state=state)
    layer = MultiheadAttention(8, 2, method=Taylor(2, key_shift=[1.0] * 4))
    assert layer.extra_repr().endswith("method=Taylor(2), keys centered")


def test_balancing_cannot_change_a_series_of_the_logits() -> None:
    """Why Taylor has no `balance`."""
    q, k, v = normal_inputs(1, 2, n=20, dtype=torch.float64)
    factors = torch.tensor([4.0, 0.5, 1.0, 2.0])
    torch.testing.assert_close(
        attention(q * factors, k / factors, v, method=Taylor(2)), attention(q, k, v, method=Taylor(2))
    )


def test_the_normalizer_of_a_centered_series_is_positive() -> None:
    q, k, _ = normal_inputs(1, 2, n=20)
    assert (normalizer(q, k, method=BOTH) > 0).all()


@pytest.mark.parametrize(
    ("method", "factor"),
    [(Taylor(2), 0.2), (RandomFeatures(128), 0.75), (RandomFeatures(128, "hyperbolic"), 0.75)],
    ids=["taylor", "positive", "hyperbolic"],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_fit_lowers_the_error_on_other_inputs(method, factor, is_causal) -> None:
    both = offset_inputs(2, 3, n=400)
    (q, k, v), other = ([x[part] for x in both] for part in (slice(0, 1), slice(1, 2)))
    found = fit(method, q, k, v, is_causal=is_causal)
    before, after = (measure_error(*other, is_causal=is_causal, method=m).relative for m in (method, found.method))
    assert after < factor * before
    assert found.after.relative < factor * found.before.relative
    assert len(found.heads) == 3
    assert hash(found.method) != hash(method)


def test_a_fit_keeps_what_cannot_be_improved() -> None:
    q, k, v = normal_inputs(1, 2, n=400, d=16, std=0.3)
    found = fit(Taylor(2), q, k, v)
    assert found.after.relative <= found.before.relative * 1.02


def test_the_rows_of_the_report_are_not_those_of_the_fit(monkeypatch) -> None:
    """Rows are drawn once and split into three parts without a common one."""
    seen = []
    from subquad.planning import fit as module

    class Rows(module.Rows):
        def __init__(self, call: Call, rows: Tensor) -> None:
            seen.append(set(rows.tolist()))
            super().__init__(call, rows)

    def moments(call: Call, rows: Tensor, *rest: Tensor) -> object:
        seen.append(set(rows.tolist()))
        return original(call, rows, *rest)

    original = module.Moments.of
    monkeypatch.setattr(module, "Rows", Rows)
    monkeypatch.setattr(module.Moments, "of", moments)
    fit(Taylor(2), *offset_inputs(1, 2, n=100), rows=80)
    own, chosen, held = seen
    assert len(own | chosen | held) == len(own) + len(chosen) + len(held) == 80


def test_masks_hide_keys_from_the_fit() -> None:
    q, k, v = offset_inputs(1, 2, n=200)
    keep = torch.arange(200) < 150
    plain = fit(Taylor(2), q, k, v, key_padding_mask=keep[None])
    k[:, :, 150:] = 1e4
    assert fit(Taylor(2), q, k, v, key_padding_mask=keep[None]).method == plain.method


@pytest.mark.parametrize("mask", ["key_padding_mask", "attn_mask"])
@pytest.mark.parametrize("method", [Taylor(2), RandomFeatures(16)], ids=["taylor", "features"])
def test_padding_does_not_count(method, mask) -> None:
    """Neither its queries nor its keys and values, whatever they are, and whichever mask says that they are padding."""
    inputs = offset_inputs(2, 2, n=200)
    keep = torch.arange(200) < torch.tensor([[150], [60]])
    masks = {mask: keep if mask == "key_padding_mask" else keep[:, None, None]}
    plain = fit(method, *inputs, **masks)
    assert plain.method.is_aligned
    for number in (50.0, math.nan):
        again = fit(method, *(torch.where(keep[:, None, :, None], x, number) for x in inputs), **masks)
        assert again == plain


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_longer_batch_with_the_same_texts_has_the_same_fit(side) -> None:
    """Rows are drawn among those that are not padding: with few of them, the fit would see next to nothing."""
    inputs, pad = offset_inputs(2, 2, n=100), (0, 0, 900, 0) if side == "left" else (0, 0, 0, 900)
    keep = F.pad(torch.ones(2, 100, dtype=torch.bool), pad[2:])
    found = fit(Taylor(2), *(F.pad(x, pad) for x in inputs), is_causal=True, key_padding_mask=keep, rows=80)
    alone = fit(Taylor(2), *inputs, is_causal=True, rows=80)
    assert found.method == alone.method
    torch.testing.assert_close(found.heads, alone.heads)


def test_rows_that_see_no_key_do_not_count() -> None:
    q, k, v = offset_inputs(2, 2, n=40)
    call = sampled_call(q, k[:, :, :30], v[:, :, :30], key_padding_mask=torch.tensor([[True], [False]]).expand(2, 30))
    alone = sampled_call(q[:1], k[:1, :, :30], v[:1, :, :30])
    rows = torch.arange(40)
    torch.testing.assert_close(Moments.by_attention(call, rows).key, Moments.by_attention(alone, rows).key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_moments_of_half_precision_are_those_of_its_numbers(dtype) -> None:
    """Squares of 300 overflow float16."""
    q, k, v = (x.to(dtype) for x in offset_inputs(1, 2, n=100))
    for is_by_attention in (False, True):
        pair = []
        for x in (k + 300, (k + 300).float()):
            call, rows = sampled_call(q.to(x.dtype), x, v.to(x.dtype)), torch.arange(100)
            pair.append(Moments.by_attention(call, rows) if is_by_attention else Moments.of(call, rows))
        for found, expected in zip(astuple(pair[0]), astuple(pair[1]), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("method", [Taylor(2), RandomFeatures(16)], ids=["taylor", "features"])
def test_inputs_that_do_not_vary_have_a_fit(method) -> None:
    """Their variances are rounding errors, whose ratio says nothing."""
    q, k, v = (x[:, :, :1].expand(-1, -1, 64, -1) for x in offset_inputs(1, 2))
    rows = torch.arange(64)
    balance = Moments.of(sampled_call(q, k, v), rows).balance()
    torch.testing.assert_close(balance, (k / q)[0, :, 0].abs().double().sqrt(), rtol=1e-4, atol=0)
    assert Moments.of(sampled_call(q * 0, k * 0, v), rows).balance().eq(1).all()
    found = fit(method, q, k, v)
    assert math.isfinite(found.after.relative) and found.after.relative <= found.before.relative


def test_no_head_loses_by_what_helps_another() -> None:
    """One scale serves all heads, and the least variance of weights is not the least error of outputs."""
    both = [x.clone() for x in normal_inputs(2, 3, n=300, d=16)]
    for x in both[:2]:
        x *= torch.tensor([0.3, 1.0, 1.0])[:, None, None]
    sample, other = ([x[part] for x in both] for part in (slice(0, 1), slice(1, 2)))
    found, exact = fit(RandomFeatures(64), *sample).method, attention(*other)

    def errors(method: RandomFeatures) -> Tensor:
        draws = [attention(*other, method=method.redraw(seed)) - exact for seed in range(20, 28)]
        return torch.stack(draws).square().mean((0, 1, 3, 4)).sqrt()

    assert (errors(found) <= 1.02 * errors(RandomFeatures(64))).all()


def test_a_head_without_error_does_not_decide_about_the_scale() -> None:
    """The outputs of a head whose values are 0 are right with any scale."""
    q, k, v = normal_inputs(2, 3, n=300, d=16, std=0.5)
    assert fit(RandomFeatures(64), q, k, v).method.scale < 0
    v = v.clone()
    v[:, 1] = 0
    assert fit(RandomFeatures(64), q, k, v).method.scale < 0


def test_a_fit_of_grouped_heads_has_one_vector_for_each_key_head() -> None:
    q, k, v = offset_inputs(1, 4)
    found = fit("taylor", q, k[:, ::2], v[:, ::2], is_causal=True, enable_gqa=True)
    assert len(found.method.query_shift) == len(found.heads) == 2
    assert repr(found).startswith("Fit(Taylor(2), both sides centered, relative error on held-out rows ")


@pytest.mark.parametrize("method", ["taylor", RandomFeatures(32)], ids=["taylor", "features"])
def test_a_fit_to_masks_of_query_heads_has_one_vector_for_each_key_head(method) -> None:
    q, k, v = offset_inputs(2, 4, n=64)
    masks, grouped = torch.rand(2, 4, 1, 64, generator=torch.Generator().manual_seed(0)) < 0.7, dict(enable_gqa=True)
    found = fit(method, q, k[:, ::2], v[:, ::2], attn_mask=masks, **grouped)
    assert len(found.method.key_shift) == len(found.heads) == 2
    output = attention(q, k[:, ::2], v[:, ::2], attn_mask=masks, method=found.method, **grouped)
    twice = {name: [x[0]] * 2 + [x[1]] * 2 for name in VECTORS if (x := getattr(found.method, name)) is not None}
    copied = (x[:, ::2].repeat_interleave(2, 1) for x in (k, v))
    torch.testing.assert_close(output, attention(q, *copied, attn_mask=masks, method=replace(found.method, **twice)))


def test_a_fitted_far_part_takes_masks_of_query_heads() -> None:
    q, k, v = offset_inputs(1, 4, n=64)
    masks = torch.rand(1, 4, 1, 64, generator=torch.Generator().manual_seed(0)) < 0.7
    vectors = torch.randn(2, 16, generator=torch.Generator().manual_seed(1)) / 4
    method, same = (Hybrid(Window(8), Taylor(2, key_shift=x)) for x in (vectors, vectors.repeat_interleave(2, 0)))
    options = dict(attn_mask=masks, is_causal=True)
    output = attention(q, k[:, ::2], v[:, ::2], enable_gqa=True, method=method, **options)
    copied = (x[:, ::2].repeat_interleave(2, 1) for x in (k, v))
    torch.testing.assert_close(output, attention(q, *copied, method=same, **options))


def test_fit_says_what_it_cannot_do() -> None:
    q, k, v = normal_inputs(1, 2, n=20)
    with pytest.raises(ValueError, match="method: expected Taylor or RandomFeatures, which have something to fit"):
        fit(Linear("elu"), q, k, v)
    with pytest.raises(ValueError, match="query: expected at least 8 rows that see a key, to fit a method, got 4"):
        fit("taylor", q[:, :, :4], k, v)
    with pytest.raises(ValueError, match="query: expected at least 8 rows that see a key, to fit a method, got 5"):
        fit("taylor", q, k, v, key_padding_mask=torch.arange(20)[None] < 5)
    with pytest.raises(ValueError, match="query: expected at least 8 rows that see a key, to fit a method, got 0"):
        fit("taylor", q[:0], k[:0], v[:0])
    with pytest.raises(ValueError, match="query: expected at least 8 rows that see a key, to fit a method, got 0"):
        fit("taylor", q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(ValueError, match="key: expected finite numbers"):
        fit("taylor", q, k * math.nan, v)
    with pytest.raises(ValueError, match=r"key_shift: .*, got a tensor of shape \(1, 2, 4\), numbers from 0 to 0$"):
        Taylor(2, key_shift=torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"key_shift: .*, got rows of lengths \[2, 1\]$"):
        Taylor(2, key_shift=((1.0, 2.0), (1.0,)))
    with pytest.raises(ValueError, match="balance: expected finite positive numbers"):
        RandomFeatures(8, balance=[1.0, 0.0])
    with pytest.raises(ValueError, match=r"query_shift: expected shape \(4,\) or \(2, 4\), got \(3,\)"):
        attention(q, k, v, method=Taylor(2, query_shift=[1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match=r"key_shift: expected shape \(4,\) or \(2, 4\), got \(3, 4\)"):
        fit(Taylor(2, key_shift=torch.ones(3, 4)), q, k, v)


def test_plan_takes_fitted_candidates() -> None:
    q, k, v = offset_inputs(1, 2)
    found = plan(sample=(q, k, v), query_length=200_000, is_causal=True)
    assert any(getattr(c.method, "query_shift", None) for c in found.candidates)
    assert any(getattr(c.method, "balance", None) for c in found.candidates)


def test_auto_fits_nothing_to_a_causal_call() -> None:
    q, k, v = offset_inputs(1, 2)
    methods = [Taylor(2), RandomFeatures(64)]
    assert _with_fitted(methods, sampled_call(q, k, v, is_causal=True)) == methods
    fitted = _with_fitted(methods, sampled_call(q, k, v))
    assert [m.is_aligned for m in fitted] == [True, False, True, False]
    assert fitted[0].query_shift is not None and fitted[2].scale < 0
    chosen = Auto(0.05).choose(*(x.repeat(1, 1, 8, 1) for x in (q, k, v)), is_causal=True).method
    assert not getattr(chosen, "is_aligned", False)


@pytest.mark.parametrize("scale", [0.25, -0.25])
def test_auto_predicts_the_norms_of_fitted_features(scale) -> None:
    """Means that fitted coordinates cancel do not count; those that plain ones add up do."""
    q, k, v = offset_inputs(1, 1, n=200)
    call = sampled_call(q + 1, k, v, scale=scale, key_padding_mask=torch.arange(200)[None] < 150)
    asker = Asker(call, _shape(call, False), 0.1, *[None] * 3, risk=None, budget=0.0)
    for method in _with_fitted([RandomFeatures(64, "hyperbolic")], call):
        queries, keys = (x * root for x, root in zip(aligned(method, call), root_scales(scale), strict=True))
        pairs = (queries[:, 0, :, None] + keys[:, None, :150]).square().sum(-1)
        assert asker._squared_norm(method) == pytest.approx(float(pairs.median()), rel=0.1)


@pytest.mark.parametrize("method", [Taylor(2), RandomFeatures(32)], ids=["taylor", "features"])
def test_a_module_keeps_its_fit_in_the_state_dict(method) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True), 2).eval()
    for layer in model.layers:
        nn.init.normal_(layer.self_attn.in_proj_bias, std=2.0)
    x = torch.randn(4, 60, 16)
    exact = model(x)
    replace_attention(model, method)
    plain = model(x)
    fits = fit_attention(model, x)
    assert [*fits] == ["layers.0.self_attn", "layers.1.self_attn"]
    fitted = model(x)
    assert (fitted - exact).norm() < (plain - exact).norm()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for layer in model.layers:
        layer.self_attn = MultiheadAttention.from_module(layer.self_attn, 0.0, method)
    torch.testing.assert_close(model(x), plain)
    model.load_state_dict(torch.load(file))
    assert torch.equal(model(x), fitted)
    assert model.layers[0].self_attn.method == fits["layers.0.self_attn"].method
    model.layers[0].self_attn.load_state_dict(nn.MultiheadAttention(16, 2).state_dict())  # torch's has no fit


def test_a_module_loads_an_earlier_fit_with_other_fields() -> None:
    """What the earlier fit did not have does not stay."""
    plain, early = RandomFeatures(16), RandomFeatures(16, key_shift=[0.5, 0.25, 0.0, 1.0])
    late = replace(early, balance=[2.0, 1.0, 1.0, 1.0], scale=-0.1)
    saved = MultiheadAttention(8, 2, method=early).state_dict()
    for own in (plain, late):
        layer = MultiheadAttention(8, 2, method=own)
        layer.load_state_dict(saved)
        assert layer.method == early and layer.balance is layer.feature_scale is None


class Stack(nn.Module):
    """Two layers, one by each fitted method."""

    def __init__(self) -> None:
        super().__init__()
        methods = (BOTH, replace(BALANCED, scale=-0.1))
        self.layers = nn.ModuleList(MultiheadAttention(8, 2, batch_first=True, method=method) for method in methods)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False, is_causal=True)[0]
        return x


def test_fitted_modules_compile_as_one_graph_and_are_exported() -> None:
    model, (short, x) = Stack(), (torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (70, 90))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(short)
    file = io.BytesIO()
    length = torch.export.Dim("length", max=4096)
    torch.export.save(torch.export.export(model, (short,), dynamic_shapes=({1: length},)), file)
    file.seek(0)
    expected = model(x)
    for other in (compiled, torch.export.load(file).module()):
        torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(each(x).square().sum(), model.parameters()) for each in (compiled, model)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_a_module_keeps_all_digits_of_its_method_when_it_loads() -> None:
    method = RandomFeatures(16, scale=-0.123456789, key_shift=[0.123456789] * 4)
    layer = MultiheadAttention(8, 2, method=method)
    layer.load_state_dict(layer.state_dict())
    assert layer.method == method


class Scaled(nn.Module):
    """A learned map whose parameters have names of fields that `fit` sets in other methods."""

    positive = True

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.balance = nn.Parameter(torch.ones(4)), 2.0

    def size(self, width: int) -> int:
        return width

    def forward(self, x: Tensor, *, is_query: bool) -> Tensor:
        return (x * self.scale).exp()


def test_a_map_may_have_attributes_named_like_fitted_ones() -> None:
    layer = MultiheadAttention(8, 2, method=Scaled())
    assert layer.feature_scale is layer.balance is None
    with torch.no_grad():
        layer.method.scale *= 2
    other = MultiheadAttention(8, 2, method=Scaled())
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.method.scale, layer.method.scale)


def test_fit_attention_needs_something_to_fit() -> None:
    with pytest.raises(ValueError, match=r"model: expected a subquad\.MultiheadAttention whose method is"):
        fit_attention(MultiheadAttention(8, 2), torch.ones(1, 9, 8))
