"""State: a value that can be cut, moved, counted and printed."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from subquad import Exact, RandomFeatures, Separable, State, Taylor, attention

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
