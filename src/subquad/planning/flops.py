"""What a form does, counted: pairs that meet, queries that read sums, keys that join them.

    flops = 2 b [ g pairs (x + y) + g read r y + absorbed r (e + 1) + tokens p ]

    pairs      queries and keys that meet        x = d where weights come from logits, else r
    read       queries that read sums            y = e + 1: values and their normalizer; Separable has its own, y = e
    absorbed   keys that join sums               p = multiplications of the map itself: projections, or a user's layers

Every form is these three counts: dense has only pairs, linear only reads and absorbs, chunked has all three. With
training each product of torch's forms counts four times: the forward pass, the same again in the backward pass, and the
gradients of both factors. The kernels' backward pass makes the products that `schedule` counts.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from subquad._engines.features.choose_form import Sizes, is_fusable
from subquad._engines.features.cutting import cut_sizes
from subquad._engines.features.schedule import PRODUCTS, KernelSizes, Operation, Schedule, schedule
from subquad.methods.method import FeatureMethod, Traits
from subquad.planning.shape import Shape, seen_pairs


class Work(NamedTuple):
    """What a form does for one key head, and for each query head of its group."""

    pairs: int  # of queries and keys that meet
    read: int  # queries that read sums
    absorbed: int  # keys that join sums


@dataclass(frozen=True)
class FormCall:
    """One call in one form."""

    shape: Shape
    sizes: Sizes
    method: FeatureMethod
    traits: Traits
    form: str

    @property
    def b(self) -> int:
        return self.shape.batch * self.shape.key_heads

    @property
    def group(self) -> int:
        return self.shape.heads // self.shape.key_heads

    @property
    def r(self) -> int:
        return self.traits.size

    @property
    def sums(self) -> int:
        """Numbers in a state: the sums, and for each head its poison and log-scales."""
        return self.b * (self.r * (self.shape.value_dim + 1) + 1 + self.traits.log_scales)

    @property
    def both(self) -> int:
        """Tokens that are chunked where a causal call has more queries than keys, or fewer."""
        return min(self.shape.query_length, self.shape.key_length)

    @property
    def is_separable(self) -> bool:
        return self.method.normalizer == "feature"

    @property
    def from_logits(self) -> bool:
        """Whether pairs need no features."""
        return self.method.of_logits is not None

    @property
    def width(self) -> int:
        """What the forms see as the width of queries and keys: a user's features are made before."""
        return self.r + self.traits.log_scales if self.method.is_learned else self.shape.head_dim

    def schedule(self, operation: Operation = "forward") -> Schedule:
        """Return how the kernels execute the call."""
        return kernel_schedule(self.method, self.shape, operation)

    @property
    def by_pairs(self) -> bool:
        """Whether the kernels meet pair by pair."""
        return self.form == "fused" and self.schedule().pairs

    @property
    def is_native_step(self) -> bool:
        """Whether the kernels compute a step."""
        is_known = is_fusable(self.method, self.shape.layout, torch.float32, is_causal=True, is_stateful=True)
        return self.form == "step" and is_known and not self.method.is_learned and not self.shape.training

    def kernel_work(self, operation: Operation) -> Work:
        """Return what the kernels do in the forward or the backward pass, without its number of products."""
        n, m, is_causal = self.shape.query_length, self.shape.key_length, self.shape.is_causal
        plan = self.schedule(operation)
        if plan.pairs:
            return Work(seen_pairs(n, m) if is_causal else n * m, 0, 0)
        return Work(n * plan.chunk if is_causal else 0, n, m)

    @cached_property
    def work(self) -> Work:
        n, m = self.shape.query_length, self.shape.key_length
        if n * m == 0:
            return Work(0, 0, 0)
        if self.form == "dense":
            return Work(seen_pairs(n, m, self.sizes.rows) if self.shape.is_causal else n * m, 0, 0)
        if self.form == "step":
            return Work(0, 1, 0 if self.is_short_step and not self.is_native_step else 1)
        if self.form == "fused":
            return self.kernel_work("forward")
        if not self.shape.is_causal:
            return Work(0, n, m)
        work = self._chunked(self.both, want_sums=n > m)
        return work._replace(read=work.read + n - self.both)

    @property
    def is_short_step(self) -> bool:
        """Whether a step adds its key without a product of matrices, as `FeatureKernel.step` does."""
        has_own_scale = self.method.is_learned and self.traits.log_scales > 0
        return not self.is_separable and self.width == self.shape.value_dim and not has_own_scale

    def _chunked(self, n: int, want_sums: bool) -> Work:
        pairs = read = absorbed = 0
        units = Counter(cut_sizes(n, self.sizes.chunk, self.sizes.unit))  # of at most three different sizes
        alone = units.total() == 1
        for unit, times in units.items():
            waves = cut_sizes(unit, self.sizes.chunk, self.sizes.wave)
            for i, wave in enumerate(waves):
                count = max(1, wave // self.sizes.chunk)
                pairs += times * count * _pairs_of_chunk(wave // count, self.is_separable)
                if not alone or i or count > 1:  # There are no sums before the first chunk,
                    read += times * wave
                if not alone or want_sums or i + 1 < len(waves) or count > 1:  # and nothing reads those of the last.
                    absorbed += times * wave
        return Work(pairs, read, absorbed)

    def flops(self) -> int:
        g, e, r, work, traits = self.group, self.shape.value_dim, self.r, self.work, self.traits
        from_logits = self.from_logits
        x, y = (self.shape.head_dim if from_logits else r), e if self.is_separable else e + 1
        if self.form == "fused":
            passes: tuple[Operation, ...] = ("forward", "backward") if self.shape.training else ("forward",)
            return int(sum(self._kernel_flops(operation, x, y) for operation in passes))
        training, again = self.shape.training, self.form != "step"  # A step keeps what it made.
        full = 1 if not training else 3 + again
        met, weighed, added, mapped = full, full, full, 3 if training else 1
        if training and traits.constant:  # No gradient flows to features that are always 1.
            added = full - 1
            # Features are an input of the dense form, which does not know where they came from.
            met, weighed = (full - 1, full) if self.form == "dense" and not from_logits else (full - 2, full - 1)
        products = g * work.pairs * (x * met + y * weighed) + (g * work.read * y + work.absorbed * (e + 1)) * r * added
        is_learned = self.method.is_learned
        if self.shape.query_length * self.shape.key_length == 0 and not is_learned:
            return 0
        # Keys of the dense form, and everything of a step, are mapped once; the others again in the backward pass.
        repeated = training and not is_learned
        of_keys = mapped - (repeated and self.form in ("dense", "step"))
        of_queries = mapped - (repeated and self.form == "step")
        keys = self.both if self.form == "chunked" and not is_learned else self.shape.key_length
        products += traits.project * (g * self.shape.query_length * of_queries + keys * of_keys)
        return 2 * self.b * products

    def _kernel_flops(self, operation: Operation, x: int, y: int) -> float:
        """Return the work of one pass of the kernels; a backward pass makes several times the products of a forward."""
        g, e, work, kind = self.group, self.shape.value_dim, self.kernel_work(operation), self.schedule(operation).pairs
        products = g * work.pairs * (x + y) + (g * work.read * y + work.absorbed * (e + 1)) * self.r
        products += self.traits.project * (g * self.shape.query_length + self.shape.key_length)
        return 2 * self.b * products * PRODUCTS[operation][kind] / PRODUCTS["forward"][kind]

    def made(self) -> int:
        """Numbers in the features, weights and sums that are made."""
        work, g = self.work, self.group
        from_logits = self.from_logits
        mapped = g * (work.read if from_logits else self.shape.query_length)
        mapped += work.absorbed if from_logits else self.shape.key_length
        sums = -(-work.absorbed // (self.sizes.chunk if self.form == "chunked" else max(1, work.absorbed)))
        return self.b * (g * work.pairs + mapped * self.r + sums * self.r * (self.shape.value_dim + 1))


def kernel_schedule(method: FeatureMethod, shape: Shape, operation: Operation = "forward") -> Schedule:
    """Return how the kernels execute a call of this shape."""
    r = method.size(shape.head_dim)
    sizes = KernelSizes(
        shape.batch * shape.key_heads, shape.heads // shape.key_heads, shape.query_length, shape.key_length,
        r if method.is_learned else shape.head_dim, shape.value_dim, r,
    )  # fmt: skip
    assert method.native_map is not None  # or the kernels would not compute it
    return schedule(operation, method.native_map, sizes, shape.is_causal, False, torch.get_num_threads())


def _pairs_of_chunk(length: int, is_separable: bool) -> int:
    if not is_separable:
        return length * length
    size = 1 << (length - 1).bit_length()  # It halves its chunks: each later half meets the earlier one.
    return size * (size - 1) // 2
