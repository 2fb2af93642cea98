"""Hedgehog: softmax features, learned head by head, in every place where a method may stand."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import subquad
from subquad import Decoder, Hedgehog, MultiheadAttention, Taylor, attention, cost
from subquad.methods import for_layer, resolve
from subquad.testing import check_feature_map


def drawn(head_dim: int = 4, heads: int = 4, **options: int) -> Hedgehog:
    made = Hedgehog(head_dim, heads, **options).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return made


def inputs(key_heads: int = 2, length: int = 17) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, length, 4), (2, key_heads, length, 4), (2, key_heads, length, 3)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def oracle(method: Hedgehog, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One head after another, one pair after another."""
    output = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]

    def features(x: Tensor, weight: Tensor) -> Tensor:
        y = weight @ (x * x.shape[-1] ** -0.25)
        parts = torch.cat([y, -y]).exp()
        return parts / parts.sum()

    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        own = features(q[b, h, i], method.query_weight[h])
        weights = [own @ features(x, method.key_weight[h // group]) for x in k[b, h // group]]
        weights = torch.stack(weights) * seen[h, i]
        output[b, h, i] = weights @ v[b, h // group] / weights.sum()
    return output


@pytest.mark.parametrize(("key_heads", "rank"), [(4, None), (2, None), (1, None), (2, 3), (2, 7)])
def test_every_head_has_its_own_features(key_heads, rank) -> None:
    method = drawn(key_heads=key_heads, rank=rank)
    q, k, v = inputs(key_heads, 9)
    causal, all_keys = torch.ones(4, 9, 9).tril(), torch.ones(4, 9, 9)
    for is_causal, seen in ((True, causal), (False, all_keys)):
        expected = oracle(method, q, k, v, seen)
        found = attention(q, k, v, is_causal=is_causal, enable_gqa=True, method=method)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    swapped = drawn(key_heads=key_heads, rank=rank)
    with torch.no_grad():
        swapped.query_weight.copy_(swapped.query_weight.flip(0))
    assert not torch.allclose(attention(q, k, v, enable_gqa=True, method=swapped), expected, atol=1e-3)


def test_a_mask_for_each_query_head() -> None:
    method, (q, k, v) = drawn(key_heads=2), inputs(length=9)
    keep = torch.rand(4, 1, 9, generator=torch.Generator().manual_seed(2)) > 0.3
    expected = oracle(method, q, k, v, keep.double().expand(4, 9, 9))
    found = attention(q, k, v, attn_mask=keep, enable_gqa=True, method=method)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_it_passes_the_conformance_suite() -> None:
    check_feature_map(drawn(8, 2), width=8)
    check_feature_map(drawn(8, 5, rank=3), width=8)


def test_it_begins_as_the_softmax_of_the_input_and_its_negative() -> None:
    x = torch.randn(2, 4, 5, 4)
    for is_query in (True, False):
        found = Hedgehog(4, 4)(x, is_query=is_query)
        assert torch.allclose(found, torch.cat([x, -x], -1).softmax(-1))
    huge = Hedgehog(4, 4)(x * 1e30, is_query=True)
    assert bool(huge.isfinite().all())


def test_it_resumes_and_decodes() -> None:
    method, (q, k, v) = drawn(key_heads=2), inputs()
    options = dict(is_causal=True, enable_gqa=True, method=method)
    whole = attention(q, k, v, **options)
    _, state = attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], return_state=True, **options)
    decoder = Decoder(state, enable_gqa=True)
    steps = [decoder(*(x[:, :, t : t + 1] for x in (q, k, v))) for t in range(9, 14)]
    torch.testing.assert_close(torch.cat(steps, 2), whole[:, :, 9:14], rtol=0, atol=1e-12)
    assert decoder.state.method is method and decoder.state.scale == state.scale
    rest = attention(*(x[:, :, 14:] for x in (q, k, v)), state=decoder.state, **options)
    torch.testing.assert_close(rest, whole[:, :, 14:], rtol=0, atol=1e-12)
    bad = [x[:, :, :1].clone() for x in (q, k, v)]
    bad[1][0, 0, 0, 0] = float("inf")
    poisoned = Decoder(state, enable_gqa=True)(*bad)
    assert torch.equal(poisoned.isnan().all(-1)[..., 0], torch.tensor([[True, True, False, False], [False] * 4]))


def test_training_finds_its_parameters() -> None:
    layer = MultiheadAttention(16, 4, batch_first=True, method="hedgehog")
    x = torch.randn(2, 9, 16)
    layer(x, x, x, is_causal=True, need_weights=False)[0].square().sum().backward()
    assert all(bool(p.grad.any()) for p in layer.method.parameters())
    assert torch.autograd.gradgradcheck(
        lambda q: attention(q, q, q, is_causal=True, method=drawn(2, 2)),
        torch.randn(1, 2, 4, 2, dtype=torch.float64, requires_grad=True), fast_mode=True,
    )  # fmt: skip


def test_modules_make_one_for_each_layer_and_share_a_given_one() -> None:
    def model() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 8, 0.0, batch_first=True), 3)

    made, shared = model(), model()
    report = subquad.replace_attention(made, "hedgehog")
    subquad.replace_attention(shared, Hedgehog(4, 4))
    counts = [len({id(p) for p in x.parameters() if p.shape == (4, 4, 4)}) for x in (made, shared)]
    assert counts == [6, 2]
    assert [row.method for row in report.layers] == [layer.self_attn.method for layer in made.layers]
    again = model()
    subquad.replace_attention(again, "hedgehog")
    again.load_state_dict(made.state_dict())
    x = torch.randn(2, 5, 16)
    assert torch.equal(made.eval()(x), again.eval()(x))
    half = MultiheadAttention(16, 4, dtype=torch.bfloat16, method="hedgehog")
    assert half.method.key_weight.dtype == torch.float32


def test_other_maps_can_be_made_for_each_layer() -> None:
    class Scaled(nn.Module):
        positive = True

        def __init__(self, heads: int = 0) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(heads, 1, 1))

        def for_layer(self, head_dim: int, heads: int, key_heads: int) -> "Scaled":
            return Scaled(heads)

        def size(self, width: int) -> int:
            return width

        def forward(self, x: Tensor, *, is_query: bool) -> Tensor:
            return (x * self.factor).exp()

    layers = [MultiheadAttention(16, 4, method=Scaled()) for _ in range(2)]
    assert layers[0].method is not layers[1].method and layers[0].method.factor.shape == (4, 1, 1)


def test_names_and_labels() -> None:
    assert [str(x) for x in (resolve("hedgehog"), resolve("hedgehog:8"))] == ["Hedgehog()", "Hedgehog(rank=8)"]
    assert str(for_layer(Hedgehog(), 8, 4, 2)) == "Hedgehog(head_dim=8, heads=4, key_heads=2)"
    assert for_layer(Taylor(2), 8, 4) == Taylor(2)
    found = cost("hedgehog", query_length=64, head_dim=8, heads=4, key_heads=2, is_causal=True)
    assert found.parameters == (4 + 2) * 8 * 8
    assert found.state_bytes == 2 * 4 * (16 * 9 + 1)


def test_wrong_sizes_are_named() -> None:
    q, k, v = inputs()
    for method, text in (
        (Hedgehog(), r"method: Hedgehog\(\) has no parameters yet"),
        (drawn(heads=3), "query: expected 3 heads of width 4, .* got 4 of width 4"),
        (drawn(), "key: expected 4 heads of width 4, .* got 2"),
        (drawn(5, key_heads=2), "query: expected 4 heads of width 5"),
    ):
        with pytest.raises(ValueError, match=text):
            attention(q, k, v, enable_gqa=True, method=method)
    with pytest.raises(ValueError, match="heads: expected both head_dim and heads"):
        Hedgehog(4)
    with pytest.raises(ValueError, match="key_heads: expected None without head_dim and heads, got 2"):
        Hedgehog(key_heads=2)
    with pytest.raises(ValueError, match="key_heads: expected a number that divides the 4 heads, got 3"):
        Hedgehog(4, 4, key_heads=3)
    with pytest.raises(ValueError, match="rank: expected a positive integer"):
        resolve("hedgehog:0")
    with pytest.raises(ValueError, match="expected an integer for rank"):
        resolve("hedgehog:x")
