"""How long a call takes on this machine, from its shape: measured once, kept in the user's cache folder.

    seconds = sum_i c_i * work_i(shape)      c_i >= 0, one set for each family of methods, form and direction

The work is what a form does: products of pairs, products with features, elements that are made, waves that are started.
The coefficients are fitted, relatively, to a grid of measured calls. A cache that is damaged, or of another machine,
version or number of threads, is made anew.
"""

import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from subquad._attention import Form, attend, choose_form
from subquad._features import Exact, Linear, RandomFeatures, Taylor
from subquad._layout import Layout
from subquad._methods import Approximation, Named
from subquad._separable import Separable

EXACT_LENGTHS, EXACT_WIDTHS = (128, 256, 512, 1024, 2048, 4096), (16, 64, 128)
TURNS = 2  # All calls are measured one after another, and again: what disturbs the machine for a while meets one turn.
VERSION = 3  # of the file and of the work that the coefficients are for
Progress = Callable[[int, int], None]  # (calls measured, calls in all)


@dataclass(frozen=True)
class Shape:
    """The sizes of a call."""

    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    heads: int = 1
    key_heads: int = 1
    batch: int = 1
    is_causal: bool = False
    training: bool = False

    @property
    def layout(self) -> Layout:
        group = self.heads // self.key_heads
        return Layout((self.batch,), self.key_heads, group, self.query_length, self.key_length, self.head_dim,
                      self.value_dim, torch.device("cpu"))  # fmt: skip

    @property
    def pairs(self) -> int:
        """Queries and keys that see each other, over all heads."""
        n, m = self.query_length, self.key_length
        both = min(n, m)
        seen = both * (both + 1) // 2 + (n - both) * m if self.is_causal else n * m
        return self.batch * self.heads * seen


def form_of(method: Approximation, shape: Shape) -> Form:
    """The form that `attention` takes by itself."""
    return choose_form(method, shape.layout, shape.is_causal, False, False, None, None)[0]


def family(method: Named) -> str:
    """Methods whose calls do the same kind of work."""
    names = {Exact: "exact", Taylor: "taylor", RandomFeatures: "random", Separable: "separable"}
    return names.get(type(method), "linear")


def work(method: Named, form: str, shape: Shape) -> list[float]:
    """What a call does, in the units that its coefficients are for."""
    d, e, pairs = shape.head_dim, shape.value_dim, shape.pairs
    queries = shape.batch * shape.heads * shape.query_length
    tokens = (queries + shape.batch * shape.key_heads * shape.key_length) / 2
    if isinstance(method, Exact):
        # torch's kernel works in blocks, and its price of a pair jumps with the length: a table says it, no sum does.
        length = math.sqrt(shape.query_length * shape.key_length)
        return [pairs * a * b for a in _between(EXACT_LENGTHS, length) for b in _between(EXACT_WIDTHS, (d + e) / 2)]
    r = method.size(d)
    powers = method.degree if isinstance(method, Taylor) else 1
    pair = d if isinstance(method, Taylor) and method.basis == "symmetric" else r
    sizes = choose_form(method, shape.layout, shape.is_causal, False, False, None, None)[1]
    if form == "dense":  # Blocks of rows, each with all the keys up to its last row.
        if shape.is_causal:
            pairs = pairs + shape.batch * shape.heads * shape.query_length * (sizes.rows - 1) // 2
        return [1.0, pairs * (pair + e), pairs * (1 + powers), tokens * r * (d if pair == r else 1), tokens * (d + e)]
    batches = -(-shape.batch * shape.key_heads // sizes.batch)
    heads = min(sizes.batch, shape.batch * shape.key_heads)
    wave = max(sizes.chunk, sizes.wave) if heads == shape.batch * shape.key_heads else sizes.wave
    waves = batches * -(-max(shape.query_length, shape.key_length) // max(1, wave))
    inside = tokens * sizes.chunk if shape.is_causal else 0.0
    alone = shape.is_causal and shape.query_length <= sizes.chunk  # One chunk: no sums, and maybe no features.
    made = 0.0 if alone and pair == d else tokens * r
    return [
        1.0,
        waves * (1 + (d * (powers - 1) if powers > 1 else 0)),  # Taylor makes products variable by variable.
        made * (d if isinstance(method, RandomFeatures) else 1),
        0.0 if alone else tokens * r * (e + 1),
        made,
        inside * (pair + e),
        inside,
        tokens * (d + e),
    ]


def _between(places: Sequence[int], x: float) -> list[float]:
    """How much x, on a logarithmic scale, is of each place: of one, or of the two beside it."""
    x = min(max(x, places[0]), places[-1])
    weights = [0.0] * len(places)
    for i, (low, high) in enumerate(pairwise(places)):
        if low <= x <= high:
            weights[i + 1] = math.log(x / low) / math.log(high / low)
            weights[i] = 1 - weights[i + 1]
            break
    return weights


@dataclass(frozen=True)
class Calibration:
    """Coefficients by "family/form/direction"."""

    coefficients: dict[str, list[float]]

    def seconds(self, method: Named, shape: Shape, form: str | None = None) -> float:
        """Of one call; in the form that `attention` takes by itself, or in the given one."""
        if isinstance(method, Exact):
            form = "exact"
        else:
            form = form_of(method, shape) if form is None else form
        parts = work(method, form, shape)
        return math.fsum(c * w for c, w in zip(self.coefficients[_name(method, form, shape)], parts, strict=True))


def _name(method: Named, form: str, shape: Shape) -> str:
    order = "" if form == "dense" else "causal/" if shape.is_causal else "open/"
    return f"{family(method)}/{form}/{order}{'training' if shape.training else 'forward'}"


# --- Measuring -------------------------------------------------------------------------------------------------------


def grid() -> Iterator[tuple[Named, str, Shape]]:
    """The calls that are measured: short ones, where starting costs most, and long ones."""
    methods: list[tuple[int, Approximation]] = [
        (8, Taylor(4)), (16, Taylor(2)), (32, Taylor(2)), (64, Taylor(2)), (32, Taylor(0)), (128, Taylor(0)),
        (16, RandomFeatures(512)), (64, RandomFeatures(64)), (64, RandomFeatures(1024)), (128, RandomFeatures(256)),
        (16, Linear("elu")), (128, Linear("elu")), (16, Separable()), (128, Separable()),
    ]  # fmt: skip
    for training in (False, True):
        for is_causal in (True, False):
            shape = Shape(0, 0, 0, 0, is_causal=is_causal, training=training)
            for d in EXACT_WIDTHS:
                for n in EXACT_LENGTHS:
                    yield Exact(), "exact", _sized(shape, n, d, 8 if n < 2048 else 2)
            for d, method in methods:
                long = max(1024, min(2048, (1 << 21) // method.size(d)))
                for n, heads in ((256, 8), (512, 8 if method.size(d) < 1000 else 2), (long, 2)):
                    yield method, "chunked", _sized(shape, n, d, heads)
                if is_causal and not isinstance(method, Separable):
                    for n, heads in ((128, 8), (768, 4)):
                        yield method, "dense", _sized(shape, n, d, heads)


def _sized(shape: Shape, length: int, width: int, heads: int) -> Shape:
    return replace(shape, query_length=length, key_length=length, head_dim=width, value_dim=width, heads=heads,
                   key_heads=heads)  # fmt: skip


def measured_seconds(method: Named, form: str | None, shape: Shape, device: torch.device, dtype: torch.dtype) -> float:
    """The best of a few calls, in a given form or in the one that the call chooses."""
    sizes = [(shape.batch, shape.heads, shape.query_length, shape.head_dim)]
    sizes += [(shape.batch, shape.key_heads, shape.key_length, w) for w in (shape.head_dim, shape.value_dim)]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator).mul(0.3).to(device, dtype) for s in sizes]
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
        call()
        best, spent, count = math.inf, 0.0, 0
        while count < 1 or (count < 5 and spent < 0.01):
            begin = time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
            best, spent, count = min(best, seconds), spent + seconds, count + 1
    return best


def calibrate(
    device: torch.device, dtype: torch.dtype = torch.float32, progress: Progress | None = None
) -> Calibration:
    """Measure this machine: under half a minute."""
    calls = list(grid())
    best: dict[int, float] = {}
    for turn in range(TURNS):
        for i, (method, form, shape) in enumerate(calls):
            if progress is not None:
                progress(turn * len(calls) + i, TURNS * len(calls))
            best[i] = min(best.get(i, math.inf), measured_seconds(method, form, shape, device, dtype))
    if progress is not None:
        progress(TURNS * len(calls), TURNS * len(calls))
    rows: dict[str, list[tuple[list[float], float]]] = {}
    for i, call in enumerate(calls):
        rows.setdefault(_name(*call), []).append((work(*call), best[i]))
    return Calibration({name: _fitted(found) for name, found in rows.items()})


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


# --- The cache -------------------------------------------------------------------------------------------------------


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, str | int]:
    """All that a calibration holds for."""
    if device.type == "cpu":
        name = _cpu()
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "version": VERSION, "device": f"{device.type}: {name}", "dtype": str(dtype), "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }  # fmt: skip


@lru_cache(maxsize=1)
def _cpu() -> str:
    """The processor's model and number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model or platform.processor()} x{os.cpu_count()}"


def cache_folder() -> Path:
    """$SUBQUAD_CACHE, or `subquad` in the user's cache folder."""
    if own := os.environ.get("SUBQUAD_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "subquad"


def _file(of: dict[str, str | int]) -> Path:
    words = "-".join(str(of[part]) for part in ("device", "dtype", "threads", "torch"))
    return cache_folder() / f"calibration-{''.join(c if c.isalnum() or c in '.-' else '_' for c in words)}.json"


def cached(device: torch.device, dtype: torch.dtype = torch.float32) -> Calibration | None:
    """The calibration that an earlier run has left, if it is whole and of this machine."""
    of = machine(device, dtype)
    try:
        path = _file(of)
        changed = path.stat().st_mtime_ns
    except (OSError, RuntimeError):  # No such file, or no home.
        return None
    return _read(path, changed, json.dumps(of))


@lru_cache(maxsize=8)
def _read(path: Path, changed: int, of: str) -> Calibration | None:
    names = {_name(*call) for call in _grid_once()}
    lengths = {_name(*call): len(work(*call)) for call in _grid_once()}
    try:
        content = json.loads(path.read_text())
        found = content["coefficients"]
        whole = (
            content["machine"] == json.loads(of)
            and found.keys() == names
            and all(len(found[name]) == lengths[name] for name in names)
            and all(isinstance(c, float) and 0 <= c < math.inf for row in found.values() for c in row)
            and all(any(row) for row in found.values())
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return Calibration(found) if whole else None


@lru_cache(maxsize=1)
def _grid_once() -> list[tuple[Named, str, Shape]]:
    return list(grid())


def calibration(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, progress: Progress | None = None
) -> Calibration:
    """From the cache, or measured now and put there."""
    device = torch.device(device)
    found = cached(device, dtype)
    if found is not None:
        return found
    of = machine(device, dtype)
    try:
        path = _file(of)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            prefix=".calibration-", dir=path.parent
        )  # Before the work is done in vain.
        os.close(handle)
    except (OSError, RuntimeError) as error:
        raise _cannot_write(error) from None
    try:
        made = calibrate(device, dtype, progress)
        with open(temporary, "w") as file:
            json.dump({"machine": of, "coefficients": made.coefficients}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(error) from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    return made


def _cannot_write(error: Exception) -> PermissionError:
    return PermissionError(
        f"cache: cannot write the calibration of this machine ({error}); set SUBQUAD_CACHE to a folder for it"
    )
