"""What the forms are made of: make keys ready, sum them, merge sums, read sums, and meet pair by pair.

    out_i = sum_j w_ij v_j / sum_j w_ij,    w_ij = phi(q_i).phi(k_j) exp(c_j),    over the keys j that row i may see

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.

The values carry a column of ones, so that every product brings its normaliser along. c_j is a log-scale per key, kept
out of the features lest they overflow; each row subtracts the largest c that it sees, never one that it does not see,
so that nothing of the future enters the past, not even by rounding. A number that is not finite is replaced by 0 and
remembered as poison, 0 or NaN, which is added to the rows that may see it: 0 * NaN would reach the others too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subquad._masks import View
from subquad.native._fused import Recipe

NEVER = float("-inf")


class Keys(NamedTuple):
    """A block of keys, ready for use: in wide arithmetic, scaled, finite, and with zeros where a key is hidden."""

    keys: Tensor  # (b, m, d)
    values: Tensor  # (b, m, e + 1)
    poison: Tensor  # (b, m)
    keep: Tensor | None  # (b, m), True = may be seen
    runs: Tensor | None  # (b, m), the segments
    features: Tensor | None = None  # (b, m, r), where they are wanted
    log_scales: Tensor | None = None  # (b, m), -inf where a key is hidden


class Queries(NamedTuple):
    """A block of queries, ready for use."""

    queries: Tensor  # (b, g, n, d)
    poison: Tensor  # (b, g, n)


class Sums(NamedTuple):
    """Keys added up: sum_j phi(k_j) exp(c_j - log_scale) [v_j, 1], and the run of segments that they belong to."""

    values: Tensor  # (b, r, e + 1)
    poison: Tensor  # (b,): 0, or NaN once a key or value was not finite
    log_scale: Tensor | None = None  # (b, 1), or (b, r) where each feature has its own
    run: Tensor | None = None  # (b,)


EMPTY = (0.0, 0.0, NEVER, -1)  # The values, poison, log-scale and run of no keys at all.

Around = Sequence[tuple[Sums, Tensor | None]]  # sums beside a block, each with the rows (b, n) that may read them


@dataclass(frozen=True)
class Kernel(ABC):
    """A method, as the forms see it.

    root_scale: what queries and keys are multiplied by. table: the method's constant tensor, if it has one; given to
    each part of a form beside its other inputs, so that none of them is hidden from torch.func.
    """

    root_scale: tuple[float, float]
    table: Tensor | None = None

    @abstractmethod
    def prepare(self, keys: Keys) -> Keys:
        """Add the features to keys that are otherwise ready."""

    @abstractmethod
    def absorb(self, keys: Keys, inside: Tensor | None) -> Sums:
        """The sum of prepared keys; of those `inside` (b, m), if given."""

    @abstractmethod
    def empty(self, k: Tensor, v: Tensor) -> Sums:
        """The sums of no keys, for keys like k and values like v."""

    @abstractmethod
    def read(self, queries: Queries, sums: Sums) -> Tensor:
        """(b, g, n, e): queries that see the sums and nothing else."""

    @abstractmethod
    def meet(self, queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
        """(b, g, n, e): queries that see keys pair by pair, and the sums around them."""

    def meet_chunk(self, queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
        """`meet`, for a chunk that meets itself: a kernel may know a quicker way."""
        return self.meet(queries, keys, view, around)

    def advance(self, q: Tensor, k: Tensor, v: Tensor, before: Sums) -> tuple[Tensor, Sums] | None:
        """A step that hides nothing, in as few operations as the kernel can; None if it knows no quicker way."""
        return None

    @property
    def from_logits(self) -> bool:
        """Whether `meet` needs no features."""
        return False


def ready_keys(
    kernel: Kernel, k: Tensor, v: Tensor, keep: Tensor | None, runs: Tensor | None, mapped: bool = True
) -> Keys:
    k, v = widen(k) * kernel.root_scale[1], widen(v)
    poison = poison_of(k) + poison_of(v)
    if keep is None:
        k, v, shown = cleaned(k), cleaned(v), torch.ones_like(poison)
    else:
        poison, shown = torch.where(keep, poison, 0.0), keep.to(v.dtype)
        k, v = (torch.where(keep[..., None], cleaned(x), 0.0) for x in (k, v))
    keys = Keys(k, torch.cat([v, shown[..., None]], -1), poison, keep, runs)
    return kernel.prepare(keys) if mapped else keys


def ready_queries(kernel: Kernel, q: Tensor) -> Queries:
    q = widen(q) * kernel.root_scale[0]
    return Queries(cleaned(q), poison_of(q))


def widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def poison_of(x: Tensor) -> Tensor:
    return (x.detach() * 0).sum(-1)


def cleaned(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def absorb(kernel: Kernel, keys: Keys, backwards: bool = False) -> Sums:
    """Keys added up. With segments, only the run at their far end, the one that goes on beyond them."""
    if keys.runs is None:
        return kernel.absorb(keys, None)
    run = keys.runs[:, 0 if backwards else -1]
    return kernel.absorb(keys, keys.runs == run[:, None])._replace(run=run)


def merge(before: Sums, after: Sums) -> Sums:
    """Both together; of `before` nothing, if a new segment has begun since."""
    old, old_poison, old_scale = before.values, before.poison, before.log_scale
    if before.run is not None and after.run is not None:
        goes_on = (before.run == after.run)[:, None]
        old, old_poison = torch.where(goes_on[..., None], old, 0.0), torch.where(goes_on[:, 0], old_poison, 0.0)
        old_scale = None if old_scale is None else torch.where(goes_on, old_scale, NEVER)
    poison = old_poison + after.poison
    if old_scale is None or after.log_scale is None:
        return Sums(old + after.values, poison, None, after.run)
    scale = torch.maximum(old_scale, after.log_scale)
    level = finite(scale)
    new = after.values * (after.log_scale - level).exp()[..., None]
    return Sums(torch.addcmul(new, old, (old_scale - level).exp()[..., None]), poison, scale, after.run)


def merged_in_turn(before: Sums, chunks: Sums) -> list[Sums]:
    """`before`, then `before` merged with one after another of chunks (b, s, ...); what is small, for all at once."""
    count, runs = chunks.poison.shape[1], chunks.run
    goes_on: Sequence[Tensor | None] = [None] * count
    if runs is not None and before.run is not None:
        goes_on = (torch.cat([before.run[:, None], runs[:, :-1]], 1) == runs).unbind(1)

    def kept(old: Tensor, fill: float, i: int) -> Tensor:
        same = goes_on[i]
        return old if same is None else torch.where(same.reshape(-1, *(1,) * (old.dim() - 1)), old, fill)

    new, fading = chunks.values.unbind(1), None
    scales: list[Tensor | None] = [None] * (count + 1)
    if before.log_scale is not None and chunks.log_scale is not None:
        olds, tops = [], [before.log_scale]
        for i, own in enumerate(chunks.log_scale.unbind(1)):
            olds.append(kept(tops[-1], NEVER, i))
            tops.append(torch.maximum(olds[-1], own))
        level = finite(torch.stack(tops[1:], 1))
        new = (chunks.values * (chunks.log_scale - level).exp()[..., None]).unbind(1)
        fading = (torch.stack(olds, 1) - level).exp()[..., None].unbind(1)
        scales = [*tops]
    found = [before]
    for i, poison in enumerate(chunks.poison.unbind(1)):
        old = kept(found[-1].values, 0.0, i)
        values = new[i] + old if fading is None else torch.addcmul(new[i], old, fading[i])
        run = None if runs is None else runs[:, i]
        found.append(Sums(values, poison + kept(found[-1].poison, 0.0, i), scales[i + 1], run))
    return found


def finite(log_scale: Tensor) -> Tensor:
    """0 in place of -inf, the log-scale of nothing, so that no difference to it is inf - inf."""
    return torch.where(log_scale == NEVER, 0.0, log_scale)


def inverse(normalizer: Tensor) -> Tensor:
    """1 / normalizer; 0, with gradient 0, where it is exactly 0, as in a row without keys."""
    empty = normalizer == 0
    return torch.where(empty, 0.0, torch.where(empty, 1.0, normalizer).reciprocal())


def highest(own: Tensor, around: Around) -> Tensor:
    """(b, n, 1 or r): the largest log-scale that each row sees, its own (b, n, 1 or r) and those of the sums around."""
    for sums, may_read in around:
        assert sums.log_scale is not None
        level = sums.log_scale[:, None]  # (b, 1, 1 or r)
        own = torch.maximum(own, level if may_read is None else torch.where(may_read[..., None], level, NEVER))
    return finite(own)


def row_poison(queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
    """(b, g, n): NaN in the rows that are not finite themselves, or see a key, or sums, that were not."""
    poison = view.poison(keys.poison, queries.poison.shape[-1])
    for sums, may_read in around:
        told = sums.poison[:, None]
        poison = poison + (told if may_read is None else torch.where(may_read, told, 0.0))
    return queries.poison + poison[:, None]


@dataclass(frozen=True)
class FeatureKernel(Kernel):
    """phi(q).phi(k), with one normaliser per row."""

    # (x, is_query, table) -> features and log-scale: (b, n, d) -> (b, n, r), (b, n)
    features: Callable[[Tensor, bool, Tensor | None], tuple[Tensor, Tensor | None]] = lambda x, is_query, table: (
        x,
        None,
    )
    of_logits: Callable[[Tensor], Tensor] | None = None  # phi(q).phi(k) from q.k, where that is cheaper than features
    weighted: bool = False  # whether the table (r,) is what each feature's product counts for
    normalized: bool = True
    size: int = 0  # r
    scaled: bool = False  # whether keys have a log-scale
    recipe: Recipe | None = None  # by which the native kernels know the map, if they do

    @property
    def from_logits(self) -> bool:
        return self.of_logits is not None

    def prepare(self, keys: Keys) -> Keys:
        features, log_scales = self.features(keys.keys, False, self.table)
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
        if self.weighted and self.table is not None:
            sums = sums * self.table[:, None]
        return Sums(sums, poison.sum(-1), scale)

    def empty(self, k: Tensor, v: Tensor) -> Sums:
        values = widen(v).new_zeros(v.shape[0], self.size, v.shape[-1] + 1)
        log_scale = values.new_full((v.shape[0], 1), NEVER) if self.scaled else None
        return Sums(values, values.new_zeros(v.shape[0]), log_scale)

    def read(self, queries: Queries, sums: Sums) -> Tensor:
        q = queries.queries
        features, _ = self.features(q.flatten(1, 2), True, self.table)
        return self._finish(
            torch.bmm(features, sums.values).unflatten(1, q.shape[1:3]), queries.poison + sums.poison[:, None, None]
        )

    def meet(self, queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
        q = queries.queries
        flat, (g, n), features = q.flatten(1, 2), q.shape[1:3], None
        if self.of_logits is not None:
            w = self.of_logits(torch.bmm(flat, keys.keys.mT))
        else:
            assert keys.features is not None
            features, _ = self.features(flat, True, self.table)
            weighted = features * self.table if self.weighted and self.table is not None else features
            w = torch.bmm(weighted, keys.features.mT)
        w, top = w.unflatten(1, (g, n)), None  # (b, g, n, m)
        if keys.log_scales is not None:
            top = highest(view.highest(keys.log_scales.detach(), n)[..., None], around)  # (b, n, 1)
            # At most 0 where a key may be seen; the others are hidden below.
            w = w * (keys.log_scales[:, None, :] - top).clamp(max=0.0).exp_()[:, None]
        total = torch.bmm(view.hide(w).flatten(1, 2), keys.values).unflatten(1, (g, n))
        for sums, may_read in around:
            features = self.features(flat, True, self.table)[0] if features is None else features
            part = torch.bmm(features, sums.values).unflatten(1, (g, n))
            if top is not None and sums.log_scale is not None:
                # At most 0 in the rows that may read; the others are dropped below.
                part = part * (sums.log_scale[:, None] - top).clamp(max=0.0).exp()[:, None]
            total = total + (part if may_read is None else torch.where(may_read[:, None, :, None], part, 0.0))
        return self._finish(total, row_poison(queries, keys, view, around))

    def advance(self, q: Tensor, k: Tensor, v: Tensor, before: Sums) -> tuple[Tensor, Sums] | None:
        """Key, queries and value go through the map, and through each check, together."""
        root = self.root_scale[1]
        if not q.shape[-1] == k.shape[-1] == v.shape[-1] or root != self.root_scale[0]:
            return None
        rows = widen(torch.cat([k, q.flatten(1, 2), v], 1))  # (b, 1 + g + 1, d)
        sick = poison_of(rows)
        poison = before.poison + sick[:, 0] + sick[:, -1]
        rows = cleaned(rows)
        tokens = rows[:, :-1]
        features, scales = self.features(tokens if root == 1 else tokens * root, False, self.table)
        value = torch.constant_pad_nd(rows[:, -1:], (0, 1), 1.0)
        key = features[:, :1] * self.table if self.weighted and self.table is not None else features[:, :1]
        scale = None
        if scales is None or before.log_scale is None:
            sums = torch.addcmul(before.values, key.mT, value)
        else:
            own = scales[:, :1]
            scale = torch.maximum(before.log_scale, own.detach())
            faded = before.values * (before.log_scale - scale).exp_()[..., None]
            sums = faded.addcmul_(key.mT, value * (own - scale).exp_()[..., None])
        total = torch.bmm(features[:, 1:], sums)  # (b, g, e + 1): a row for each query of the group
        output = self._finish(total, sick[:, 1:-1] + poison[:, None])
        return output[:, :, None], Sums(sums, poison, scale)

    def _finish(self, total: Tensor, poison: Tensor) -> Tensor:
        """(..., e + 1) -> (..., e): divide by the normaliser, and poison (...)."""
        if not self.normalized:
            return total[..., :-1] + poison[..., None]
        return torch.addcmul(poison[..., None], total[..., :-1], inverse(total[..., -1:]))
