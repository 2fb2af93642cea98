"""One token after its state: the quick way means the same as the whole sequence, and refuses what does not fit."""

import pytest
import torch

import subquad._attention as heart
from reference import METHODS
from subquad import RandomFeatures, Taylor, attention
from subquad._attention import decode

H, N, D = 2, 13, 4


def draw(*shapes, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in METHODS if getattr(METHODS[name], "key_shift", None) is None])
@pytest.mark.parametrize("group", [1, 2])
def test_decoding_takes_the_quick_way_and_means_the_same(name, group, monkeypatch) -> None:
    """Token by token, with values as wide as keys: outputs, states and gradients of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, H * group, N, D), (2, H, N, D), (2, H, N, D)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    method, quick = METHODS[name], []
    monkeypatch.setattr(heart, "decode", lambda *arguments: quick.append(decode(*arguments)) or quick[-1])
    whole, last = attention(*inputs, is_causal=True, enable_gqa=True, method=method, return_state=True)
    state, outputs = None, []
    for token in zip(*(x.split(1, -2) for x in inputs), strict=True):
        output, state = attention(*token, is_causal=True, enable_gqa=True, method=method, state=state,
                                  return_state=True)  # fmt: skip
        outputs.append(output)
    assert len(quick) == N - 1
    assert all((found is None) == (name in ("separable", "user")) for found in quick)
    assert state.length == last.length == N
    joined = torch.cat(outputs, -2)
    close(joined, whole)
    exponent = 0.0 if last.log_scale is None else (state.log_scale - last.log_scale)[..., None]
    close(state.sums * torch.as_tensor(exponent).exp(), last.sums)
    cotangent = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    expected = torch.autograd.grad(whole, inputs, cotangent, retain_graph=True)
    for found, wanted in zip(torch.autograd.grad(joined, inputs, cotangent), expected, strict=True):
        close(found, wanted)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_decoding_poisons_what_the_whole_sequence_poisons(name, bad, place) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, H, 5, D, generator=generator, dtype=torch.float64) for _ in range(3)]
    inputs[place][0, 0, 2, 1] = bad
    whole = attention(*inputs, is_causal=True, method=METHODS[name])
    state, outputs = None, []
    for token in zip(*(x.split(1, -2) for x in inputs), strict=True):
        output, state = attention(*token, is_causal=True, method=METHODS[name], state=state, return_state=True)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, -2), whole, rtol=1e-9, atol=1e-10, equal_nan=True)
    assert torch.equal(state.poison.isnan(), torch.tensor([[place > 0, False]]))


def decoded(made_by, **changes) -> torch.Tensor:
    """One token after three, values as wide as keys."""
    q, k, v = (x.clone() for x in draw((2, 2, 4, 4), (2, 2, 4, 4), (2, 2, 4, 4)))
    _, state = attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], is_causal=True, method=made_by, return_state=True)
    token = dict(query=q[:, :, 3:], key=k[:, :, 3:], value=v[:, :, 3:], method=made_by)
    return attention(**token | changes, is_causal=True, state=state, return_state=True)[0]


def test_a_token_that_does_not_fit_its_state_is_refused() -> None:
    token = draw((2, 2, 1, 4))[0]
    for change, message in (
        (dict(method=Taylor(0)), "state: expected one made by Taylor"),
        (dict(method=RandomFeatures(8, seed=1)), "state: expected one made by Random"),
        (dict(query=token[:1], key=token[:1], value=token[:1]), "state: expected"),
        (dict(value=token[..., :2]), "state: expected"),
        (dict(query=token.double(), key=token.double(), value=token.double()), "state: expected"),
        (dict(value=token.double()), "value: expected torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            decoded(RandomFeatures(8), **change)


@pytest.mark.parametrize("name", ["taylor2", "positive", "elu", "user"])
def test_a_hidden_token_adds_nothing_to_the_state(name) -> None:
    q, k, v = draw((2, 2, 4, 4), (2, 2, 4, 4), (2, 2, 4, 4), dtype=torch.float64)
    keep = torch.tensor([[True, True, True, False], [True] * 4])
    whole = attention(q, k, v, is_causal=True, method=METHODS[name], key_padding_mask=keep)
    _, state = attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], is_causal=True, method=METHODS[name], return_state=True)
    last = attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], is_causal=True, method=METHODS[name], state=state,
                     key_padding_mask=keep[:, 3:])  # fmt: skip
    torch.testing.assert_close(last, whole[:, :, 3:])
