"""How long a call takes, from its shape and what the machine has shown before.

    seconds = sum_i c_i * work_i(shape)      c_i >= 0, one set for each family of methods, form and direction

The work is what a form does: products of pairs, products with features, elements that are made, waves that are started.
The coefficients c come from a calibration (`_calibration`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from subquad._dispatch import Form, choose_form, fusable
from subquad._features import Exact, RandomFeatures, Taylor
from subquad._layout import Layout
from subquad._methods import Approximation, Named
from subquad._multipole import Multipole
from subquad._multipole_cost import met, moments_flops
from subquad._separable import Separable
from subquad._work import seen_pairs

EXACT_LENGTHS, EXACT_WIDTHS = (128, 256, 512, 1024, 2048, 4096), (16, 64, 128)


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


def form_of(method: Approximation, shape: Shape, device: str = "cpu") -> Form:
    """The form that `attention` takes by itself on a type of device."""
    layout = replace(shape.layout, device=torch.device(device))
    by_kernels = fusable(method, layout, shape.is_causal)
    return choose_form(method, layout, shape.is_causal, False, False, None, None, by_kernels)[0]


def family(method: Named) -> str:
    """Methods whose calls do the same kind of work."""
    names = {Exact: "exact", Taylor: "taylor", RandomFeatures: "random", Separable: "separable", Multipole: "multipole"}
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
    if isinstance(method, Multipole):
        reads = shape.batch * shape.heads * met(method, shape.layout, shape.is_causal) * (d + e)
        return [
            1.0,
            reads,
            queries,
            shape.batch * shape.key_heads * moments_flops(method, shape.layout),
            tokens * (d + e),
        ]
    r = method.size(d)
    powers = method.degree if isinstance(method, Taylor) else 1
    pair = d if isinstance(method, Taylor) and method.basis == "symmetric" else r
    sizes = choose_form(method, shape.layout, shape.is_causal, False, False, None, None)[1]
    if form == "fused":  # The kernels meet all pairs, where that is less, or sum features, and meet pairs in a chunk.
        by_pairs, by_sums = pairs * (d + e + 1), 2 * tokens * r * (e + 1)
        if isinstance(method, Taylor) and by_pairs < by_sums:
            return [1.0, by_pairs, 0.0, 0.0, tokens * (d + e)]
        inside = queries * (32 if r <= 512 else 64) * (pair + e + 1) if shape.is_causal else 0.0  # as in native/scan.h
        return [1.0, by_sums, tokens * r * (d if isinstance(method, RandomFeatures) else 1), inside, tokens * (d + e)]
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
    """Coefficients by "family/form/direction", of a type of device."""

    coefficients: dict[str, list[float]]
    device: str = "cpu"

    def seconds(self, method: Named, shape: Shape, form: str | None = None) -> float:
        """Of one call; in the form that `attention` takes by itself, or in the given one."""
        if isinstance(method, Exact | Multipole):
            form = family(method)
        else:
            form = form_of(method, shape, self.device) if form is None else form
        name, parts = name_of(method, form, shape), work(method, form, shape)
        if name not in self.coefficients:  # Of Multipole only what the kernels do is measured.
            raise ValueError(f"method: no time is known of {type(method).__name__} in training, without the native "
                             f"kernels, or off the CPU; expected another method, got {method}")  # fmt: skip
        return math.fsum(c * w for c, w in zip(self.coefficients[name], parts, strict=True))


def name_of(method: Named, form: str, shape: Shape) -> str:
    order = "" if form == "dense" else "causal/" if shape.is_causal else "open/"
    return f"{family(method)}/{form}/{order}{'training' if shape.training else 'forward'}"
