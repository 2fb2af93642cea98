"""State: a value that can be cut, moved, counted and printed."""

import dataclasses
import io
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from subquad import (
    BlockSparse,
    Decoder,
    Exact,
    Linear,
    MultiheadAttention,
    Multipole,
    RandomFeatures,
    Separable,
    State,
    Taylor,
    Window,
    attention,
)

METHODS = [Taylor(2), RandomFeatures(6), Separable(), Exact()]


def made(method, n: int = 5, **masks) -> State:
    q, k, v = torch.randn(3, 2, 3, n, 4, generator=torch.Generator().manual_seed(0)).unbind()
    return attention(q, k, v, is_causal=True, method=method, return_state=True, **masks)[1]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_it_is_a_value(method) -> None:
    state = made(method)
    assert state.method == method
    assert state.length == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.length = 6
    assert repr(state) == f"State({method.label}, length=5, bytes={state.nbytes})"


def test_it_is_printed_with_the_short_name_of_its_method() -> None:
    assert repr(made(Taylor(2))) == "State(Taylor(2), length=5, bytes=1824)"
    assert repr(made(Taylor(2, key_shift=torch.ones(4)))) == "State(Taylor(2), keys centered, length=5, bytes=1824)"


def test_the_size_is_that_of_the_sums_at_any_length() -> None:
    assert made(Taylor(2), 5).nbytes == made(Taylor(2), 200).nbytes == 2 * 3 * (15 * 5 + 1) * 4
    assert made(RandomFeatures(6)).nbytes == 2 * 3 * (6 * 5 + 1 + 1) * 4
    assert made(Separable()).nbytes == 2 * 3 * (4 * 5 + 1 + 4) * 4
    assert made(Exact(), 200).nbytes == 2 * 2 * 3 * 200 * 4 * 4


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_tensor_follows_the_batch(method) -> None:
    keep = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 1]]).bool()
    state = made(method, key_padding_mask=keep, segment_ids=torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]))
    picked, cut, moved = state[torch.tensor([1, 1, 0])], state[1:], state.to("meta")
    tensors = [name for name in ("sums", "poison", "log_scale", "segment", "keys", "values", "keep")
               if getattr(state, name) is not None]  # fmt: skip
    assert "segment" in tensors
    assert ("keep" in tensors) == (method == Exact())
    for name in tensors:
        tensor = getattr(state, name)
        assert torch.equal(getattr(picked, name), tensor[[1, 1, 0]])
        assert torch.equal(getattr(cut, name), tensor[1:])
        assert getattr(moved, name).device.type == "meta"
    assert picked.length == state.length
    assert state.segment.tolist() == [[1] * 3, [2] * 3]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_torch_knows_it_as_a_container(method) -> None:
    state = made(method)
    leaves, structure = pytree.tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, structure)
    assert again.method == method
    assert again.length == state.length
    doubled = pytree.tree_map(lambda leaf: leaf * 2, state)
    assert doubled.nbytes == state.nbytes


def test_a_state_of_nothing_has_no_tensors() -> None:
    state = made(Taylor(2), 0)
    assert state.length == 0
    assert state.nbytes == 0


ALL_METHODS = [
    *METHODS, Taylor(2, key_shift=(1.0, 0.0, 0.0, 0.5)), RandomFeatures(6, matrix=torch.ones(6, 4)), Linear("elu"),
    Window(3), Window(3, sinks=2, softcap=4.0, sink_logits=torch.ones(3)), Multipole(window=16),
]  # fmt: skip


def loaded(value: Any) -> Any:
    """The value after `torch.save` and `torch.load`, which takes plain values only."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("method", ALL_METHODS, ids=str)
def test_a_state_is_saved_and_loaded_to_the_bit(method) -> None:
    keep = torch.tensor([[True] * 299 + [False], [False] + [True] * 299])
    for masks in ({}, {"key_padding_mask": keep}):
        state = made(method, 300, **masks)
        again = loaded({"state": state})["state"]
        assert (again.method, again.length, again.scale, again.widths) == (
            state.method, state.length, state.scale, state.widths)  # fmt: skip
        assert again._tensors().keys() == state._tensors().keys()
        for name, tensor in state._tensors().items():
            torch.testing.assert_close(again._tensors()[name], tensor, rtol=0, atol=0, equal_nan=True)
        token = torch.randn(3, 2, 3, 1, 4, generator=torch.Generator().manual_seed(1)).unbind()
        outputs = [attention(*token, is_causal=True, method=method, state=s) for s in (again, state)]
        assert torch.equal(*outputs)


def test_methods_and_modules_are_saved_and_loaded() -> None:
    for method in (*ALL_METHODS, BlockSparse(torch.ones(1, 2, 2, dtype=torch.bool))):
        again = loaded({"method": method})["method"]
        assert type(again) is type(method) and repr(again) == repr(method)
    layer = MultiheadAttention(8, 2, method=RandomFeatures(6))
    other = MultiheadAttention(8, 2, method=RandomFeatures(6, seed=1))
    other.load_state_dict(loaded(layer.state_dict()))
    x = torch.randn(1, 5, 8)
    assert torch.equal(layer(x, x, x, need_weights=False)[0], other(x, x, x, need_weights=False)[0])
    with torch.serialization.safe_globals([type(m) for m in layer.modules()] + [torch.nn.Module]):
        again = loaded(layer.eval())
    assert torch.equal(again(x, x, x, need_weights=False)[0], layer(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("method", ALL_METHODS, ids=str)
def test_a_state_refuses_another_scale(method) -> None:
    q, k, v = torch.randn(3, 2, 3, 30, 16, generator=torch.Generator().manual_seed(0)).unbind()
    if isinstance(method, Taylor) and method.key_shift is not None:
        method = Taylor(2, key_shift=(1.0,) * 16)
    method = RandomFeatures(6, matrix=torch.ones(6, 16)) if getattr(method, "matrix", None) is not None else method
    _, state = attention(q, k, v, is_causal=True, method=method, scale=0.3, return_state=True)
    token = [x[:, :, :1] for x in (q, k, v)]
    assert state.scale == 0.3 and state.detach().scale == 0.3 and state[:1].scale == 0.3
    for scale in (None, 0.5, -0.3):
        wanted = rf"scale: expected 0.3, with which the state was made, got {scale or 0.25}.* pass scale=0.3"
        with pytest.raises(ValueError, match=wanted):
            attention(*token, is_causal=True, method=method, scale=scale, state=state)
        with pytest.raises(ValueError, match=wanted):
            Decoder(state, scale=scale)(*token)
    found = attention(*token, is_causal=True, method=method, scale=0.3 + 1e-9, state=state)
    torch.testing.assert_close(Decoder(state, scale=0.3)(*token), found, rtol=1e-4, atol=1e-5)
