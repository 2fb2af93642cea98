"""The kernel of separable attention: a normalizer per feature.

    out_i = sum_c softmax_c(q_i) * mean_ic,    mean_ic = sum_j exp(k_jc) v_j / sum_j exp(k_jc)    over the keys seen

The weights of a row are a distribution over the keys, but their matrix has at most rank d. In the causal form each row
has its own normalizer for each feature, and its own largest exponent top_ic, so exp(k_jc - top_ic) depends on all of
i, j and c. `meet` computes just that. `meet_chunk` is its fast twin: it halves the chunk again and again. The later
half of a block sees the whole earlier half, whose maximum M_c splits the exponent into two factors that cannot
overflow, exp(k_jc - M_c) exp(M_c - top_ic), and so into a product of matrices.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, e value width, c features = width, s blocks,
h half a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.sums import NEVER, Sums, finite
from subquad._calls.view import View
from subquad._engines.features.kernel import Kernel
from subquad._engines.features.sums import Around, Keys, Queries, highest, poison_of_rows, row_poison
from subquad._engines.finite import inverse, widen


@dataclass(frozen=True)
class SeparableKernel(Kernel):
    """Weights softmax_c(q_i) exp(k_jc), with one normalizer per row and feature."""

    def prepare(self, keys: Keys, mapped: bool) -> Keys:
        """Return the exponents as features; a hidden key has exp(-inf)."""
        if keys.keep is None:
            return keys._replace(features=keys.keys)
        return keys._replace(features=torch.where(keys.keep[..., None], keys.keys, NEVER))

    def absorb(self, keys: Keys, inside: Tensor | None) -> Sums:
        assert keys.features is not None
        logs, poison = keys.features, keys.poison
        if inside is not None:
            logs, poison = torch.where(inside[..., None], logs, NEVER), torch.where(inside, poison, 0.0)
        top = logs.detach().amax(1)  # (b, c)
        sums = torch.bmm((logs - finite(top)[:, None]).exp().mT, keys.values)
        return Sums(sums, poison.sum(-1), top)

    def empty(self, k: Tensor, v: Tensor) -> Sums:
        values = widen(v).new_zeros(v.shape[0], k.shape[-1], v.shape[-1] + 1)
        return Sums(values, values.new_zeros(v.shape[0]), values.new_full(values.shape[:2], NEVER))

    def read(self, queries: Queries, sums: Sums) -> Tensor:
        q = queries.queries
        means = sums.values[..., :-1] * inverse(sums.values[..., -1:])
        output = torch.bmm(q.softmax(-1).flatten(1, 2), means).reshape(*q.shape[:3], means.shape[-1])
        return output + poison_of_rows(queries, sums.poison[:, None, None])[..., None]

    def meet(self, queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
        assert keys.features is not None
        q = queries.queries
        n, m = q.shape[2], keys.features.shape[1]
        logs = torch.where(view.mask(n, m, q.device)[..., None], keys.features[:, None], NEVER)  # (b, n, m, c)
        top = highest(logs.detach().amax(2), around)  # (b, n, c)
        pairs = (logs - top[:, :, None]).exp()
        share, decays = _shares(q, top, pairs.sum(2), around)
        w = torch.matmul(share.transpose(1, 2), pairs.mT).transpose(1, 2)  # (b, g, n, m)
        total = torch.matmul(w, keys.values[:, None, :, :-1])
        return _with_sums(total, queries, keys, view, share, decays, around)

    def meet_chunk(self, queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
        assert keys.features is not None
        length = int(keys.features.shape[1])  # torch.jit.trace would make it a tensor.
        size = 1 << (length - 1).bit_length()  # Halving needs a power of two: the rest is hidden keys.
        grown = (0, 0, 0, size - length)
        q, values = F.pad(queries.queries, grown), F.pad(keys.values[..., :-1], grown)
        padded = [(s, None if r is None else F.pad(r, (0, size - length))) for s, r in around]
        levels, logs, top = _halve(keys, view, padded, size)
        own = (logs - top).exp()  # (b, n, c): the weight of a row's own key
        normalizer, factors = own, []
        for level in levels:
            factor = (level.top - level.reader_half(top)).exp()  # (b, s, h, c), at most 1 where it may be read
            factor = factor if level.may_read is None else torch.where(level.may_read, factor, 0.0)
            factors.append(factor)
            part = factor * level.sent.sum(-2, keepdim=True)
            normalizer = level.on_reader_half(normalizer, partial(torch.add, part))
        share, decays = _shares(q, top, normalizer, padded)
        total = (share * own[:, None]).sum(-1, keepdim=True) * values[:, None]
        for level, factor in zip(levels, factors, strict=True):
            asked = level.reader_half(share) * factor[:, None]  # (b, g, s, h, c)
            w = torch.matmul(asked, level.sent[:, None].mT)  # (b, g, s, h, h)
            part = torch.matmul(w, level.sender_half(values)[:, None])
            total = level.on_reader_half(total, partial(torch.add, part))
        n = slice(0, length)
        return _with_sums(total[:, :, n], queries, keys, view, share[:, :, n], [d[:, n] for d in decays], around)


class Level(NamedTuple):
    """One round of halving: in blocks of 2h tokens, one half sends its keys to the other."""

    half: int  # h
    sender: int
    reader: int
    sent: Tensor  # (b, s, h, c): exponentials of the keys, relative to their largest exponent
    top: Tensor  # (b, s, 1, c): that exponent
    may_read: Tensor | None  # (b, s, h, 1), with segments

    def reader_half(self, x: Tensor) -> Tensor:
        return _halves(x, self.half)[..., self.reader, :, :]

    def sender_half(self, x: Tensor) -> Tensor:
        return _halves(x, self.half)[..., self.sender, :, :]

    def on_reader_half(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return _on_half(x, self.half, self.reader, change)


def _halve(keys: Keys, view: View, around: Around, size: int) -> tuple[list[Level], Tensor, Tensor]:
    """Return all rounds, the exponents (b, n, c), and the largest exponent that each row sees (b, n, c)."""
    assert keys.features is not None
    length = keys.features.shape[1]
    logs = F.pad(keys.features, (0, 0, 0, size - length), value=NEVER)
    segments = None if keys.segments is None else F.pad(keys.segments, (0, size - length), value=-1)
    is_shown = keys.keep is None and segments is None and size == length  # No exponent is -inf.
    ways = (False,) if view.is_causal else (False, True)  # backwards too, where earlier rows see later keys
    levels, tops = [], logs.detach()
    for h, back in ((h, back) for h in (1 << p for p in range(size.bit_length() - 1)) for back in ways):
        sender, reader = (1, 0) if back else (0, 1)
        sent = _halves(logs, h)[..., sender, :, :]  # (b, s, h, c)
        may_read = None
        if segments is not None:  # Only the segment at the border between the halves is on both sides of it.
            by_half = segments.unflatten(-1, (-1, 2, h))
            border = by_half[..., sender, 0 if back else -1][..., None]
            sent = torch.where((by_half[..., sender, :] == border)[..., None], sent, NEVER)
            may_read = (by_half[..., reader, :] == border)[..., None]
        top = sent.detach().amax(-2, keepdim=True)  # (b, s, 1, c)
        seen = top if may_read is None else torch.where(may_read, top, NEVER)
        tops = _on_half(tops, h, reader, partial(torch.maximum, seen))
        levels.append(Level(h, sender, reader, (sent - (top if is_shown else finite(top))).exp(), top, may_read))
    return levels, logs, highest(tops, around)


def _halves(x: Tensor, h: int) -> Tensor:
    """Return (..., s, 2, h, c) of x (..., n, c)."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // (2 * h), 2, h, x.shape[-1])


def _on_half(x: Tensor, h: int, half: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x with one half of each block changed."""
    parts = list(_halves(x, h).unbind(-3))
    parts[half] = change(parts[half])
    return torch.stack(parts, -3).flatten(-4, -2)


def _shares(q: Tensor, top: Tensor, normalizer: Tensor, around: Around) -> tuple[Tensor, list[Tensor]]:
    """Return (b, g, n, c): softmax of q over the whole normalizer of each row and feature; and the factors (b, n, c) of
    each of the sums around."""
    decays = []
    for sums, may_read in around:
        assert sums.log_scale is not None
        decay = (sums.log_scale[:, None] - top).exp()  # at most 1 where it may be read
        decays.append(decay if may_read is None else torch.where(may_read[..., None], decay, 0.0))
        normalizer = normalizer + decays[-1] * sums.values[:, None, :, -1]
    return q.softmax(-1) * inverse(normalizer)[:, None], decays


def _with_sums(
    total: Tensor, queries: Queries, keys: Keys, view: View, share: Tensor, decays: list[Tensor], around: Around
) -> Tensor:
    """Add to the total what the sums around hold for each row, and the poison."""
    rows = share.shape[1:3]
    for (sums, _), decay in zip(around, decays, strict=True):
        total = total + torch.bmm((share * decay[:, None]).flatten(1, 2), sums.values[..., :-1]).unflatten(1, rows)
    return total + row_poison(queries, keys, view, around)[..., None]
