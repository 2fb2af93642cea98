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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows has none: there two processes may measure at once.
    fcntl = None  # type: ignore[assignment]

from subquad._attention import Form, attend, choose_form
from subquad._features import Exact, Linear, RandomFeatures, Taylor
from subquad._layout import Layout
from subquad._methods import Approximation, Named
from subquad._separable import Separable
from subquad._work import seen_pairs

EXACT_LENGTHS, EXACT_WIDTHS = (128, 256, 512, 1024, 2048, 4096), (16, 64, 128)
TURNS = 3  # All calls are measured one after another, and again: what disturbs the machine for a while meets one turn.
ENOUGH = 26.0  # seconds, after which the later turns are not ended
APART = 1000  # between the numbers that queries, keys and values begin with
LONG = 0.01  # seconds of a call that needs no repeating within a turn
VERSION = 4  # of the file and of the work that the coefficients are for
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
        length, width = math.sqrt(shape.query_length * shape.key_length), (d + e) / 2
        # Beyond the table a pair costs what its products do; and a call costs at least what its smallest one did.
        units = max(pairs * max(1.0, width / EXACT_WIDTHS[-1]), EXACT_LENGTHS[0] ** 2)
        return [units * a * b for a in _between(EXACT_LENGTHS, length) for b in _between(EXACT_WIDTHS, width)]
    r = method.size(d)
    powers = method.degree if isinstance(method, Taylor) else 1
    pair = d if isinstance(method, Taylor) and method.basis == "symmetric" else r
    sizes = choose_form(method, shape.layout, shape.is_causal, False, False, None, None)[1]
    if form == "dense":  # Blocks of rows, each with all the keys up to its last row.
        if shape.is_causal:
            pairs = shape.batch * shape.heads * seen_pairs(shape.query_length, shape.key_length, sizes.rows)
        return [1.0, pairs * (pair + e), pairs * (1 + powers), tokens * r * (d if pair == r else 1), tokens * (d + e)]
    batches = -(-shape.batch * shape.key_heads // sizes.batch)
    heads = min(sizes.batch, shape.batch * shape.key_heads)
    wave = max(sizes.chunk, sizes.wave) if heads == shape.batch * shape.key_heads else sizes.wave
    waves = batches * -(-max(shape.query_length, shape.key_length) // max(1, wave))
    chunked = min(shape.query_length, shape.key_length)  # Later queries only read, and later keys nobody sees.
    inside = shape.batch * shape.heads * chunked * sizes.chunk if shape.is_causal else 0.0
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
        (16, RandomFeatures(64)), (64, RandomFeatures(64)), (64, RandomFeatures(1024)), (128, RandomFeatures(256)),
        (16, Linear("elu")), (64, Linear("elu")), (128, Linear("elu")), (16, Separable()), (128, Separable()),
    ]  # fmt: skip
    for training in (False, True):
        for is_causal in (True, False):
            shape = Shape(0, 0, 0, 0, is_causal=is_causal, training=training)
            for d in EXACT_WIDTHS:
                for n in EXACT_LENGTHS:
                    yield Exact(), "exact", _sized(shape, n, d, 8 if n < 2048 else 4096 // n)
            for d, method in methods:
                # Long calls of many heads fit into no cache; where there are few features, memory takes the time.
                r = method.size(d)
                heads = 8 if r < 1000 else 2
                for n in (256, 512, 2048 if r <= 128 else 1024):
                    yield method, "chunked", _sized(shape, n, d, heads)
                if is_causal and not isinstance(method, Separable):
                    for n, few in ((128, 8), (768, 4)):
                        yield method, "dense", _sized(shape, n, d, few)


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
    count, show = len(_grid_once()), progress or (lambda done, total: None)
    best, begin = [math.inf] * count, time.perf_counter()
    show(0, TURNS * count)
    turns = (one_turn(best, device, dtype) for _ in range(TURNS))
    for done, _ in enumerate(chain.from_iterable(turns), 1):
        show(done, TURNS * count)
        if done >= count and time.perf_counter() - begin > ENOUGH:
            break
    if done < TURNS * count:
        show(TURNS * count, TURNS * count)
    return fitted(best)


def one_turn(best: list[float], device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Measures each call of the grid once more, and keeps its best time in the list; stops after each of them."""
    for i, (method, form, shape) in enumerate(_grid_once()):
        best[i] = measured_seconds(method, form, shape, device, dtype, best[i])
        yield


def fitted(best: list[float]) -> Calibration:
    """The coefficients that the best times of the grid's calls make likely."""
    rows: dict[str, list[tuple[list[float], float]]] = {}
    for call, seconds in zip(_grid_once(), best, strict=True):
        rows.setdefault(_name(*call), []).append((work(*call), seconds))
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
    device = usable(device)
    found = cached(device, dtype)
    if found is not None:
        return found
    of = machine(device, dtype)
    try:
        path = _file(of)
    except RuntimeError as error:  # There is no home.
        raise _cannot_write(error) from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            return cached(device, dtype) or _calibrate_into(path, of, partial(calibrate, device, dtype, progress))
    except OSError as error:
        raise _cannot_write(error) from None


def _calibrate_into(path: Path, of: dict[str, str | int], measure: Callable[[], Calibration]) -> Calibration:
    handle, temporary = tempfile.mkstemp(prefix=".calibration-", dir=path.parent)  # Before the work is done in vain.
    os.close(handle)
    try:
        made = measure()
        with open(temporary, "w") as file:
            json.dump({"machine": of, "coefficients": made.coefficients}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return made


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process at a time: two that measure at once measure each other."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # Also given back when the process is killed.
        yield
    finally:
        os.close(handle)


def usable(device: torch.device | str) -> torch.device:
    """The device, if torch can compute on it here."""
    try:
        found = torch.zeros(1, device=device)
        found.tolist()  # Not on "meta", where nothing is computed.
        return found.device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"device: expected one that torch can use here, got {device!r}: {why}") from None


def _cannot_write(error: Exception) -> PermissionError:
    return PermissionError(
        f"cache: cannot write the calibration of this machine ({error}); set SUBQUAD_CACHE to a folder for it"
    )
