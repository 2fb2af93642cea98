"""Ways to put a method into a model of torch's kind; `integrations/test_ways_transformers.py` has Hugging Face's.

The logits of these models are small, so that Taylor(4) computes what exact attention does, to 1e-5: a mask, a scale or
a layer that got lost on the way would show. Each model runs with sequences of two lengths, padded.
"""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import subquad
from subquad import Taylor, replace_attention, sdpa

METHOD, WIDTH, LENGTH = Taylor(4), 32, 24
HIDDEN = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 7]])  # torch's masks: True hides


class Block(nn.Module):
    """Self-attention as most people write it."""

    def __init__(self, is_causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_causal, self.dropout = is_causal, dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=self.is_causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class VisionBlock(nn.Module):
    """A block in the manner of timm: normalized queries and keys, dropout as an argument, patches and a class token."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), Block(dropout=dropout), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x.mean(1, keepdim=True), x], 1)
        return self.mlp(self.attn(self.norm(x)))


class DiffusionBlock(nn.Module):
    """Self- and cross-attention in the manner of a diffusion model, whose text mask is a bias of 0 and -10,000."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, text: Tensor, shown: Tensor) -> Tensor:
        bias = ((1 - shown.to(x.dtype)) * -10_000.0)[:, None].repeat_interleave(4, 0).view(2, 4, 1, -1)
        (q1, q2), (k1, v1, _, _), (_, _, k2, v2) = (
            y.unflatten(-1, (-1, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4) for y in (self.q(x), self.kv(x), self.kv(text))
        )
        own = F.scaled_dot_product_attention(q1, k1, v1, attn_mask=None, dropout_p=0.0, is_causal=False)
        cross = F.scaled_dot_product_attention(q2, k2, v2, attn_mask=bias.expand(-1, -1, q2.shape[2], -1))
        return (own + cross).transpose(1, 2).flatten(2)


def tokens(seed: int = 0, length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def encoder(**options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerDecoder(layer, 2)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
# Name: the model, and its call.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "own block": (Block, lambda m: m(tokens())),
    "own causal block": (lambda: Block(is_causal=True), lambda m: m(tokens())),
    "own block, boolean mask": (Block, lambda m: m(tokens(), ~HIDDEN[:, None, None])),
    "own block, causal matrix": (Block, lambda m: m(tokens(), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())),
    "vision block": (VisionBlock, lambda m: m(tokens())),
    "diffusion block": (DiffusionBlock, lambda m: m(tokens(), tokens(1, 9), ~HIDDEN[:, -9:])),
    "encoder": (encoder, lambda m: m(tokens())),
    "encoder, padding": (encoder, lambda m: m(tokens(), src_key_padding_mask=HIDDEN)),
    "encoder, norm first, causal": (
        lambda: encoder(norm_first=True),
        lambda m: m(tokens(), mask=CAUSAL, is_causal=True, src_key_padding_mask=HIDDEN),
    ),
    "decoder, padding": (
        decoder, lambda m: m(tokens(), tokens(1), tgt_mask=CAUSAL, tgt_is_causal=True, tgt_key_padding_mask=HIDDEN,
                             memory_key_padding_mask=HIDDEN),
    ),
    "encoder and decoder": (
        lambda: nn.Transformer(WIDTH, 4, 1, 1, 64, dropout=0.0, batch_first=True),
        lambda m: m(tokens(), tokens(1), tgt_mask=CAUSAL, src_key_padding_mask=HIDDEN, memory_key_padding_mask=HIDDEN),
    ),
    "attention module": (
        lambda: nn.ModuleDict({"attn": nn.MultiheadAttention(WIDTH, 4, batch_first=True)}),
        lambda m: m["attn"](tokens(), tokens(1), tokens(1), key_padding_mask=HIDDEN, need_weights=False)[0],
    ),
}  # fmt: skip
WITH_MODULES = [name for name in MODELS if name.startswith(("encoder", "decoder", "attention"))]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    return model


def called(name: str, model: nn.Module) -> Tensor:
    output = MODELS[name][1](model)
    return output * ~HIDDEN[..., None] if output.shape[1] == LENGTH else output  # What padding computes means nothing.


def gradients(name: str, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(called(name, model).square().sum(), [*model.parameters()], allow_unused=True))


def assert_close(found: object, expected: object, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_routed(name, training):
    model = made(name).train(training)
    expected = called(name, model)
    with sdpa(METHOD) as routing:
        found = called(name, model)
        changed = gradients(name, model)
    assert_close(found, expected)
    for a, b in zip(changed, gradients(name, model), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, 1e-4)
    assert routing.calls
    assert all(each.method == METHOD for each in routing.calls), str(routing)


@pytest.mark.parametrize("name", WITH_MODULES)
@pytest.mark.parametrize("training", [True, False])
def test_replaced(name, training):
    model = made(name).train(training)
    with torch.no_grad():
        expected = called(name, model)
    gradient = gradients(name, model)
    with replace_attention(model, METHOD) as report:
        assert len(report.replaced) == len(report.layers)
        assert_close(called(name, model), expected)
        assert_close(gradients(name, model), gradient, 1e-4)
    assert_close(called(name, model), expected)


@pytest.mark.parametrize("name", WITH_MODULES)
def test_saved_and_loaded(name):
    model = made(name).eval()
    replace_attention(model, METHOD)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = MODELS[name][0]().eval()
    other.load_state_dict(torch.load(file))  # torch's own modules take it
    assert_close(called(name, other), called(name, model))
    copied = copy.deepcopy(model)
    assert_close(called(name, copied), called(name, model), 0)


@pytest.mark.parametrize("name", ["own causal block", "own block, boolean mask", "vision block"])
def test_compiled_and_routed(name):
    model = made(name)
    with sdpa(METHOD):
        expected = called(name, model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_close(called(name, compiled), expected)


def test_compiled_modules_of_torch_cannot_be_routed_and_say_so():
    compiled = torch.compile(made("encoder"), backend="aot_eager")
    with pytest.raises(Exception, match=r"use subquad\.replace_attention\(model, method\) instead"), sdpa(METHOD):
        called("encoder", compiled)


def test_compiled_and_replaced():
    model = made("encoder, padding")
    replace_attention(model, METHOD)
    expected = called("encoder, padding", model)
    assert_close(called("encoder, padding", torch.compile(model, fullgraph=True, backend="aot_eager")), expected)


def test_gradient_checkpoints_compute_the_same_again():
    model = made("own causal block")

    def loss() -> Tensor:
        return checkpoint(model, tokens(), use_reentrant=False).square().sum()

    with sdpa(METHOD) as routing:
        found = torch.autograd.grad(loss(), list(model.parameters()))
    assert [each.count for each in routing.calls] == [2]
    assert_close(list(found), list(torch.autograd.grad(loss(), list(model.parameters()))), 1e-4)


def test_dropout_on_the_weights_stays_with_torch_and_is_reported():
    model = made("vision block")
    model.attn.dropout = 0.5
    for training in (True, False):
        with sdpa(METHOD) as routing:
            model.train(training)(tokens())
        (found,) = routing.calls
        assert (found.method is None) == training
        assert found.reason.startswith("dropout_p") == training


def test_the_function_itself_in_torchs_place(monkeypatch):
    model = made("own causal block")
    expected = called("own causal block", model)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *x, **options: subquad.attention(*x, method=METHOD, **options)
    )
    assert_close(called("own causal block", model), expected)


def test_a_model_with_neither_says_what_was_looked_for():
    with pytest.raises(ValueError, match=r"looked for torch\.nn\.MultiheadAttention .* in Block, .*subquad\.sdpa"):
        replace_attention(Block(), METHOD)
