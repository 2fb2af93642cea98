"""A long sequence streamed in bfloat16, in chunks and single steps: the state stays small, and the output right.

benchmarks/streaming.py does the same with a million tokens.
"""

import pytest
import torch
from torch import Tensor

from subquad import Exact, Taylor, attention

WIDTH, CHUNK, STEPS = 16, 1000, 50
TOKENS = 20_000


pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(count: int) -> list[Tensor]:
    """Queries, keys, and values of mean 1, so that a relative error means something: (1, 1, count, WIDTH), bfloat16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, count, WIDTH, generator=generator) for _ in range(3))
    return [x.bfloat16() for x in (q, k, v + 1)]


def pieces(count: int) -> list[int]:
    """A chunk, then single steps, and again."""
    lengths: list[int] = []
    while sum(lengths) < count:
        lengths += [CHUNK] + [1] * STEPS
    return lengths


def streamed(q: Tensor, k: Tensor, v: Tensor, method) -> tuple[Tensor, list[int]]:
    """The outputs, and the bytes of the state after each piece."""
    state, outputs, sizes = None, [], []
    for parts in zip(*(x.split(pieces(TOKENS), -2) for x in (q, k, v)), strict=True):
        output, state = attention(*parts, is_causal=True, method=method, state=state, return_state=True)
        outputs.append(output)
        sizes.append(state.nbytes)
    return torch.cat(outputs, -2), sizes


def by_the_formula(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """(1, 1, rows, WIDTH): degree 2 in float64, from the pairs themselves: 1 + x + x^2/2 over the keys until then."""
    q, k, v = (x[0, 0].double() for x in (q, k, v))
    outputs = []
    for part in rows.split(100):
        x = q[part] @ k.mT / WIDTH**0.5
        w = (1 + x + x.square() / 2) * (torch.arange(len(k)) <= part[:, None])
        outputs.append(w @ v / w.sum(-1, keepdim=True))
    return torch.cat(outputs)[None, None]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


def in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fault: sums that are rounded to bfloat16 after every key. (n, e), for the last of the queries alone."""
    features = Taylor(2)(k[0, 0] * WIDTH**-0.25)
    values = torch.cat([v[0, 0], torch.ones_like(v[0, 0, :, :1])], -1)
    sums = torch.zeros(features.shape[-1], values.shape[-1], dtype=torch.bfloat16)
    for i in range(len(features)):
        sums = sums + features[i, :, None] * values[i]
    totals = Taylor(2)(q[0, 0, -1:] * WIDTH**-0.25) @ sums
    return totals[..., :-1] / totals[..., -1:]


def test_streaming_in_bfloat16_keeps_a_small_state_and_a_right_output():
    count = sum(pieces(TOKENS))
    q, k, v = tokens(count)
    rows = torch.cat([torch.arange(0, count, 41), torch.tensor([count - 1])])  # In chunks and in steps.
    expected = by_the_formula(q, k, v, rows)
    assert relative(in_bfloat16(q, k, v), expected[..., -1, :]) > 1e-2

    # The same numbers as float32 show the output before it is rounded to the dtype of the inputs.
    before_the_cast, sizes = streamed(q.float(), k.float(), v.float(), Taylor(2))
    assert relative(before_the_cast[..., rows, :], expected) <= 1e-5
    assert relative(before_the_cast[..., -1, :], expected[..., -1, :]) <= 1e-5
    rounded, half_sizes = streamed(q, k, v, Taylor(2))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, before_the_cast.bfloat16())
    assert set(sizes) == set(half_sizes) == {(Taylor(2).size(WIDTH) * (WIDTH + 1) + 1) * 4}


def test_a_state_that_grows_is_noticed():
    """The keys and values of `Exact` are all it knows."""
    _, sizes = streamed(*tokens(sum(pieces(TOKENS))), Exact())
    assert sizes[-1] > 19 * sizes[0]
