"""What the kernels compute: a row of a batch has the bits that it has alone, on any number of threads."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from calls import same_bits
from subquad import Linear, Multipole, RandomFeatures, Separable, Taylor, Window, attention, native
from subquad._engines.features import native_call
from subquad._engines.features.schedule import schedule

pytestmark = pytest.mark.skipif(not native.available(), reason="the promise is for the native kernels")
METHODS = {
    "taylor": Taylor(2),
    "odd taylor": Taylor(3),
    "positive": RandomFeatures(256),
    "hyperbolic": RandomFeatures(128, "hyperbolic"),
    "elu": Linear("elu"),
    "separable": Separable(),
    "multipole": Multipole(),
    "window": Window(20, sinks=2),
}
DRAWS = 12


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(name: str, seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], bool]:
    """Return inputs with few heads, which threads share, the options of the call, and whether to differentiate."""
    chosen, generator = random.Random(f"{name} {seed}"), torch.Generator().manual_seed(seed)
    batch, heads, group = chosen.choice([2, 3]), chosen.choice([1, 2, 5]), chosen.choice([1, 1, 2])
    n, d, e = chosen.choice([1, 17, 100, 257, 600]), chosen.choice([3, 8, 16]), chosen.choice([1, 16, 20])
    dtype = chosen.choice([torch.float32, torch.float32, torch.float64])
    shapes = (batch, heads * group, n, d), (batch, heads, n, d), (batch, heads, n, e)
    query, key, value = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    is_causal = name == "separable" or chosen.random() < 0.6  # Without causality, torch computes Separable.
    padding = torch.rand(batch, n, generator=generator) > 0.2 if chosen.random() < 0.4 else None
    return_state = is_causal and name != "separable" and chosen.random() < 0.4
    options = dict(is_causal=is_causal, enable_gqa=group > 1, return_state=return_state, key_padding_mask=padding)
    return (query, key, value), options, not return_state and chosen.random() < 0.6


def computed(method: object, inputs: tuple[Tensor, ...], options: dict[str, Any], is_differentiated: bool) -> list:
    """Return the output, and the gradients or the tensors of the state."""
    inputs = tuple(x.clone().requires_grad_(is_differentiated) for x in inputs)
    found = attention(*inputs, method=method, **options)
    if options["return_state"]:
        return [found[0], *(x for x in (found[1].sums, found[1].log_scale) if x is not None)]
    if not is_differentiated:
        return [found]
    e = found.shape[-1]
    slope = torch.arange(found.shape[-2] * e, dtype=found.dtype).cos().reshape(-1, e)
    return [found.detach(), *torch.autograd.grad((found * slope).sum(), inputs)]


def _equal(x: Tensor, y: Tensor) -> bool:
    return bool(same_bits(x.contiguous(), y.contiguous()).all())


def row_of(inputs: tuple[Tensor, ...], options: dict[str, Any], i: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    padding = options["key_padding_mask"]
    return tuple(x[i : i + 1] for x in inputs), options | {
        "key_padding_mask": None if padding is None else padding[i : i + 1]
    }


def is_invariant(name: str, seed: int) -> bool:
    """Whether a draw has the same bits on 1, 2 and 3 threads, and each row the bits that it has alone."""
    inputs, options, is_differentiated = draw(name, seed)
    torch.set_num_threads(1)
    whole = computed(METHODS[name], inputs, options, is_differentiated)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        again = computed(METHODS[name], inputs, options, is_differentiated)
        if not all(_equal(x, y) for x, y in zip(whole, again, strict=True)):
            return False
        for i in range(len(inputs[0])):
            alone = computed(METHODS[name], *row_of(inputs, options, i), is_differentiated)
            if not all(_equal(x[i : i + 1], y) for x, y in zip(whole, alone, strict=True)):
                return False
    return True


@pytest.mark.parametrize("name", METHODS)
def test_neither_other_rows_nor_threads_change_a_bit(name, threads):
    assert [seed for seed in range(DRAWS) if not is_invariant(name, seed)] == []


def test_parts_that_follow_the_number_of_threads_are_noticed(threads, monkeypatch):
    def faulty(*arguments: Any, **options: Any) -> Any:
        found = schedule(*arguments, **options)
        return found._replace(parts=found.threads, is_shared=found.threads > 1)

    monkeypatch.setattr(native_call, "schedule", faulty)
    assert any(not is_invariant("positive", seed) for seed in range(DRAWS))
