"""The machine, measured: a grid of calls, and the coefficients of `_times` that fit their times, relatively.

All calls are measured one after another, and again: what disturbs the machine for a while meets one turn.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from subquad._attention import attend
from subquad._dispatch import fusable
from subquad._features import Exact, Linear, RandomFeatures, Taylor
from subquad._methods import Approximation, Named
from subquad._multipole import Multipole
from subquad._separable import Separable
from subquad._times import EXACT_LENGTHS, EXACT_WIDTHS, Calibration, Shape, name_of, work
from subquad.native._library import AVAILABLE

TURNS = 3
ENOUGH = 26.0  # seconds, after which the later turns are not ended
APART = 1000  # between the numbers that queries, keys and values begin with
LONG = 0.01  # seconds of a call that needs no repeating within a turn
Progress = Callable[[int, int], None]  # (calls measured, calls in all)


def grid() -> Iterator[tuple[Named, str, Shape]]:
    """The calls that are measured: short ones, where starting costs most, and long ones."""
    methods: list[tuple[int, Approximation]] = [
        (8, Taylor(4)), (16, Taylor(2)), (32, Taylor(2)), (64, Taylor(2)), (32, Taylor(0)), (128, Taylor(0)),
        (16, RandomFeatures(64)), (64, RandomFeatures(64)), (64, RandomFeatures(1024)), (128, RandomFeatures(256)),
        (16, Linear("elu")), (64, Linear("elu")), (128, Linear("elu")), (16, Separable()), (128, Separable()),
    ]  # fmt: skip
    for training in (False, True):
        for is_causal in (True, False):
            shape = Shape(0, 0, 0, 0, is_causal=is_causal, training=training)
            for d in EXACT_WIDTHS:
                for n in EXACT_LENGTHS:
                    yield Exact(), "exact", _sized(shape, n, d, 8 if n < 2048 else 4096 // n)
            if AVAILABLE and not training:
                for d in (32, 64):
                    for n in (256, 1024, 4096):
                        yield Multipole(), "multipole", _sized(shape, n, d, 8 if n < 2048 else 2)
            for d, method in methods:
                # Long calls of many heads fit into no cache; where there are few features, memory takes the time.
                r = method.size(d)
                heads = 8 if r < 1000 else 2
                for n in (256, 512, 2048 if r <= 128 else 1024):
                    yield method, "chunked", _sized(shape, n, d, heads)
                for n, few in ((128, 8), (512, 8), (1024 if r > 1000 else 2048, heads)):
                    if fusable(method, _sized(shape, n, d, few).layout, is_causal):
                        yield method, "fused", _sized(shape, n, d, few)
                if is_causal and not isinstance(method, Separable):
                    for n, few in ((128, 8), (768, 4)):
                        yield method, "dense", _sized(shape, n, d, few)


@lru_cache(maxsize=1)
def grid_once() -> list[tuple[Named, str, Shape]]:
    return list(grid())


def _sized(shape: Shape, length: int, width: int, heads: int) -> Shape:
    return replace(shape, query_length=length, key_length=length, head_dim=width, value_dim=width, heads=heads,
                   key_heads=heads)  # fmt: skip


def measured_seconds(
    method: Named, form: str | None, shape: Shape, device: torch.device, dtype: torch.dtype, known: float = math.inf
) -> float:
    """The best of a few calls, in a given form or in the one that the call chooses, and of what was `known` before."""
    sizes = [(shape.batch, shape.heads, shape.query_length, shape.head_dim)]
    sizes += [(shape.batch, shape.key_heads, shape.key_length, w) for w in (shape.head_dim, shape.value_dim)]
    noise = _noise(1 << max(math.prod(s) + 2 * APART for s in sizes).bit_length())
    inputs = [noise[i * APART :][: math.prod(s)].view(s).to(device, dtype, copy=True) for i, s in enumerate(sizes)]
    for x in inputs:
        x.requires_grad_(shape.training)
    q, k, v = inputs
    chosen: Any = None if form == "exact" else form

    def call() -> None:
        output = attend(q, k, v, None, 0.0, shape.is_causal, None, shape.heads != shape.key_heads, method, None, None,
                        None, False, chosen)[0]  # fmt: skip
        if shape.training:
            torch.autograd.grad(output, inputs, torch.ones_like(output))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    with torch.set_grad_enabled(shape.training):
        if not LONG < known < math.inf:  # A first call warms up; a long one that was measured before is called once.
            call()
        best, spent, count = known, 0.0, 0
        while count < 1 or (count < 10 and spent < LONG):
            begin = time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
            best, spent, count = min(best, seconds), spent + seconds, count + 1
    return best


@lru_cache(maxsize=1)
def _noise(count: int) -> torch.Tensor:
    """Numbers to measure with: making them takes longer than many a call."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.3


def calibrate(
    device: torch.device, dtype: torch.dtype = torch.float32, progress: Progress | None = None
) -> Calibration:
    """Measure this machine: under half a minute."""
    count, show = len(grid_once()), progress or (lambda done, total: None)
    best, begin = [math.inf] * count, time.perf_counter()
    show(0, TURNS * count)
    turns = (one_turn(best, device, dtype) for _ in range(TURNS))
    for done, _ in enumerate(chain.from_iterable(turns), 1):
        show(done, TURNS * count)
        if done >= count and time.perf_counter() - begin > ENOUGH:
            break
    if done < TURNS * count:
        show(TURNS * count, TURNS * count)
    return fitted(best, device.type)


def one_turn(best: list[float], device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Measures each call of the grid once more, and keeps its best time in the list; stops after each of them."""
    for i, (method, form, shape) in enumerate(grid_once()):
        best[i] = measured_seconds(method, form, shape, device, dtype, best[i])
        yield


def fitted(best: list[float], device: str = "cpu") -> Calibration:
    """The coefficients that the best times of the grid's calls make likely."""
    rows: dict[str, list[tuple[list[float], float]]] = {}
    for call, seconds in zip(grid_once(), best, strict=True):
        rows.setdefault(name_of(*call), []).append((work(*call), seconds))
    return Calibration({name: _fitted(found) for name, found in rows.items()}, device)


def _fitted(rows: list[tuple[list[float], float]]) -> list[float]:
    """Coefficients >= 0 with the least sum of predicted/measured + measured/predicted: half and double count alike.

    By least squares, one coefficient after another, with weights from the fit before.
    """
    parts = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    seconds = torch.tensor([measured for _, measured in rows], dtype=torch.float64)
    largest = (parts / seconds[:, None]).amax(0).clamp(min=1e-300)
    parts, predicted = parts / largest, seconds
    found = [0.0] * parts.shape[1]
    for _ in range(20):
        weights = (predicted.clamp(min=0.05 * seconds) * seconds).reciprocal()
        products, target = (parts.mT @ (parts * weights[:, None])).tolist(), (parts.mT @ (weights * seconds)).tolist()
        for _ in range(50):
            for i, row in enumerate(products):
                if row[i] > 0:
                    rest = math.fsum(a * c for a, c in zip(row, found, strict=True)) - row[i] * found[i]
                    found[i] = max(0.0, (target[i] - rest) / row[i])
        predicted = parts @ torch.tensor(found, dtype=torch.float64)
    return [c / top for c, top in zip(found, largest.tolist(), strict=True)]
