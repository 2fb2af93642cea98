"""Sizes of 0 and sizes that no machine has: every method means what exact attention means, or raises the same error."""

import time
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import subquad
from calls import METHODS
from reference import reference
from subquad import (
    Decoder,
    Exact,
    Multipole,
    RandomFeatures,
    Taylor,
    Window,
    attention,
    cost,
    error,
    measure_error,
    native,
)

ALL = METHODS | {"exact": Exact(), "multipole": Multipole(), "window": Window(64, sinks=1)}
WITHOUT_WEIGHTS = {"identity", "relu"}  # whose features of 0 are 0
by_any_method = pytest.mark.parametrize("name", ALL)
both = pytest.mark.parametrize("is_causal", [False, True])


def inputs(query: tuple[int, ...], key: tuple[int, ...], value_width: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in (query, key, (*key[:-1], value_width)))


@by_any_method
@both
@pytest.mark.parametrize("n", [1, 5, 300])
def test_logits_of_width_0_are_0(name, is_causal, n):
    if n == 300 and name == "window":  # It sees only some of 300 tokens.
        pytest.skip("a window of 64 has another mean")
    q, k, v = inputs((2, 2, n, 0), (2, 2, n, 0))
    out = attention(q, k, v, is_causal=is_causal, method=ALL[name])
    mean = v.cumsum(-2) / torch.arange(1, n + 1)[:, None] if is_causal else v.mean(-2, keepdim=True).expand_as(v)
    if name in WITHOUT_WEIGHTS:
        mean = torch.zeros_like(v)
    torch.testing.assert_close(out, mean, rtol=1e-5, atol=1e-5)


@by_any_method
def test_width_0_has_states_steps_and_gradients(name):
    q, k, v = inputs((1, 2, 9, 0), (1, 2, 9, 0))
    whole = attention(q, k, v, is_causal=True, method=ALL[name])
    parts, state = [], None
    for cut in (slice(0, 4), slice(4, 4), slice(4, 8)):
        part, state = attention(
            q[:, :, cut], k[:, :, cut], v[:, :, cut], is_causal=True, method=ALL[name], state=state, return_state=True
        )
        parts.append(part)
    parts.append(Decoder(state)(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:]))
    torch.testing.assert_close(torch.cat(parts, -2), whole, rtol=1e-5, atol=1e-5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(attention(*leaves, is_causal=True, method=ALL[name]).sum(), leaves, allow_unused=True)
    assert grads[0].shape == q.shape and grads[1].shape == k.shape
    assert bool(grads[2].isfinite().all()) and (name in WITHOUT_WEIGHTS or bool(grads[2].any()))


@by_any_method
@both
def test_a_result_without_numbers_has_the_broadcast_shape(name, is_causal):
    shapes = {
        ((1, 2, 0, 4), (3, 2, 5, 4), 4): (3, 2, 0, 4),  # no queries
        ((1, 2, 5, 4), (3, 2, 5, 4), 0): (3, 2, 5, 0),  # no value width
        ((1, 2, 5, 4), (3, 2, 0, 4), 3): (3, 2, 5, 3),  # no keys
        ((2, 0, 5, 4), (2, 1, 5, 4), 3): (2, 0, 5, 3),  # no query heads
        ((2, 0, 5, 0), (2, 1, 5, 0), 3): (2, 0, 5, 3),
        ((0, 2, 5, 4), (1, 2, 5, 4), 3): (0, 2, 5, 3),  # no batch
    }
    for ((query, key, value_width), expected), return_state in product(shapes.items(), (False, True)):
        if name == "window" and query[-2] != key[-2] and not is_causal:
            continue  # A window on both sides has no positions for other queries than keys: it says so.
        given = [x.requires_grad_() for x in inputs(query, key, value_width)]
        found = attention(*given, is_causal=is_causal, method=ALL[name], return_state=return_state)
        out = found[0] if return_state else found
        assert out.shape == expected and not bool(out.any()), (query, key)
        grads = torch.autograd.grad(out.sum(), given, allow_unused=True)
        assert all(g is None or not bool(g.any()) for g in grads)


@both
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("name", [*ALL, "narrow"])
def test_pieces_without_tokens_and_batches_without_rows_have_states_and_steps(name, batch, is_causal):
    method = (ALL | {"narrow": Window(1, sinks=1)})[name]
    x, state, parts = torch.ones(batch, 1, 4, 7).mT, None, []  # Torch calls a piece of length 0 contiguous.
    for cut in (slice(0, 0), slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 5)):
        part, state = attention(*[x[:, :, cut]] * 3, is_causal=is_causal, method=method, state=state, return_state=True)
        parts.append(part)
    decoder = Decoder(state)
    parts += [decoder(*[x[:, :, i : i + 1]] * 3) for i in (5, 6)]
    assert torch.cat(parts, -2).shape == (batch, 1, 7, 4) and decoder.state.length == 7


@by_any_method
@both
def test_heads_may_be_masked_where_key_heads_are_padded_and_packed(name, is_causal):
    q, k, v = inputs((2, 4, 5, 8), (2, 2, 5, 8))
    by_head = torch.rand(4, 1, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    padding = torch.rand(2, 2, 5, generator=torch.Generator().manual_seed(2)) > 0.3
    packing = torch.tensor([0, 0, 1, 1, 1]).expand(2, 2, 5)
    for masks in (dict(key_padding_mask=padding), dict(segment_ids=packing)):
        given = dict(is_causal=is_causal, method=ALL[name])
        out = attention(q, k, v, attn_mask=by_head, enable_gqa=True, **masks, **given)
        for head in range(4):
            one = [q[:, head : head + 1], k[:, head // 2, None], v[:, head // 2, None]]
            own = {what: mask[:, head // 2, None] for what, mask in masks.items()}
            alone = attention(*one, attn_mask=by_head[head], **own, **given)
            torch.testing.assert_close(out[:, head, None], alone, rtol=1e-5, atol=1e-6)


@by_any_method
@both
def test_a_mask_of_one_dimension_hides_keys(name, is_causal):
    q, k, v = inputs((1, 2, 5, 4), (1, 2, 5, 4))
    mask = torch.tensor([True, True, False, True, True])
    given = dict(is_causal=is_causal, method=ALL[name])
    out = attention(q, k, v, attn_mask=mask, **given)
    torch.testing.assert_close(out, attention(q, k, v, key_padding_mask=mask, **given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("method", "width"),
    [(Taylor(10**9), 8), (Taylor(10**9, basis="diagonal"), 8), (RandomFeatures(2**31), 8)],
)
def test_features_beyond_memory_raise_at_once(method, width, device):
    x = torch.randn(3, 1, 1, 4, width, device=device)
    begin = time.process_time()
    for options in ({}, dict(is_causal=True), dict(is_causal=True, return_state=True)):
        with pytest.raises(
            ValueError, match=r"^method: .* features at width \d+; .* bytes, but this machine has [\d,]+"
        ):
            attention(*x, method=method, **options)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"^method: .* bytes, but this machine has"):
            measure_error(*x, method=method)
    assert cost(method, query_length=8, head_dim=width).state_bytes > 10**10
    assert time.process_time() - begin < 5


@both
def test_a_series_needs_no_features_where_tokens_meet_pair_by_pair(is_causal):
    """C(4100, 4) features, 10^13, do not fit into memory: a state raises, and other calls form the weights."""
    q, k, v = 0.1 * torch.randn(3, 1, 2, 6, 4096, generator=torch.Generator().manual_seed(0))
    expected = reference(Taylor(4), q, k, v, is_causal)
    torch.testing.assert_close(
        attention(q, k, v, is_causal=is_causal, method=Taylor(4)).double(), expected, rtol=1e-4, atol=1e-6
    )
    with pytest.raises(ValueError, match=r"^method: Taylor\(4\) has .* bytes, but this machine has"):
        attention(q, k, v, is_causal=True, method=Taylor(4), return_state=True)


@pytest.mark.parametrize("reach", [0.5, 30.0, 1e4])
def test_errors_of_high_degrees_are_known_at_once(reach):
    begin = time.process_time()
    assert error(Taylor(10**9), logit_range=reach).relative < 1e-9
    assert time.process_time() - begin < 2


def test_a_module_with_too_many_features_is_not_made():
    with pytest.raises(ValueError, match=r"^method: RandomFeatures.* bytes"):
        subquad.MultiheadAttention(8, 2, method=RandomFeatures(2**33))


def test_scripting_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"^subquad.MultiheadAttention: torch.jit.script is not supported"):
        torch.jit.script(subquad.MultiheadAttention(8, 2))


def test_wrong_shapes_raise_what_torch_raises():
    module, x = subquad.MultiheadAttention(4, 4), torch.randn(4, 4, 4)
    keys = torch.zeros(4, dtype=torch.bool)
    for changed in [dict(key=x[0]), dict(value=x[0]), dict(key_padding_mask=keys), dict(attn_mask=keys)]:
        arguments = dict(query=x, key=x, value=x) | changed
        for wanted in (AssertionError, ValueError):
            with pytest.raises(wanted, match=next(iter(changed))):
                module(**arguments)
        with pytest.raises(AssertionError):
            torch.nn.MultiheadAttention(4, 4)(**arguments)


def test_exact_is_still_torch():
    q, k, v = inputs((2, 2, 5, 4), (2, 2, 7, 4))
    assert torch.equal(attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


@both
@pytest.mark.parametrize("shift", [-20.0, -35.0, -42.0])
def test_gradients_of_rows_with_tiny_weights_are_those_of_wide_numbers(is_causal, shift, monkeypatch):
    """The weights of a row sum up to between 1e-17 and 1e-36: the square of their inverse is infinite in float32."""
    q, k, v = (x.double() for x in inputs((1, 2, 70, 4), (1, 2, 70, 4)))
    wide = [x.requires_grad_() for x in (0.1 * q + shift, 0.1 * k + shift, v)]
    found = {}
    for use_kernels in (True, False):
        if not use_kernels:
            monkeypatch.setattr(native, "available", lambda: False)
        for tensors in (wide, [x.detach().float().requires_grad_() for x in wide]):
            out = attention(*tensors, is_causal=is_causal, scale=1.0, method="linear:elu")
            found[use_kernels, out.dtype] = torch.autograd.grad(out.square().sum(), tensors)
        for mine, theirs in zip(found[use_kernels, torch.float32], found[True, torch.float64], strict=True):
            assert (mine - theirs).norm() < 2e-5 * theirs.norm()
