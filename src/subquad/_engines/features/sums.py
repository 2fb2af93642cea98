"""The records that the forms pass around: tokens, keys and queries that are ready for use, and sums in turn.

    out_i = sum_j w_ij v_j / sum_j w_ij,    w_ij = phi(q_i).phi(k_j) exp(c_j),    over the keys j that row i may see

The values carry a column of ones, so that every product brings its normalizer along. c_j is a log-scale per key, kept
out of the features lest they overflow; each row subtracts the largest c that it sees, never one that it does not see,
so that nothing of the future enters the past, not even by rounding.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
s chunks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad._calls.sums import NEVER, Sums, finite, merge
from subquad._calls.view import View


class Tokens(NamedTuple):
    """The inputs of a form, or a part of them."""

    q: Tensor  # (b, g, n, d)
    k: Tensor  # (b, m, d)
    v: Tensor  # (b, m, e)
    keep: Tensor | None = None  # (b, m), True = may be seen
    segments: Tensor | None = None  # (b, m)


class Keys(NamedTuple):
    """A block of keys, ready for use: wide, scaled, finite, and 0 where a key is hidden."""

    keys: Tensor  # (b, m, d)
    values: Tensor  # (b, m, e + 1)
    poison: Tensor  # (b, m): 1 for a visible key, NaN if it or its value is not finite; 0 for a hidden one
    keep: Tensor | None  # (b, m), True = may be seen
    segments: Tensor | None  # (b, m)
    features: Tensor | None = None  # (b, m, r), where they are needed
    log_scales: Tensor | None = None  # (b, m), -inf where a key is hidden


class Queries(NamedTuple):
    """A block of queries, ready for use."""

    queries: Tensor  # (b, g, n, d)
    poison: Tensor  # (b, g, n): 0, or NaN if it is not finite


Around = Sequence[tuple[Sums, Tensor | None]]  # sums beside a block, each with the rows (b, n) that may read them


def joined(before: Sums | None, own: Sums) -> Sums:
    """Return the sums of both, if there are any before."""
    return own if before is None else merge(before, own)


def merged_in_turn(before: Sums, chunks: Sums) -> list[Sums]:
    """Return `before`, then `before` merged with one chunk (b, s, ...) after another; small tensors all at once."""
    count, segments = chunks.poison.shape[1], chunks.segment
    continues: Sequence[Tensor | None] = [None] * count
    if segments is not None and before.segment is not None:
        continues = (torch.cat([before.segment[:, None], segments[:, :-1]], 1) == segments).unbind(1)

    def kept(old: Tensor, fill: float, i: int) -> Tensor:
        same = continues[i]
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
        segment = None if segments is None else segments[:, i]
        found.append(Sums(values, poison + kept(found[-1].poison, 0.0, i), scales[i + 1], segment))
    return found


def highest(own: Tensor, around: Around) -> Tensor:
    """Return (b, n, 1 or r): the largest log-scale that each row sees, its own or one of the sums around."""
    for sums, may_read in around:
        assert sums.log_scale is not None
        level = sums.log_scale[:, None]  # (b, 1, 1 or r)
        own = torch.maximum(own, level if may_read is None else torch.where(may_read[..., None], level, NEVER))
    return finite(own)


def row_poison(queries: Queries, keys: Keys, view: View, around: Around) -> Tensor:
    """Return the poison of rows (b, g, n), as `poison_of_rows` does."""
    seen = view.total(keys.poison, queries.poison.shape[-1])
    for sums, may_read in around:
        theirs = sums.poison[:, None]
        seen = seen + (theirs if may_read is None else torch.where(may_read, theirs, 0.0))
    return poison_of_rows(queries, seen[:, None])


def poison_of_rows(queries: Queries, seen: Tensor) -> Tensor:
    """Return (b, g, n): NaN in the rows whose query, or a key that they see, is not finite; 0 if they see no key.

    Args:
        queries: The queries.
        seen: (b, 1, n or 1), the number of keys that each row sees; NaN if one of them is not finite.
    """
    return torch.where(seen == 0, 0.0, queries.poison + 0 * seen)
