"""Nothing is random but the draw, and that follows from the seed."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from calls import ALL_METHODS, RANDOM, attended, by_any_method, normal_inputs, same_bits, with_gradients
from subquad import RandomFeatures

pytestmark = pytest.mark.usefixtures("one_thread")


def redrawn_on_every_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fault: projections from the global generator, inside the call."""
    return attended(RandomFeatures(16, matrix=torch.randn(16, q.shape[-1])), q, k, v)[0]


def is_deterministic(function: Callable[..., Tensor]) -> bool:
    """Whether a call has the same bits again, whatever the global generators hold, and leaves these as they were."""
    inputs, outputs, untouched = normal_inputs(2, 2, n=70), [], True
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        random.seed(seed)
        states = torch.get_rng_state(), random.getstate()
        outputs.append(torch.cat([x.flatten() for x in with_gradients(function, *inputs)]))
        untouched = untouched and torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    return untouched and all(bool(same_bits(x, outputs[0]).all()) for x in outputs)


def test_redrawing_inside_a_call_is_noticed():
    assert not is_deterministic(redrawn_on_every_call)


@by_any_method
def test_same_call_same_bits(name):
    assert is_deterministic(lambda *x: attended(ALL_METHODS[name], *x)[0])


@pytest.mark.parametrize("name", RANDOM)
def test_the_seed_decides_and_redrawing_gives_another_method(name):
    inputs, kind = normal_inputs(2, 2, n=30), ALL_METHODS[name].kind
    # A width and seed that nothing has drawn before: the global generators must stay untouched by the first draw too.
    assert is_deterministic(lambda *x: attended(RandomFeatures(18, kind, seed=1234), *x)[0])
    method = ALL_METHODS[name]
    other = method.redraw(seed=1)
    assert other != method
    assert other == replace(method, seed=1)
    out, again, redrawn = (attended(m, *inputs)[0] for m in (method, replace(other, seed=method.seed), other))
    assert torch.equal(out, again)
    assert not torch.equal(out, redrawn)
