"""How long a call takes, from its shape and a calibration of the machine.

    seconds = sum_i c_i * work_i(shape)      c_i >= 0, one set for each family of methods, form and direction

The work is what a form does: products of pairs, products with features, numbers that are made, waves that are started.
The coefficients c come from `calibration`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from subquad._engines import engine_of
from subquad._engines.features.choose_form import sizes_of
from subquad.methods import label_of
from subquad.methods.hybrid import Hybrid
from subquad.methods.method import FeatureMethod, Method, feature_method
from subquad.methods.multipole import Multipole
from subquad.methods.sparse import SparseMethod
from subquad.planning.feature_cost import form_of
from subquad.planning.flops import kernel_schedule
from subquad.planning.hybrid_cost import far_shape
from subquad.planning.multipole_cost import met, segment_flops
from subquad.planning.shape import Shape, seen_pairs
from subquad.planning.sparse_pairs import pairs_of

__all__ = ["Calibration"]

EXACT_LENGTHS, EXACT_WIDTHS = (128, 256, 512, 1024, 2048, 4096), (16, 64, 128)
SPARSE_BLOCK_ROWS, SPARSE_TILE_ROWS = 6, 256  # rows that the native kernels of `Window` compute together


def family(method: Any) -> str:
    """Return the name of the methods whose calls do the same kind of work; users' maps are in the linear family."""
    return method.family if isinstance(method, Method) else "linear"


def work(method: Any, form: str, shape: Shape) -> list[float]:
    """Return what a call does, in the units of its coefficients."""
    engine = engine_of(method)
    if engine == "exact":
        return _exact_work(shape)
    if engine == "multipole":
        return _multipole_work(method, shape)
    if engine == "sparse":
        return _sparse_work(method, shape)
    features = feature_method(method)
    by_form = {"fused": _fused_work, "dense": _dense_work}
    return by_form.get(form, _chunked_work)(features, shape)


def _tokens(shape: Shape) -> tuple[int, float]:
    """Return the number of queries, and the mean of the numbers of queries and keys, over all heads."""
    queries = shape.batch * shape.heads * shape.query_length
    return queries, (queries + shape.batch * shape.key_heads * shape.key_length) / 2


def _exact_work(shape: Shape) -> list[float]:
    # torch's kernel works in blocks, and its price of a pair jumps with the length: a table fits it, a sum does not.
    d, e = shape.head_dim, shape.value_dim
    length, width = math.sqrt(shape.query_length * shape.key_length), (d + e) / 2
    # Beyond the table a pair costs what its products do; and a call costs at least what its smallest one did.
    units = max(shape.pairs * max(1.0, width / EXACT_WIDTHS[-1]), EXACT_LENGTHS[0] ** 2)
    return [units * a * b for a in _between(EXACT_LENGTHS, length) for b in _between(EXACT_WIDTHS, width)]


def _multipole_work(method: Multipole, shape: Shape) -> list[float]:
    width, (queries, tokens) = shape.head_dim + shape.value_dim, _tokens(shape)
    reads = shape.batch * shape.heads * met(method, shape) * width
    return [1.0, reads, queries, shape.batch * shape.key_heads * segment_flops(method, shape), tokens * width]


def _sparse_work(method: SparseMethod, shape: Shape) -> list[float]:
    """Count pairs: a block of rows reads every key that one of its rows attends to, and so do tiles in other passes."""
    width, queries = shape.head_dim + shape.value_dim, _tokens(shape)[0]
    by_blocks, by_tiles = (pairs_of(method, shape, rows) for rows in (SPARSE_BLOCK_ROWS, SPARSE_TILE_ROWS))
    return [1.0, by_blocks * width, by_blocks, by_tiles * width, queries]


def _pair_width(method: FeatureMethod, shape: Shape) -> int:
    """Return the multiplications of one weight."""
    return method.size(shape.head_dim) if method.of_logits is None else shape.head_dim


def _map_width(method: FeatureMethod, shape: Shape) -> int:
    """Return the multiplications of one feature: a projection, or one product."""
    return shape.head_dim if method.has_log_scale and not method.is_weighted else 1


def _fused_work(method: FeatureMethod, shape: Shape) -> list[float]:
    """Count operations of the kernels: all pairs if that is cheaper, otherwise features plus pairs inside a chunk."""
    d, e, r, (queries, tokens) = shape.head_dim, shape.value_dim, method.size(shape.head_dim), _tokens(shape)
    plan = kernel_schedule(method, shape, "backward" if shape.training else "forward")
    if plan.pairs:
        return [1.0, shape.pairs * (d + e + 1), 0.0, 0.0, tokens * (d + e)]
    inside = queries * plan.chunk * (_pair_width(method, shape) + e + 1) if shape.is_causal else 0.0
    return [1.0, 2 * tokens * r * (e + 1), tokens * r * _map_width(method, shape), inside, tokens * (d + e)]


def _dense_work(method: FeatureMethod, shape: Shape) -> list[float]:
    """Blocks of rows, each with all the keys up to its last row."""
    d, e, r, (_, tokens) = shape.head_dim, shape.value_dim, method.size(shape.head_dim), _tokens(shape)
    pairs, pair = shape.pairs, _pair_width(method, shape)
    if shape.is_causal:
        rows = sizes_of(r, shape.layout).rows
        pairs = shape.batch * shape.heads * seen_pairs(shape.query_length, shape.key_length, rows)
    return [
        1.0, pairs * (pair + e), pairs * (1 + method.degree), tokens * r * (d if pair == r else 1), tokens * (d + e),
    ]  # fmt: skip


def _chunked_work(method: FeatureMethod, shape: Shape) -> list[float]:
    d, e, r, (_, tokens) = shape.head_dim, shape.value_dim, method.size(shape.head_dim), _tokens(shape)
    pair, sizes, rows = _pair_width(method, shape), sizes_of(r, shape.layout), shape.batch * shape.key_heads
    wave = max(sizes.chunk, sizes.wave) if min(sizes.batch, rows) == rows else sizes.wave
    waves = -(-rows // sizes.batch) * -(-max(shape.query_length, shape.key_length) // max(1, wave))
    chunked = min(shape.query_length, shape.key_length)  # Later queries only read, and later keys are not seen.
    inside = shape.batch * shape.heads * chunked * sizes.chunk if shape.is_causal else 0.0
    is_one = shape.is_causal and shape.query_length <= sizes.chunk  # One chunk: no sums, and maybe no features.
    made = 0.0 if is_one and pair == d else tokens * r
    return [
        1.0,
        waves * (1 + (d * (method.degree - 1) if method.degree > 1 else 0)),  # Taylor multiplies variable by variable.
        made * _map_width(method, shape),
        0.0 if is_one else tokens * r * (e + 1),
        made,
        inside * (pair + e),
        inside,
        tokens * (d + e),
    ]


def _between(places: Sequence[int], x: float) -> list[float]:
    """Return the weight of each place in x, on a logarithmic scale: of one place, or of the two beside it."""
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
    """Coefficients by "family/form/direction", for one type of device.

    The note is empty, or a sentence with a leading space that says why times are rough. Where other programs were the
    reason, `retries` says how often the machine may be measured again.
    """

    coefficients: dict[str, list[float]]
    device: str = "cpu"
    note: str = ""
    retries: int = 0

    def seconds(self, method: Any, shape: Shape, form: str | None = None) -> float:
        """Return the time of one call, in the form that `attention` takes or in the given one."""
        if isinstance(method, Hybrid):  # without joining its parts, which takes a few operations per row
            own = far_shape(method, shape)
            return self.seconds(method.window, shape) + (self.seconds(method.far, own) if own.key_length else 0.0)
        form = self.form_of(method, shape) if form is None else form
        name, parts = name_of(method, form, shape), work(method, form, shape)
        if name not in self.coefficients:  # Multipole and Window are only measured with the kernels.
            raise ValueError(
                f"method: no timing model for {label_of(method)} without native kernels, or off the CPU; "
                "expected another method"
            )
        return math.fsum(c * w for c, w in zip(self.coefficients[name], parts, strict=True))

    def form_of(self, method: Any, shape: Shape, dtype: torch.dtype = torch.float32) -> str:
        """Return the form that `attention` takes by itself on this device."""
        engine = engine_of(method)
        if engine != "features":
            return "exact" if engine == "exact" else "fused"
        return form_of(feature_method(method), shape, torch.device(self.device), dtype)


def name_of(method: Any, form: str, shape: Shape) -> str:
    """Return the name of a set of coefficients."""
    form = "chunked" if form == "linear" else form
    order = "" if form == "dense" else "causal/" if shape.is_causal else "open/"
    return f"{family(method)}/{form}/{order}{'training' if shape.training else 'forward'}"
