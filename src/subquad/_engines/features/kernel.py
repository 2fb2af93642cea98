"""A method as the forms see it: make keys ready, add them up, read sums, and meet pair by pair.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import copysign, sqrt

import torch
from torch import Tensor

from subquad._calls.sums import NEVER, Sums, finite
from subquad._calls.view import View
from subquad._engines.features.sums import Around, Keys, Queries, Tokens, highest, joined, poison_of_rows, row_poison
from subquad._engines.finite import cleaned, inverse, poison_of, widen
from subquad._torch_internals import exponential, has_numbers
from subquad.methods.method import FeatureMethod, Given

Features = Callable[[Tensor, bool, Tensor | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Kernel(ABC):
    """A method, as the forms see it.

    Attributes:
        root_scale: The factors of queries and of keys.
        table: The method's constant tensor, if any. Each part of a form gets it beside its other inputs, so that no
            tensor is hidden from torch.func.
    """

    root_scale: tuple[float, float]
    table: Tensor | None = None

    @abstractmethod
    def prepare(self, keys: Keys, mapped: bool) -> Keys:
        """Add log-scales and, if `mapped`, features to keys that are otherwise ready."""

    @abstractmethod
    def absorb(self, keys: Keys, inside: Tensor | None) -> Sums:
        """Return the sum of prepared keys; only of those `inside` (b, m), if given."""

    @abstractmethod
    def empty(self, k: Tensor, v: Tensor) -> Sums:
        """Return the sums of no keys, for keys like k and values like v."""

    @abstractmethod
    def read(self, queries: Queries, sums: Sums) -> Tensor:
        """Return (b, g, n, e): queries that see the sums and nothing else."""

    @abstractmethod
    def meet(self, queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
        """Return (b, g, n, e): queries that see keys pair by pair, and the sums around them."""

    def meet_chunk(self, queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
        """Compute `meet` for a chunk that meets itself; a kernel may know a faster way."""
        return self.meet(queries, keys, view, around)

    def step(self, tokens: Tokens, before: Sums | None) -> tuple[Tensor, Sums]:
        """Return the output (b, g, 1, e) of one token, whose query sees the sums and its own key, and the new sums."""
        own = absorb(self, ready_keys(self, tokens.k, tokens.v, tokens.keep, tokens.segments))
        sums = joined(before, own)
        return self.read(ready_queries(self, tokens.q), sums).to(tokens.q.dtype), sums

    @property
    def from_logits(self) -> bool:
        """Whether `meet` needs no features."""
        return False


def ready_keys(
    kernel: Kernel, k: Tensor, v: Tensor, keep: Tensor | None, segments: Tensor | None, mapped: bool = True
) -> Keys:
    """Return keys and values that are wide, scaled and clean; with features if `mapped`."""
    k, v = widen(k) * kernel.root_scale[1], widen(v)
    poison = 1 + poison_of(k, v)
    if keep is None:
        k, v, shown = cleaned(k), cleaned(v), torch.ones_like(poison)
    else:
        poison, shown = torch.where(keep, poison, 0.0), keep.to(v.dtype)
        k, v = (torch.where(keep[..., None], cleaned(x), 0.0) for x in (k, v))
    return kernel.prepare(Keys(k, torch.cat([v, shown[..., None]], -1), poison, keep, segments), mapped)


def ready_queries(kernel: Kernel, q: Tensor) -> Queries:
    """Return queries that are wide, scaled and clean."""
    q = widen(q) * kernel.root_scale[0]
    return Queries(cleaned(q), poison_of(q))


def absorb(kernel: Kernel, keys: Keys, backwards: bool = False) -> Sums:
    """Return the sum of keys. With segments, only of the one at their far end, which may continue beyond them."""
    if keys.segments is None:
        return kernel.absorb(keys, None)
    segment = keys.segments[:, 0 if backwards else -1]
    return kernel.absorb(keys, keys.segments == segment[:, None])._replace(segment=segment)


@dataclass(frozen=True)
class FeatureKernel(Kernel):
    """Weights phi(q).phi(k), with one normalizer per row."""

    # (x, is_query, table) -> features and log-scale: (b, n, d) -> (b, n, r), (b, n)
    features: Features = lambda x, is_query, table: (x, None)
    of_logits: Callable[[Tensor], Tensor] | None = None  # phi(q).phi(k) from q.k, where that is cheaper than features
    is_weighted: bool = False  # whether the table (r,) holds a weight for the product of each feature
    is_normalized: bool = True
    size: int = 0  # r
    has_log_scale: bool = False  # whether keys have a log-scale
    is_logged: bool = False  # whether it is the last column of the keys

    @property
    def from_logits(self) -> bool:
        return self.of_logits is not None

    def prepare(self, keys: Keys, mapped: bool) -> Keys:
        log_scales, features = None, None
        if self.is_logged:
            log_scales, keys = keys.keys[..., -1], keys._replace(keys=keys.keys[..., :-1])
        if mapped:
            features, own = self.features(keys.keys, False, self.table)
            log_scales = own if log_scales is None else log_scales
        if log_scales is not None and keys.keep is not None:
            log_scales = torch.where(keys.keep, log_scales, NEVER)
        return keys._replace(features=features, log_scales=log_scales)

    def absorb(self, keys: Keys, inside: Tensor | None) -> Sums:
        assert keys.features is not None
        values, scales, poison, scale = keys.values, keys.log_scales, keys.poison, None
        if inside is not None:
            values = torch.where(inside[..., None], values, 0.0)
            scales = None if scales is None else torch.where(inside, scales, NEVER)
            poison = torch.where(inside, poison, 0.0)
        if scales is not None:
            scale = scales.detach().amax(-1, keepdim=True)  # (b, 1)
            values = values * (scales - finite(scale)).exp()[..., None]
        sums = torch.bmm(keys.features.mT, values)
        if self.is_weighted and self.table is not None:
            sums = sums * self.table[:, None]
        return Sums(sums, poison.sum(-1), scale)

    def empty(self, k: Tensor, v: Tensor) -> Sums:
        values = widen(v).new_zeros(v.shape[0], self.size, v.shape[-1] + 1)
        log_scale = values.new_full((v.shape[0], 1), NEVER) if self.has_log_scale else None
        return Sums(values, values.new_zeros(v.shape[0]), log_scale)

    def read(self, queries: Queries, sums: Sums) -> Tensor:
        q = queries.queries
        features, _ = self.features(q.flatten(1, 2), True, self.table)
        total = torch.bmm(features, sums.values).unflatten(1, q.shape[1:3])
        return self._finish(total, poison_of_rows(queries, sums.poison[:, None, None]))

    def meet(self, queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
        q = queries.queries
        flat, (g, n), features = q.flatten(1, 2), q.shape[1:3], None
        if self.of_logits is not None:
            w = self.of_logits(torch.bmm(flat, keys.keys.mT))
        else:
            assert keys.features is not None
            features, _ = self.features(flat, True, self.table)
            weighted = features * self.table if self.is_weighted and self.table is not None else features
            w = torch.bmm(weighted, keys.features.mT)
        w, top = w.unflatten(1, (g, n)), None  # (b, g, n, m)
        if keys.log_scales is not None:
            top = highest(view.highest(keys.log_scales.detach(), n)[..., None], around)  # (b, n, 1)
            # at most 0 where a key may be seen; the others are hidden below
            w = w * exponential((keys.log_scales[:, None, :] - top).clamp(max=0.0))[:, None]
        total = torch.bmm(view.hide(w).flatten(1, 2), keys.values).unflatten(1, (g, n))
        for sums, may_read in around:
            features = self.features(flat, True, self.table)[0] if features is None else features
            part = torch.bmm(features, sums.values).unflatten(1, (g, n))
            if top is not None and sums.log_scale is not None:
                # at most 0 in the rows that may read; the others are dropped below
                part = part * (sums.log_scale[:, None] - top).clamp(max=0.0).exp()[:, None]
            total = total + (part if may_read is None else torch.where(may_read[:, None, :, None], part, 0.0))
        return self._finish(total, row_poison(queries, keys, view, around))

    def step(self, tokens: Tokens, before: Sums | None) -> tuple[Tensor, Sums]:
        """Compute a step in fewer operations if nothing is hidden: key, queries and value share the map and checks."""
        q, k, v, keep, segments = tokens
        root = self.root_scale[1]
        is_plain = keep is None and segments is None and root == self.root_scale[0]
        if before is None or not is_plain or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
            return super().step(tokens, before)
        rows = widen(torch.cat([k, q.flatten(1, 2), v], 1))  # (b, 1 + g + 1, d)
        poisons = poison_of(rows)
        poison = before.poison + (1 + poisons[:, 0] + poisons[:, -1])
        rows = cleaned(rows)
        both = rows[:, :-1]
        features, scales = self.features(both if root == 1 else both * root, False, self.table)
        value = torch.constant_pad_nd(rows[:, -1:], (0, 1), 1.0)
        key = features[:, :1] * self.table if self.is_weighted and self.table is not None else features[:, :1]
        scale = None
        if scales is None or before.log_scale is None:
            sums = torch.addcmul(before.values, key.mT, value)
        else:
            own = scales[:, :1]
            scale = torch.maximum(before.log_scale, own.detach())
            faded = before.values * (before.log_scale - scale).exp_()[..., None]
            sums = faded.addcmul_(key.mT, value * (own - scale).exp_()[..., None])
        total = torch.bmm(features[:, 1:], sums)  # (b, g, e + 1): a row for each query of the group
        output = self._finish(total, poisons[:, 1:-1] + 0 * poison[:, None])  # Each row sees its own key.
        return output[:, :, None].to(q.dtype), Sums(sums, poison, scale)

    def _finish(self, total: Tensor, poison: Tensor) -> Tensor:
        """Divide (..., e + 1) by the normalizer and add the poison (...); return (..., e)."""
        if not self.is_normalized:
            return total[..., :-1] + poison[..., None]
        return torch.addcmul(poison[..., None], total[..., :-1], inverse(total[..., -1:]))


def feature_kernel(
    method: FeatureMethod, q: Tensor, k: Tensor, scale: float, is_normalized: bool = True, pairs_alone: bool = False
) -> tuple[FeatureKernel, Tensor, Tensor]:
    """Return the kernel of a method with one normalizer per row, and the queries and keys that go with it.

    Args:
        method: The method.
        q: (b, g, n, d).
        k: (b, m, d); or (b, m, d + 1), the last column a log-scale.
        scale: The factor of the logits.
        is_normalized: False leaves out the division by the sum of weights.
        pairs_alone: Tokens are compared pairwise and no sums are kept, so a polynomial needs no table.
    """
    roots = root_scales(scale)
    divided = is_normalized and method.normalizer == "row"
    if isinstance(method, Given):
        q = q[..., : method.count]
    of_logits, is_logged = method.of_logits, k.shape[-1] > q.shape[-1]
    table = None
    if of_logits is None or not pairs_alone:
        table = method.table(q.shape[-1], torch.promote_types(q.dtype, torch.float32), q.device)
        if table is not None and not torch.compiler.is_compiling() and not has_numbers(q):
            table = q.new_empty(table.shape, dtype=table.dtype)  # A FakeTensorMode takes no tensors with numbers.
    kernel = FeatureKernel(
        roots, table, lambda x, is_query, table: method.features(x, table), of_logits, method.is_weighted, divided,
        method.size(q.shape[-1]), method.has_log_scale or is_logged, is_logged,
    )  # fmt: skip
    return kernel, q, k


def root_scales(scale: float) -> tuple[float, float]:
    """Return the factors of queries and keys, whose product is the scale."""
    root = sqrt(abs(scale))
    return copysign(root, scale), root
