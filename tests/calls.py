"""Calls that many tests make: the methods, inputs and masks, a call in the form of the test's choice, and comparisons.

The tests that use them show where linear attention goes wrong elsewhere, and that it does not here. Most hold the
faulty formula as a small function beside a check: the check must reject the formula before its word on the library
counts for anything.

Axes: b batch, h heads, n queries, m keys, d width, e value width, r features.
"""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from subquad import Linear, RandomFeatures, Separable, State, Taylor
from subquad._calls.call import Call
from subquad._engines import run

NAN, INF = float("nan"), float("inf")


class Squares:
    """A user's own map: positive, and with a log-scale of its own."""

    positive = True

    def size(self, width: int) -> int:
        return width + 1

    def __call__(self, x: Tensor, *, is_query: bool) -> tuple[Tensor, Tensor]:
        return F.pad(x.square(), (1, 0), value=0.1), x.sum(-1) / 4


METHODS = {
    "taylor": Taylor(2),
    "odd taylor": Taylor(3),
    "positive": RandomFeatures(16),
    "hyperbolic": RandomFeatures(16, "hyperbolic"),
    "scaled": RandomFeatures(15, coupling="simplex", scale=-0.12),
    "scaled hyperbolic": RandomFeatures(18, "hyperbolic", scale="auto"),
    "trigonometric": RandomFeatures(16, "trigonometric"),
    "identity": Linear("identity"),
    "elu": Linear("elu"),
    "relu": Linear("relu"),
    "separable": Separable(),
    "own map": Squares(),
}
FITTED = {  # at width 4
    "fitted taylor": Taylor(2, key_shift=[0.5, -0.25, 0.1, 0.3], query_shift=[0.7, 1.1, -0.9, 0.4]),
    "fitted features": RandomFeatures(16, key_shift=[0.5, -0.25, 0.1, 0.3], balance=[2.0, 0.5, 1.0, 1.5]),
}
ALL_METHODS = METHODS | FITTED
RANDOM = [name for name, method in METHODS.items() if isinstance(method, RandomFeatures)]

SAMPLE_LENGTH = 70  # tokens of calls whose rows are sampled
_KEEP = torch.rand(2, SAMPLE_LENGTH, generator=torch.Generator().manual_seed(1)) > 0.2
SAMPLE_MASKS = {
    "open": {},
    "causal": dict(is_causal=True),
    "padded": dict(key_padding_mask=_KEEP, is_causal=True),
    "masked": dict(attn_mask=_KEEP[:, None, None, :]),
    "packed": dict(segment_ids=(torch.arange(SAMPLE_LENGTH) // 30).expand(2, -1), key_padding_mask=_KEEP),
    "scaled": dict(scale=0.3),
}

by_method = pytest.mark.parametrize("name", METHODS)
by_any_method = pytest.mark.parametrize("name", ALL_METHODS)  # also those that are fitted to width 4
by_causal_form = pytest.mark.parametrize("form", ["dense", "chunked", "fused"])

SEGMENTS = torch.tensor([0] * 5 + [7] + [0] * 9 + [2] * 6)  # The same id after another one is a new segment.
KEEP = torch.tensor([i not in (0, 1, 8, 9, 20) for i in range(21)])
MASKS = {
    "none": {"is_causal": False},
    "padding": {"is_causal": False, "keep": KEEP.expand(2, -1)},
    "causal": {"is_causal": True},
    "causal, padding": {"is_causal": True, "keep": KEEP.expand(2, -1)},
    "segments": {"is_causal": False, "segments": SEGMENTS.expand(2, -1)},
    "causal, segments": {"is_causal": True, "segments": SEGMENTS.expand(2, -1), "keep": KEEP.expand(2, -1)},
}
by_mask = pytest.mark.parametrize("mask", MASKS)


def forms_of(mask: str) -> tuple[str, ...]:
    """Those beside the dense one."""
    return ("chunked", "fused", "step") if MASKS[mask]["is_causal"] else ("linear", "fused")


def visible(mask: str, n: int = 21) -> Tensor:
    """(n, n): which key each row may see."""
    options, seen = MASKS[mask], torch.ones(n, n, dtype=torch.bool)
    if options["is_causal"]:
        seen = seen.tril()
    if "segments" in options:
        runs = (SEGMENTS.diff(prepend=SEGMENTS[:1]) != 0).cumsum(0)
        seen = seen & (runs[:, None] == runs)
    return seen & KEEP if "keep" in options else seen


def normal(*shape: int, seed: int = 0, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(std).to(dtype)


def normal_inputs(*batch: int, n: int, m: int | None = None, d: int = 4, e: int = 3, **options) -> list[Tensor]:
    lengths, widths = (n, n if m is None else m, n if m is None else m), (d, d, e)
    seed = options.pop("seed", 0)
    shapes = zip(lengths, widths, strict=True)
    return [normal(*batch, *shape, seed=3 * seed + i, **options) for i, shape in enumerate(shapes)]


def attended(
    method,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str | None = None,
    chunk: int | None = None,
    is_causal: bool = True,
    keep: Tensor | None = None,
    segments: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
) -> tuple[Tensor, State | None]:
    """Return the output and the state, in the form of the test's choice; query heads share key heads if there are
    fewer."""
    grouped = q.dim() > 2 and q.shape[-3] != k.shape[-3]
    call = Call.of(
        q, k, v, is_causal=is_causal, enable_gqa=grouped, key_padding_mask=keep, segment_ids=segments, state=state,
        return_state=return_state,
    )  # fmt: skip
    output, state, _ = run(method, call, form=form, chunk=chunk)
    return output, state


def resumed(
    method, q: Tensor, k: Tensor, v: Tensor, *, pieces: list[int], keep=None, segments=None, **options
) -> tuple[Tensor, State]:
    """The sequence cut into pieces of the given lengths, each resumed from the state of those before it."""

    def cut(x: Tensor | None, dim: int) -> list:
        return [None] * len(pieces) if x is None else list(x.split(pieces, dim))

    state, outputs = None, []
    parts = zip(*(cut(x, -2) for x in (q, k, v)), *(cut(x, -1) for x in (keep, segments)), strict=True)
    for q_part, k_part, v_part, keep_part, segments_part in parts:
        output, state = attended(
            method, q_part, k_part, v_part, keep=keep_part, segments=segments_part, state=state, return_state=True,
            **options,
        )  # fmt: skip
        outputs.append(output)
    return torch.cat(outputs, -2), state


def in_form(form: str, method, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """One output in any of the four forms, the chunked one in short chunks."""
    if form == "step":
        return resumed(method, q, k, v, pieces=[1] * q.shape[-2], form="step", **options)[0]
    return attended(method, q, k, v, form=form, chunk=4, **options)[0]


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor, rows: Tensor | None = None) -> list[Tensor]:
    """The output, and the gradients of a loss in which each of its numbers counts differently; those of `rows` only."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    output = function(*inputs)
    counts = torch.arange(output.numel()).reshape(output.shape).add(1).sin().to(output)
    if rows is not None:
        counts = counts * rows[..., None]
    return [output.detach(), *torch.autograd.grad(output, inputs, counts)]


def relative(found: Tensor, expected: Tensor) -> float:
    """RMS(difference) / RMS(expected); infinite where something is not finite, so that no comparison lets it pass."""
    found, expected = found.double(), expected.double()
    ratio = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    return ratio.nan_to_num(INF).item()


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int32) == b.view(torch.int32)


def totals(state: State) -> Tensor:
    """(..., r, e + 1): the sums with their normalizer, whatever log-scale they are kept at."""
    return state.sums if state.log_scale is None else state.sums * state.log_scale.exp()[..., None]


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def allocated(call: Callable[[], object]) -> int:
    """Return the most that torch's allocator has handed out at one time during the call."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))
