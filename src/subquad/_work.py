"""What a form does, counted: pairs that meet, queries that read sums, keys that join them.

    flops = 2 b [ g pairs (x + y) + g read r y + absorbed r (e + 1) + tokens p ]

    pairs      queries and keys that meet        x = d where weights come from logits, else r
    read       queries that read sums            y = e + 1: values and their normaliser; Separable has its own, y = e
    absorbed   keys that join sums               p = multiplications of the map itself: projections, or a user's layers

Every form is these three counts: dense has pairs alone, linear reads and absorbs alone, chunked has all three. With
training each product counts four times: the forward, the same again in the backward, and the gradients of both factors.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.
"""

from collections import Counter
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import torch
from torch import nn

from subquad._dispatch import Sizes
from subquad._features import FeatureMap, Linear, RandomFeatures, Taylor
from subquad._forms import _sizes
from subquad._layout import Layout
from subquad._methods import Approximation
from subquad._separable import Separable


def elements(layout: Layout) -> tuple[int, int]:
    """Of q, k and v; and of the result."""
    n, m, d, e, b = layout.queries, layout.keys, layout.width, layout.value_width, layout.rows
    return b * (layout.group * n * d + m * (d + e)), b * layout.group * n * e


class Traits(NamedTuple):
    """What a method asks of the forms."""

    size: int  # r
    project: int = 0  # multiplications of the map for a token
    project_times: int = 1  # how often they count: the matrix of random projections has no gradient
    from_logits: bool = False  # whether pairs need no features
    constant: bool = False  # whether the features depend on the input at all
    scales: int = 0  # log-scales of a head's sums
    separable: bool = False
    own: bool = False  # a user's map, made once before the form
    divides: bool = True  # whether a row is divided by its normaliser
    # Memory. Elements of a token: while its features are made, of the features, kept for the backward, of gradients.
    making: int = 0
    result: int = 0
    kept: int = 0
    gradient: int = 0
    # Tensors as large as the weights: while they are made, kept for the backward, of gradients.
    pairs: tuple[int, int, int] = (1, 1, 1)


def traits_of(method: Approximation, d: int, training: bool) -> Traits:
    r = method.size(d)
    if isinstance(method, Taylor):
        p, constant = method.degree, method.degree == 0
        if method.basis == "diagonal":  # Weights of the features make another copy, and so do derivatives of powers.
            return Traits(r, constant=constant, making=2 * r, result=r, kept=r, gradient=3 * r)
        # Products of each degree, then all of them side by side; those of degree p - 1 once more, from p = 3 on.
        before = comb(d + p - 2, p - 1) if p > 2 else 0
        # Horner's rule has the logits, the last result and the next one.
        pairs = (3, p + 1, 4) if p > 1 else (2, 1, 1)
        return Traits(r, from_logits=True, constant=constant, making=(2 if p > 1 else 1) * r + before, result=r,
                       kept=r + before, gradient=r, pairs=pairs)  # fmt: skip
    if isinstance(method, RandomFeatures):
        # Cosine and sine both keep what they were taken of.
        half = r // 2 if method.kind == "trigonometric" else 0
        return Traits(r, method.rows * d, 3 if training else 1, scales=1, making=2 * r + half, result=r, kept=r + half,
                       gradient=2 * r + 2 * half)  # fmt: skip
    if isinstance(method, Linear):
        if method.activation == "identity":
            return Traits(r, from_logits=True, divides=False, gradient=r)
        if method.activation == "relu":
            return Traits(r, making=r, result=r, kept=r, gradient=2 * r)
        # An exponential, a line, and their sum.
        return Traits(r, making=3 * r, result=r, kept=3 * r, gradient=3 * r)
    if isinstance(method, Separable):  # The exponents are the keys themselves.
        return Traits(r, scales=r, separable=True, divides=False, making=r, kept=r, gradient=2 * r)
    multiplications, scaled = _count_map(method, d)
    # Its layers run outside the forms, and are not run again: a product and the gradients of its factors.
    return Traits(r, multiplications, 3 if training else 1, scales=int(scaled), own=True)


def _count_map(method: FeatureMap, d: int) -> tuple[int, bool]:
    """The multiplications of a user's map for one token, and whether it has a log-scale."""
    from torch.utils.flop_counter import FlopCounterMode

    weight = next(method.parameters(), None) if isinstance(method, nn.Module) else None
    x = torch.zeros(1, 1, d) if weight is None else weight.new_zeros(1, 1, d)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        result = method(x, is_query=False)
    return counter.get_total_flops() // 2, isinstance(result, tuple)


class Work(NamedTuple):
    """What a form does for one key head, and for each query head of its group."""

    pairs: int  # of queries and keys that meet
    read: int  # queries that read sums
    absorbed: int  # keys that join sums


@dataclass(frozen=True)
class FormCall:
    """One call in one form."""

    layout: Layout
    sizes: Sizes
    traits: Traits
    is_causal: bool
    training: bool
    form: str

    @property
    def b(self) -> int:
        return self.layout.rows

    @property
    def r(self) -> int:
        return self.traits.size

    @property
    def sums(self) -> int:
        """Elements of a state: the sums, and for each head its poison and log-scales."""
        return self.b * (self.r * (self.layout.value_width + 1) + 1 + self.traits.scales)

    @property
    def both(self) -> int:
        """The tokens that are chunked where a causal call has more queries than keys, or fewer."""
        return min(self.layout.queries, self.layout.keys)

    def work(self) -> Work:
        n, m = self.layout.queries, self.layout.keys
        if n * m == 0:
            return Work(0, 0, 0)
        if self.form == "dense":
            return Work(seen_pairs(n, m, self.sizes.rows) if self.is_causal else n * m, 0, 0)
        if self.form == "step":
            return Work(0, 1, 0 if self.advances else 1)
        if not self.is_causal:
            return Work(0, n, m)
        work = self._chunked(self.both, want_sums=n > m)
        return work._replace(read=work.read + n - self.both)

    def _chunked(self, n: int, want_sums: bool) -> Work:
        pairs = read = absorbed = 0
        units = Counter(_sizes(n, self.sizes.chunk, self.sizes.unit))  # Of at most three different sizes.
        alone = units.total() == 1
        for unit, times in units.items():
            waves = _sizes(unit, self.sizes.chunk, self.sizes.wave)
            for i, wave in enumerate(waves):
                count = max(1, wave // self.sizes.chunk)
                pairs += times * count * _pairs_of_chunk(wave // count, self.traits.separable)
                if not alone or i or count > 1:  # Before the first chunk there are no sums,
                    read += times * wave
                if not alone or want_sums or i + 1 < len(waves) or count > 1:  # and those of the last one nobody reads.
                    absorbed += times * wave
        return Work(pairs, read, absorbed)

    @property
    def advances(self) -> bool:
        """Whether a step takes the quick way, which adds its key without a product of matrices."""
        d = self.r + self.traits.scales if self.traits.own else self.layout.width
        return (
            not self.traits.separable and d == self.layout.value_width and not (self.traits.own and self.traits.scales)
        )

    def flops(self, work: Work) -> int:
        g, e, r, traits = self.layout.group, self.layout.value_width, self.r, self.traits
        x, y = (self.layout.width if traits.from_logits else r), e if traits.separable else e + 1
        again = self.form != "step"  # A step keeps what it made; the others make it again.
        full = 1 if not self.training else 3 + again
        met, weighed, summed, mapped = full, full, full, traits.project_times
        if self.training and traits.constant:  # No gradient flows to features that are always 1.
            summed = full - 1
            # Features are an input of the dense form, which knows nothing of where they came from.
            met, weighed = (full - 1, full) if self.form == "dense" and not traits.from_logits else (full - 2, full - 1)
        products = g * work.pairs * (x * met + y * weighed) + (g * work.read * y + work.absorbed * (e + 1)) * r * summed
        keys = self.both if self.form == "chunked" and not traits.own else self.layout.keys
        if self.layout.queries * self.layout.keys == 0 and not traits.own:
            return 0
        # Keys of the dense form, and everything of a step, are mapped once; the others again in the backward.
        repeated = self.training and not traits.own
        of_keys = mapped - (repeated and self.form in ("dense", "step"))
        of_queries = mapped - (repeated and self.form == "step")
        products += traits.project * (g * self.layout.queries * of_queries + keys * of_keys)
        return 2 * self.b * products

    def made(self) -> int:
        """Elements of the features, weights and sums that are made."""
        work, traits, g = self.work(), self.traits, self.layout.group
        mapped = g * (self.layout.queries if not traits.from_logits else work.read)
        mapped += self.layout.keys if not traits.from_logits else work.absorbed
        sums = -(-work.absorbed // (self.sizes.chunk if self.form == "chunked" else max(1, work.absorbed)))
        return self.b * (g * work.pairs + mapped * self.r + sums * self.r * (self.layout.value_width + 1))


def _pairs_of_chunk(length: int, separable: bool) -> int:
    if not separable:
        return length * length
    size = 1 << (length - 1).bit_length()  # It halves its chunks: each later half meets the earlier one.
    return size * (size - 1) // 2


def seen_pairs(n: int, m: int, block: int) -> int:
    """The pairs of causal attention where rows come in blocks, each against the keys up to its end."""
    whole = n // block
    growing = min(whole, m // block)  # blocks that end before the keys do
    return block**2 * growing * (growing + 1) // 2 + (whole - growing) * block * m + n % block * min(n, m)
