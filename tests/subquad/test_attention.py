"""The one function: precision, refusals, and properties over drawn shapes."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import subquad
from reference import METHODS, reference
from subquad import Exact, Linear, RandomFeatures, Separable, Taylor, attention, native, normalizer
from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._engines import run
from subquad._engines.features.choose_form import choose_form, is_fusable
from subquad.planning.feature_cost import form_of
from subquad.planning.shape import Shape

pytestmark = pytest.mark.filterwarnings("ignore:.*weights can be negative")


def draw(*shapes, seed=0, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@settings(max_examples=150)
@given(
    name=st.sampled_from([*METHODS]),
    batch=st.lists(st.integers(0, 2), max_size=2),
    heads=st.integers(1, 2),
    group=st.integers(1, 2),
    n=st.integers(0, 9),
    m=st.integers(0, 9),
    e=st.integers(0, 3),
    is_causal=st.booleans(),
    hidden=st.integers(0, 2**9 - 1),
    chunk=st.integers(1, 5),
    form=st.sampled_from(["dense", "chunked", "fused", None]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_drawn_shapes_mean_the_same(name, batch, heads, group, n, m, e, is_causal, hidden, chunk, form, dtype) -> None:
    shapes = (*batch, heads * group, n, 4), (*batch, heads, m, 4), (*batch, heads, m, e)
    q, k, v = draw(*shapes, dtype=dtype)
    keep = torch.tensor([hidden >> j & 1 == 0 for j in range(m)], dtype=torch.bool).expand(*batch, m)
    call = Call.of(q, k, v, is_causal=is_causal, enable_gqa=True, key_padding_mask=keep)
    output = run(METHODS[name], call, form, None if form is None else chunk).output
    assert output.shape == (*batch, heads * group, n, e)
    assert output.dtype == dtype
    if output.numel():
        wide = (q, k.repeat_interleave(group, -3), v.repeat_interleave(group, -3))
        flat = [x.reshape(math.prod(batch), *x.shape[-3:]) for x in wide]
        expected = reference(METHODS[name], *flat, is_causal, keep.reshape(math.prod(batch), m)).detach()
        # Where the weights have both signs their sum can come close to 0, and then rounding is large too.
        positive = METHODS[name].positive or METHODS[name] == Linear("identity")
        if positive or normalizer(q.double(), k.double(), is_causal=is_causal, enable_gqa=True, method=METHODS[name],
                                  key_padding_mask=keep).abs().min() > 0.1:  # fmt: skip
            limit = 1e-9 if dtype == torch.float64 else 3e-4
            torch.testing.assert_close(
                output.detach().reshape(expected.shape).double(), expected, rtol=limit, atol=limit
            )


@settings(max_examples=40)
@given(name=st.sampled_from([*METHODS]), seed=st.integers(0, 1000))
def test_the_order_of_keys_means_nothing_without_causality(name, seed) -> None:
    q, k, v = draw((1, 2, 5, 4), (1, 2, 11, 4), (1, 2, 11, 3), seed=seed, dtype=torch.float64)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    a = attention(q, k, v, method=METHODS[name])
    b = attention(q, k[:, :, order], v[:, :, order], method=METHODS[name])
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["taylor2", "positive", "hyperbolic", "elu", "identity", "separable", "shifted"])
def test_half_precision_is_only_a_rounding_of_the_output(dtype, name) -> None:
    q, k, v = draw((2, 2, 150, 4), (2, 2, 150, 4), (2, 2, 150, 3), dtype=dtype)
    output = attention(q, k, v, is_causal=True, method=METHODS[name])
    _, state = attention(q, k, v, is_causal=True, method=METHODS[name], return_state=True)
    wide = attention(q.float(), k.float(), v.float(), is_causal=True, method=METHODS[name])
    assert output.dtype == dtype
    assert torch.equal(output, wide.to(dtype))
    assert state.sums.dtype == torch.float32
    assert attention(*(x.double() for x in (q, k, v)), method=METHODS[name]).dtype == torch.float64


@pytest.mark.parametrize("name", ["taylor2", "positive", "elu", "separable"])
def test_autocast_chooses_the_dtype_of_the_output_and_nothing_else(name) -> None:
    q, k, v = draw((1, 2, 150, 4), (1, 2, 150, 4), (1, 2, 150, 3))
    for x in (q, k, v):
        x.requires_grad_()
    plain = attention(q, k, v, is_causal=True, method=METHODS[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention(q, k, v, is_causal=True, method=METHODS[name])
        assert output.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert torch.equal(output, plain.bfloat16())
        found = torch.autograd.grad(output, q, torch.ones_like(output))[0]
    wanted = torch.autograd.grad(plain, q, torch.ones_like(plain))[0]
    assert torch.equal(found, wanted)


def test_exact_is_torch_with_dropout_and_any_mask() -> None:
    q, k, v = draw((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 5))
    bias = torch.randn(6, 9)
    for arguments in ({}, {"is_causal": True}, {"attn_mask": bias}, {"attn_mask": bias > 0}, {"scale": 0.2}):
        expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **arguments)
        assert torch.equal(attention(q, k, v, enable_gqa=True, **arguments), expected)
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)
    torch.manual_seed(0)
    assert torch.equal(attention(q, k, v, dropout_p=0.5, enable_gqa=True), expected)


def test_exact_with_masks_of_ours() -> None:
    q, k, v = draw((2, 4, 600, 8), (2, 2, 600, 8), (2, 2, 600, 5), dtype=torch.float64)
    keep = torch.rand(2, 600, generator=torch.Generator().manual_seed(0)) > 0.3
    bias = draw((600, 600), dtype=torch.float64)[0]
    causal = torch.ones(600, 600, dtype=torch.bool).tril()
    seen = keep[:, None, None, :] & causal
    cases = {
        "padding": (dict(key_padding_mask=keep, is_causal=True), seen),
        "bias": (dict(attn_mask=bias, key_padding_mask=keep, is_causal=True), torch.where(seen, bias, -torch.inf)),
        "mask": (dict(attn_mask=bias > 0, is_causal=True), (bias > 0) & causal),
        "row": (dict(attn_mask=keep[0]), keep[:1]),
    }
    for arguments, mask in cases.values():
        for scale in (None, 0.9):
            expected = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
            torch.testing.assert_close(attention(q, k, v, scale=scale, enable_gqa=True, **arguments), expected)
    ids = torch.arange(600).expand(2, -1) // 70
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    expected = F.scaled_dot_product_attention(q, k, v, same, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, enable_gqa=True, segment_ids=ids), expected)


def test_the_normalizer_tells_which_rows_are_no_averages() -> None:
    q, k = draw((1, 1, 400, 8), (1, 1, 400, 8))
    found = normalizer(q * 2, k * 2, method=Taylor(3), scale=1.0)
    x = (q * 2).double() @ (k * 2).double().mT
    wanted = (1 + x + x**2 / 2 + x**3 / 6).sum(-1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1.0)
    assert (found <= 0).any()
    assert (normalizer(q * 2, k * 2, method=Taylor(2), is_causal=True) > 0).all()
    keep = torch.arange(k.shape[-2]) % 3 > 0
    hidden = normalizer(q, k, attn_mask=keep[None], method=Taylor(2))
    assert torch.equal(hidden, normalizer(q, k, key_padding_mask=keep.expand(*k.shape[:-3], -1), method=Taylor(2)))
    assert not torch.allclose(hidden, normalizer(q, k, method=Taylor(2)))
    blind = normalizer(-q.abs(), k, method=Linear("relu"))
    assert not blind.any()
    with pytest.raises(ValueError, match="expected a feature map"):
        normalizer(q, k, method="separable")


def test_the_cheaper_form_is_chosen() -> None:
    def form(method, n, width, is_causal=True, stateful=False, resumed=False):
        layout = Layout((1,), 8, 1, n, n, width, width, torch.device("meta"))
        return choose_form(
            method, layout, is_causal=is_causal, is_fusable=False, is_stateful=stateful, is_resumed=resumed
        )

    assert form(Taylor(2), 256, 64) == "dense"
    assert form(Taylor(2), 65536, 64) == "chunked"
    assert form(Taylor(2), 65536, 64, is_causal=False) == "linear"
    assert form(Taylor(4), 65536, 64) == "dense"  # 814,385 features
    assert form(RandomFeatures(256), 16384, 64) == "chunked"
    assert form(Taylor(2), 1, 64, stateful=True, resumed=True) == "step"
    assert form(Taylor(2), 256, 64, stateful=True) == "chunked"
    assert form(Separable(), 256, 64) == "chunked"


@pytest.mark.skipif(not native.available(), reason="no kernels")
def test_the_kernels_are_for_calls_of_their_kind_on_the_cpu() -> None:
    def taken(method, device="cpu", keys=256, is_causal=True, stateful=False, width=64):
        layout = Layout((1,), 8, 1, 256, keys, width, 64, torch.device(device))
        return is_fusable(method, layout, torch.float32, is_causal=is_causal, is_stateful=stateful)

    for method in (Taylor(2), Separable()):
        assert taken(method) and not taken(method, device="meta") and not taken(method, keys=300)
    assert not taken(Linear("identity"), width=0)
    assert taken(Taylor(2), stateful=True) and not taken(Separable(), stateful=True)
    assert taken(Taylor(2), keys=300, is_causal=False) and not taken(Separable(), is_causal=False)
    shape = Shape(256, 256, 64, 64, is_causal=True)
    assert [form_of(Separable(), shape, torch.device(name)) for name in ("cpu", "cuda")] == ["fused", "chunked"]


Q, K, V = draw((2, 4, 6, 8), (2, 4, 7, 8), (2, 4, 7, 5))
_, STATE = attention(Q, K, V, method="taylor", return_state=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(query=Q.long()), r"query: expected floating point numbers, got torch.int64"),
        (dict(key=K.double()), r"key: expected torch.float32 on cpu, like the query, got torch.float64"),
        (dict(key=K[..., :4]), r"key: expected width 8, like the query, got 4"),
        (dict(value=V[:, :, :5]), r"value: expected length 7, like the key, got 5"),
        (dict(query=Q[0, 0, 0]), r"query: expected shape \(..., heads, length, width\), got \(8,\)"),
        (dict(key=K[:, :3], value=V[:, :3]), r"enable_gqa=True"),
        (dict(key=K[:, :3], value=V[:, :3], enable_gqa=True), r"key: with enable_gqa"),
        (dict(query=Q[:1].expand(3, -1, -1, -1)), r"batch and head dimensions do not match"),
        (dict(attn_mask=torch.ones(6, 7)), r"attn_mask: got torch.float32, a bias"),
        (dict(attn_mask=torch.eye(6, 7).bool()), r"attn_mask: got shape \(6, 7\), a choice for each pair"),
        (dict(attn_mask=torch.ones(4, 7).bool()), r"attn_mask: got shape \(4, 7\), a choice for each pair"),
        (dict(attn_mask=torch.ones(2, 1, 1, 6).bool()), r"attn_mask: expected shape \(..., 1, 7\), got \(2, 1, 1, 6\)"),
        (dict(dropout_p=0.1), r"dropout_p: expected 0, got 0.1"),
        (dict(dropout_p=-0.1), r"dropout_p: expected a number from 0 to 1, got -0\.1"),
        (
            dict(attn_mask=torch.ones(9, 7).bool(), method="exact", is_causal=True),
            r"attn_mask: .*\(..., 6, 7\), got \(9, 7\)",
        ),
        (dict(key_padding_mask=torch.ones(2, 5).bool()), r"key_padding_mask: .*, got \(2, 5\)"),
        (dict(key_padding_mask=torch.ones(2, 7, device="meta").bool()), r"key_padding_mask: .* on cpu, .* on meta"),
        (
            dict(state=STATE, query=Q.double(), key=K.double(), value=V.double()),
            r"state: .* in torch.float64 .* in torch.float32",
        ),
        (dict(key_padding_mask=torch.ones(2, 7)), r"key_padding_mask: expected a boolean tensor, True = attend"),
        (dict(key_padding_mask=torch.ones(2, 6).bool()), r"key_padding_mask: expected shape \(2, 7\) or \(2, 4, 7\)"),
        (dict(segment_ids=torch.zeros(2, 7).long()), r"segment_ids: .* got 6 queries and 7 keys"),
        (dict(key=Q, value=Q, segment_ids=torch.zeros(2, 6)), r"segment_ids: expected integers"),
        (dict(method="performer"), r"method: expected one of 'exact', .*, got 'performer'"),
        (dict(method=Taylor(2, key_shift=[1.0])), r"key_shift: expected shape \(8,\) or \(4, 8\), got \(1,\)"),
        (dict(state=STATE, method="random"), r"state: expected one made by RandomFeatures"),
        (dict(state=STATE[:1]), r"state: expected \(2, 4, 45, 6\) in torch.float32 .* got \(1, 4, 45, 6\)"),
        (dict(state=STATE, key=Q, value=Q[..., :5], segment_ids=torch.zeros(2, 6).long()), r"made without segment_ids"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message) -> None:
    arguments = dict(query=Q, key=K, value=V, method="taylor") | change
    with pytest.raises(ValueError, match=message):
        attention(**arguments)


def test_an_object_that_is_no_method_is_named() -> None:
    with pytest.raises(TypeError, match=r"method: .* got int"):
        attention(Q, K, V, method=3)
    with pytest.raises(TypeError, match=r"method: expected a method such as Taylor\(\), got the class Taylor itself"):
        attention(Q, K, V, method=Taylor)
    with pytest.raises(TypeError, match=r"FeatureMap"):
        attention(Q, K, V, method=torch.nn.Linear(8, 8))


def test_a_state_knows_its_method_and_segments() -> None:
    q, k, v = Q, Q.clone(), Q.clone()
    _, state = attention(q, k, v, method=Exact(), segment_ids=torch.zeros(2, 6).long(), return_state=True)
    with pytest.raises(ValueError, match="made with segment_ids"):
        attention(q, k, v, method=Exact(), state=state)
    with pytest.raises(ValueError, match=r"state: expected one made by Taylor\(4\), got one made by"):
        attention(q, k, v, method=Taylor(4), state=STATE)


def test_public_names_are_few_and_exist() -> None:
    results = {
        "Candidate", "Choice", "Cost", "ErrorEstimate", "Fit", "Plan", "Replacement", "Replacements", "RoutedCalls",
        "Routing",
    }  # fmt: skip  # types, for annotations
    assert results <= set(subquad.__all__)
    assert len(set(subquad.__all__) - results) <= 32
    assert all(getattr(subquad, name).__doc__ for name in subquad.__all__)


def test_a_mask_of_keys_is_remembered_by_every_state() -> None:
    q, k, v = draw((2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 7, 5), dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1]]).bool()
    seen = torch.cat([mask, torch.ones(1, 1).bool()], 1)
    for method in (Exact(), Taylor(2), RandomFeatures(8), Separable()):
        _, state = attention(*(x[:, :, :6] for x in (q, k, v)), mask, method=method, return_state=True)
        last = attention(*(x[:, :, 6:] for x in (q, k, v)), method=method, state=state)
        torch.testing.assert_close(last, attention(q[:, :, 6:], k, v, seen, method=method))


def test_a_state_of_another_matrix_is_refused() -> None:
    one, other = (RandomFeatures(8, matrix=RandomFeatures(8, seed=seed).draw(8)) for seed in (0, 1))
    _, state = attention(Q, K, V, method=one, return_state=True)
    attention(Q, K, V, method=one, state=state)
    with pytest.raises(ValueError, match="same matrix"):
        attention(Q, K, V, method=other, state=state)


def test_a_map_that_divides_by_its_norm_is_not_spoiled_by_padding() -> None:
    class Directions(torch.nn.Module):
        positive = True

        def __init__(self, dtype) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8, bias=False, dtype=dtype)

        def size(self, width: int) -> int:
            return 8

        def forward(self, x, *, is_query):
            y = self.layer(x)
            return (y / y.norm(dim=-1, keepdim=True)).square()

    for dtype in (torch.float32, torch.bfloat16):  # A model may be cast as a whole, its map with it.
        method = Directions(dtype)
        q, k, v = (x.to(dtype) for x in (Q, K, V))
        keep = torch.arange(7).expand(2, -1) != 3
        attention(q, k, v, method=method, key_padding_mask=keep).sum().backward()
        assert method.layer.weight.grad.isfinite().all()
        spoiled = attention(q.index_fill(2, torch.tensor(2), torch.nan), k, v, method=method)
        assert spoiled[:, :, 2].isnan().all()
        assert not spoiled[:, :, 3:].isnan().any()


def test_a_given_matrix_is_a_constant() -> None:
    matrix = RandomFeatures(8).draw(8).float().requires_grad_()
    assert not attention(Q, K, V, method=RandomFeatures(8, matrix=matrix)).requires_grad


def test_the_normalizer_of_half_precision_is_wide() -> None:
    q, k = draw((1, 2, 200, 64), (1, 2, 200, 64), dtype=torch.float16)
    q, k = q * 6, k * 6
    found = normalizer(q, k, method=RandomFeatures(64))
    assert found.dtype == torch.float32
    assert torch.equal(found, normalizer(q.float(), k.float(), method=RandomFeatures(64)))


def test_autocast_leaves_float64_alone_and_takes_mixed_inputs() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(Q.double(), K.double(), V.double(), method="taylor").dtype == torch.float64
        assert attention(Q.bfloat16(), K.bfloat16(), V, method="taylor").dtype == torch.bfloat16


def test_grouped_heads_without_a_batch() -> None:
    keep, ids = torch.arange(6) != 2, torch.arange(6) // 4
    for method in ("exact", "taylor"):
        for masks in (dict(key_padding_mask=keep), dict(segment_ids=ids)):
            wide = attention(Q, Q[:, :2], Q[:, :2], enable_gqa=True, method=method,
                             **{name: mask.expand(2, -1) for name, mask in masks.items()})  # fmt: skip
            bare = attention(Q[0], Q[0, :2], Q[0, :2], enable_gqa=True, method=method, **masks)
            torch.testing.assert_close(bare, wide[0])


def test_no_keys_and_no_widths() -> None:
    q, k, v = (x.clone().requires_grad_() for x in (Q, K[:, :, :0], V[:, :, :0]))
    for name in METHODS:
        if not getattr(METHODS[name], "is_aligned", False):  # Its vectors have another width.
            grads = torch.autograd.grad(attention(q, k, v, method=METHODS[name]).sum(), (q, k, v))
            assert not grads[0].any()
    for method in (Taylor(2), Linear("elu"), Linear("identity"), Separable(), RandomFeatures(8)):
        for is_causal in (False, True):
            assert attention(Q[..., :0], Q[..., :0], Q, is_causal=is_causal, method=method).shape == Q.shape
            assert attention(Q, Q, Q[..., :0], is_causal=is_causal, method=method).shape == (2, 4, 6, 0)
        _, state = attention(Q[:0], K[:0], V[:0], method=method, return_state=True)
        assert attention(Q[:0], K[:0], V[:0], method=method, state=state).shape == (0, 4, 6, 5)


def test_a_shift_for_each_head() -> None:
    shift = torch.arange(16.0).reshape(2, 8) / 16
    method = Taylor(2, key_shift=shift)
    plain = attention(Q, K[:, :2] - shift[:, None], V[:, :2], enable_gqa=True, method=Taylor(2))
    torch.testing.assert_close(attention(Q, K[:, :2], V[:, :2], enable_gqa=True, method=method), plain)
    mask = torch.ones(2, 4, 1, 7).bool()
    mask[:, 1, :, 3] = False  # For one query head only.
    masked = attention(Q, K[:, :2], V[:, :2], mask, enable_gqa=True, method=method)
    torch.testing.assert_close(masked[:, 0], plain[:, 0])
    assert not torch.allclose(masked[:, 1], plain[:, 1])


def test_a_mask_of_keys_may_have_one_dimension_or_two() -> None:
    keep = torch.arange(7) != 3
    wanted = attention(Q, K, V, keep.expand(2, 1, 1, 7), method="taylor")
    for mask in (keep, keep[None]):
        torch.testing.assert_close(attention(Q, K, V, mask, method="taylor"), wanted)
        torch.testing.assert_close(attention(Q[0], K[0], V[0], mask, method="taylor"), wanted[0])


def test_exact_resumes_with_padding_after_none() -> None:
    keep = torch.tensor([[True, False, True], [False, True, True]])
    _, state = attention(Q[..., :4, :], K[..., :4, :], V[..., :4, :], return_state=True)
    resumed, _ = attention(Q, K[..., 4:, :], V[..., 4:, :], key_padding_mask=keep, state=state, return_state=True)
    all_keys = torch.cat([torch.ones(2, 4, dtype=torch.bool), keep], 1)
    torch.testing.assert_close(resumed, attention(Q, K, V, key_padding_mask=all_keys))


def test_a_backward_inside_autocast_keeps_float32() -> None:
    """Also for the queries' own products: in bfloat16 they would differ in the third digit."""
    inputs = [x.clone().requires_grad_() for x in draw((1, 2, 300, 8), (1, 2, 300, 8), (1, 2, 300, 8))]
    output = attention(*inputs, is_causal=True, method="random")
    wanted = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(output.sum(), inputs)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_exact_with_a_state_refuses_a_mask_of_pairs() -> None:
    _, state = attention(Q, K, V, torch.ones(6, 7).tril().bool(), return_state=True)
    with pytest.raises(ValueError, match=r"attn_mask: .* leave out the state"):
        attention(Q, K, V, torch.ones(6, 7).tril().bool(), state=state)


def test_loud_keys_of_the_future_leave_gradients_of_the_past_finite() -> None:
    """exp(log-scale of the future - that of the past) overflows, and 0 * inf would be NaN."""
    q, k, v = draw((1, 1, 40, 4), (1, 1, 40, 4), (1, 1, 40, 4))
    k[:, :, 20:] += 100  # Log-scales of 200: exp(200) is infinite in float32.
    inputs = [x.requires_grad_() for x in (q, k, v)]
    method = copy.deepcopy(METHODS["user"]).float()
    for form in ("dense", "chunked", "fused"):
        output = run(method, Call.of(*inputs, is_causal=True), form).output
        for grad in torch.autograd.grad(output[:, :, :20].sum(), inputs):
            assert grad.isfinite().all()


@pytest.mark.filterwarnings("error")
def test_weights_that_can_be_negative_are_warned_about_by_the_call() -> None:
    """Not by the constructor; and the warning names the line of the caller."""
    for method in (Taylor(1), Taylor(3), Taylor(2, basis="diagonal")):
        with pytest.warns(UserWarning, match=r"^Taylor\(.*weights can be negative") as found:
            attention(Q, K, V, method=method)
        assert [warning.filename for warning in found] == [__file__]
    for method in (Taylor(0), Taylor(2), Taylor(4), RandomFeatures(8), Linear("identity")):
        attention(0.1 * Q, K, V, method=method)


def test_a_method_needs_all_members_of_a_map() -> None:
    class Half:
        def size(self, width: int) -> int:
            return width

        def __call__(self, x: torch.Tensor, *, is_query: bool) -> torch.Tensor:
            return x

    with pytest.raises(TypeError, match="method: expected a name, a method such as"):
        attention(Q, K, V, method=Half())


@pytest.mark.parametrize(("change", "message"), [
    (dict(key=None), "key: expected a tensor, got NoneType"),
    (dict(query=[1.0]), "query: expected a tensor, got list"),
    (dict(value=V.numpy()), "value: expected a tensor, got ndarray"),
    (dict(state="x"), "state: expected the result of attention.*, got str"),
])  # fmt: skip
def test_what_is_no_tensor_is_named(change, message) -> None:
    with pytest.raises(TypeError, match=message):
        attention(**dict(query=Q, key=K, value=V, method="taylor") | change)


def test_a_high_degree_needs_no_table_where_tokens_meet_pair_by_pair() -> None:
    """C(94, 30) features would not fit into any memory."""
    q = torch.randn(1, 1, 8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention(q, q, q, method=Taylor(30)), attention(q, q, q), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", ["taylor", "random", "multipole"])
def test_autocast_does_not_mix_float64_with_less(method) -> None:
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k.bfloat16(), v.half(), method=method).dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"key: expected torch.float32 on cpu, like the query, got torch.float64"):
            attention(q, k.double(), v, method=method)


def test_shifted_keys_in_half_precision_take_a_mask_for_each_query_head() -> None:
    q, k, v = (torch.randn(1, heads, 6, 4, dtype=torch.bfloat16) for heads in (4, 2, 2))
    mask = torch.arange(6) != torch.arange(4)[:, None, None]  # (4, 1, 6)
    method = Taylor(2, key_shift=[0.1] * 4)
    found = attention(q, k, v, mask, enable_gqa=True, method=method)
    expected = attention(q.float(), k.float(), v.float(), mask, enable_gqa=True, method=method)
    assert torch.equal(found, expected.bfloat16())


def test_masks_of_query_heads_and_of_key_heads_are_combined() -> None:
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    padding = torch.rand(2, 2, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    mask = torch.arange(5) != torch.arange(4)[:, None, None]
    found = attention(q, k, v, mask, enable_gqa=True, method="taylor", key_padding_mask=padding)
    for head in range(4):
        keep = padding[:, head // 2] & mask[head]
        own = (x[:, i : i + 1] for x, i in ((q, head), (k, head // 2), (v, head // 2)))
        torch.testing.assert_close(found[:, head : head + 1], attention(*own, method="taylor", key_padding_mask=keep))
