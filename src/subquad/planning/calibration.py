"""The machine, measured: a grid of calls, and the coefficients of `seconds` that fit their times, relatively.

All calls are measured one after another, in several turns: a disturbance of the machine then affects one turn only.
The time is limited. On a busy machine some calls are not measured; the calibration then says so in its note.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any

import torch

from subquad import native
from subquad._calls.call import Call
from subquad._engines import run
from subquad._engines.features.choose_form import is_fusable
from subquad.methods import Exact, Linear, Multipole, RandomFeatures, Separable, Taylor, Window
from subquad.methods.method import FeatureMethod
from subquad.planning.busyness import is_busy, load, note_on
from subquad.planning.progress import Progress, progress_line
from subquad.planning.reference import reference_coefficients, reference_seconds
from subquad.planning.seconds import EXACT_LENGTHS, EXACT_WIDTHS, Calibration, name_of, work
from subquad.planning.shape import Shape

__all__ = ["reference_calibration"]

TURNS = 3
MAX_RETRIES = 3  # of a calibration that other programs disturbed: some machines are never quiet
SETTLED = 1e-6  # change of the coefficients of a fit, which are at most about 1, that ends it
CALIBRATION_SECONDS = 25.0  # no call begins that would end later; the fit comes after it
# Size, length and width: short and long calls, windows that hold all keys, and narrow and wide heads.
WINDOW_CALLS = ((64, 512, 64), (1024, 512, 32), (256, 1024, 128), (64, 4096, 32), (256, 2048, 64), (1024, 4096, 64))
INPUT_OFFSET = 1000  # between the first numbers of queries, keys and values
LONG_CALL_SECONDS = 0.01  # a call this long is not repeated within a turn,
SLOW_CALL_SECONDS = 0.2  # and where it takes this long, to warm up is to measure


def grid() -> Iterator[tuple[Any, str, Shape]]:
    """Yield the calls that are measured: short ones, where starting costs most, and long ones."""
    for training in (False, True):
        for is_causal in (True, False):
            shape = Shape(0, 0, 0, 0, is_causal=is_causal, training=training)
            for d in EXACT_WIDTHS:
                for n in EXACT_LENGTHS:
                    yield Exact(), "exact", _sized(shape, n, d, 8 if n < 2048 else 4096 // n)
            if native.available():
                for d in (32, 64):
                    for n in (256, 1024, 4096):
                        yield Multipole(), "fused", _sized(shape, n, d, 8 if n < 2048 else 2)
                for size, n, d in WINDOW_CALLS:
                    yield Window(size, sinks=4), "fused", _sized(shape, n, d, 8 if n < 2048 else 2)
            yield from _feature_calls(shape)


def _feature_calls(shape: Shape) -> Iterator[tuple[FeatureMethod, str, Shape]]:
    """Yield the calls of feature methods, causal and trained as `shape` is."""
    methods: list[tuple[int, FeatureMethod]] = [
        (8, Taylor(4)), (16, Taylor(2)), (32, Taylor(2)), (64, Taylor(2)), (32, Taylor(0)), (128, Taylor(0)),
        (16, RandomFeatures(64)), (64, RandomFeatures(64)), (64, RandomFeatures(1024)), (128, RandomFeatures(256)),
        (16, Linear("elu")), (64, Linear("elu")), (128, Linear("elu")), (16, Separable()), (128, Separable()),
    ]  # fmt: skip
    for d, method in methods:
        # Long calls of many heads do not fit a cache; where there are few features, memory dominates the time.
        r = method.size(d)
        heads = 8 if r < 1000 else 2
        for n in (256, 512, 2048 if r <= 128 else 1024):
            yield method, "chunked", _sized(shape, n, d, heads)
        for n, few in ((128, 8), (512, 8), (1024 if r > 1000 else 2048, heads)):
            sized = _sized(shape, n, d, few)
            if is_fusable(method, sized.layout, torch.float32, is_causal=shape.is_causal):
                yield method, "fused", sized
        if shape.is_causal and method.normalizer != "feature":
            for n, few in ((128, 8), (768, 4)):
                yield method, "dense", _sized(shape, n, d, few)


@lru_cache(maxsize=2)
def _grid_once(with_kernels: bool) -> list[tuple[Any, str, Shape]]:
    return list(grid())


def grid_once() -> list[tuple[Any, str, Shape]]:
    """Return all calls of the grid."""
    return _grid_once(native.available())


def _sized(shape: Shape, length: int, width: int, heads: int) -> Shape:
    return replace(shape, query_length=length, key_length=length, head_dim=width, value_dim=width, heads=heads,
                   key_heads=heads)  # fmt: skip


def measured_seconds(
    method: Any, form: str | None, shape: Shape, device: torch.device, dtype: torch.dtype, known: float = math.inf
) -> float:
    """Return the best time of a few calls, in a given form or in the one that the call chooses.

    `known` is the best time before: a long call that was measured before is not warmed up.
    """
    sizes = [(shape.batch, shape.heads, shape.query_length, shape.head_dim)]
    sizes += [(shape.batch, shape.key_heads, shape.key_length, w) for w in (shape.head_dim, shape.value_dim)]
    noise = _noise(1 << max(math.prod(s) + 2 * INPUT_OFFSET for s in sizes).bit_length())
    inputs = [
        noise[i * INPUT_OFFSET :][: math.prod(s)].view(s).to(device, dtype, copy=True) for i, s in enumerate(sizes)
    ]
    for x in inputs:
        x.requires_grad_(shape.training)
    q, k, v = inputs

    def compute() -> None:
        call = Call.of(q, k, v, is_causal=shape.is_causal, enable_gqa=shape.heads != shape.key_heads)
        output = run(method, call, form).output
        if shape.training:
            torch.autograd.grad(output, inputs, torch.ones_like(output))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def timed() -> float:
        begin = time.perf_counter()
        compute()
        return time.perf_counter() - begin

    with torch.set_grad_enabled(shape.training):
        if not LONG_CALL_SECONDS < known < math.inf:  # Warm up, unless this is a long call that was measured before.
            first = timed()
            if first > SLOW_CALL_SECONDS:
                return first
        times = [timed()]
        while len(times) < 10 and sum(times) < LONG_CALL_SECONDS:
            times.append(timed())
    return min(times)


@lru_cache(maxsize=1)
def _noise(count: int) -> torch.Tensor:
    """Return numbers to measure with: drawing them takes longer than many calls."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.3


def calibrate(
    device: torch.device, dtype: torch.dtype = torch.float32, progress: Progress | None = None
) -> Calibration:
    """Measure this machine within half a minute; for kinds of calls that do not fit into it, scale a reference."""
    before, begin = load(), time.perf_counter()
    count, show = len(grid_once()), progress or progress_line(CALIBRATION_SECONDS)
    best, ratios, done = [math.inf] * count, [], 0
    usual = [reference_seconds(*call) for call in grid_once()]

    def is_affordable(i: int) -> bool:
        """Return whether the call and its warm-up should end in time, by what it or others have taken so far."""
        expected = best[i] if best[i] < math.inf else _pace(best, usual) * usual[i]
        return time.perf_counter() - begin + 2 * expected < CALIBRATION_SECONDS

    show(0, TURNS * count)
    for _ in range(TURNS):
        known = list(best)
        for i, seconds in enumerate(one_turn(best, device, dtype, is_affordable)):
            if seconds is not None and known[i] < math.inf:
                ratios.append(max(seconds, known[i]) / min(seconds, known[i]))
            done += 1
            show(done, TURNS * count)
    share = sum(seconds < math.inf for seconds in best) / count
    spread = median(ratios) if ratios else None
    note, retries = note_on(before, spread, share), MAX_RETRIES if is_busy(before, spread) else 0
    return replace(fitted(best, device.type), note=note, retries=retries)


def reference_calibration() -> Calibration:
    """Return the calibration by the reference figures, for a machine that was not measured."""
    note = " Times are rough: they are reference figures for two cores, because this machine is not calibrated."
    return Calibration({name_of(*call): reference_coefficients(*call) for call in grid_once()}, note=note)


def _pace(best: list[float], usual: list[float]) -> float:
    """Return how much longer calls take here than by the reference figures: the median of those that were measured."""
    ratios = [seconds / other for seconds, other in zip(best, usual, strict=True) if seconds < math.inf]
    return median(ratios) if ratios else 1.0


def one_turn(
    best: list[float], device: torch.device, dtype: torch.dtype, is_affordable: Callable[[int], bool] = lambda i: True
) -> Iterator[float | None]:
    """Measure each call of the grid once more, keep its best time in the list, and yield its time; None if left out."""
    for i, (method, form, shape) in enumerate(grid_once()):
        seconds = measured_seconds(method, form, shape, device, dtype, best[i]) if is_affordable(i) else None
        best[i] = best[i] if seconds is None else min(best[i], seconds)
        yield seconds


def fitted(best: list[float], device: str = "cpu") -> Calibration:
    """Return the coefficients that fit the best times of the grid's calls; infinite ones were not measured."""
    pace = _pace(best, [reference_seconds(*call) for call in grid_once()])
    kinds: dict[str, list[tuple[Any, float]]] = {}
    for call, seconds in zip(grid_once(), best, strict=True):
        kinds.setdefault(name_of(*call), []).append((call, seconds))
    return Calibration({name: _of_kind(calls, pace) for name, calls in kinds.items()}, device)


def _of_kind(calls: list[tuple[Any, float]], pace: float) -> list[float]:
    """Return the coefficients of calls of one kind: those that fit their times, or the reference figures, scaled.

    A fit to a part of the calls, or to times that do not grow with the work, would give long calls the time of short
    ones.
    """
    measured = [(call, seconds) for call, seconds in calls if seconds < math.inf]
    if len(measured) == len(calls):
        found = _fitted([(work(*call), seconds) for call, seconds in calls])
        if any(found[1:]):
            return found
    own = median(seconds / reference_seconds(*call) for call, seconds in measured) if measured else pace
    return [own * c for c in reference_coefficients(*calls[0][0])]


def _fitted(rows: list[tuple[list[float], float]]) -> list[float]:
    """Return coefficients >= 0 with the least sum of predicted/measured + measured/predicted: half and double count the
    same. By least squares, one coefficient after another, with weights from the previous fit."""
    parts = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    seconds = torch.tensor([measured for _, measured in rows], dtype=torch.float64)
    largest = (parts / seconds[:, None]).amax(0).clamp(min=1e-300)
    parts, predicted = parts / largest, seconds
    found = [0.0] * parts.shape[1]
    for _ in range(20):
        weights = (predicted.clamp(min=0.05 * seconds) * seconds).reciprocal()
        products, target = (parts.mT @ (parts * weights[:, None])).tolist(), (parts.mT @ (weights * seconds)).tolist()
        fit = found
        for _ in range(50):
            before, fit = fit, list(fit)
            for i, row in enumerate(products):
                if row[i] > 0:
                    rest = math.fsum(a * c for a, c in zip(row, fit, strict=True)) - row[i] * fit[i]
                    fit[i] = max(0.0, (target[i] - rest) / row[i])
            if math.dist(fit, before) < SETTLED:
                break
        if math.dist(fit, found) < SETTLED:
            break
        found, predicted = fit, parts @ torch.tensor(fit, dtype=torch.float64)
    return [c / top for c, top in zip(found, largest.tolist(), strict=True)]
