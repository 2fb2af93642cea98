"""Attention that reads selected blocks of keys and drops the others, simulated with masks.

Each rule spends the same budget (`budget.py`); the scan that ranks the blocks is part of it.

    centroid        near keys, and the blocks with the largest  q.mean(k)
    min-max         near keys, and the blocks with the largest  sum_d max(q_d min(k_d), q_d max(k_d))     (Quest)
    oracle          near keys, and the blocks with the largest  sum_j exp(q.k_j); the scan is free
    antidiagonal    blocks of 128 keys, selected for 128 queries at once by sums over antidiagonals  (XAttention)

The first three have the near keys, the sinks and the blocks of Multipole, and select for each query by itself. A rule
computes all logits and then hides some of them, a chunk of queries at a time: it takes the time of exact attention and
memory that grows with the length, not with its square.

Axes: h key heads, g query heads that share a key head, n queries, m keys, b blocks, s keys in a block, d width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

import torch
from budget import budget
from decoder import Attend
from torch import Tensor
from torch.nn.functional import pad

from subquad import Multipole

CHUNK = 128  # queries at a time; also the size of XAttention's blocks
STRIDE = 16  # XAttention's distance between antidiagonals

# (query (h, gn, d), keys in blocks (h, b, s, d), logits in blocks (h, gn, b, s)) -> scores of the blocks (h, gn, b)
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rows:
    """A chunk of queries, and the keys up to its last query."""

    query: Tensor  # (h, gn, d), scaled
    key: Tensor  # (h, m, d)
    positions: Tensor  # (gn,)
    group: int  # g

    @property
    def seen(self) -> int:
        """The number of keys, m."""
        return self.key.shape[1]

    @cached_property
    def logits(self) -> Tensor:
        """(h, gn, m)."""
        return self.query @ self.key.mT


def masked(allowed: Callable[[Rows], Tensor]) -> Attend:
    """Return causal attention to the keys that a function allows.

    Args:
        allowed: Returns a mask (gn, m) or (h, gn, m), True = read; keys after the query are hidden in any case.

    Returns:
        A rule for one sequence whose queries belong to the last n of the m positions.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int) -> Tensor:
        (k, v), group = (key[0], value[0]), query.shape[1] // key.shape[1]
        q = (query[0] * scale).unflatten(0, (-1, group))  # (h, g, n, d)
        before = k.shape[1] - q.shape[2]
        outputs = []
        for start, end in chunks(before, k.shape[1]):
            positions = torch.arange(start, end).repeat(group)
            rows = Rows(q[:, :, start - before : end - before].flatten(1, 2), k[:, :end], positions, group)
            shown = allowed(rows) & (torch.arange(end) <= positions[:, None])
            weights = rows.logits.masked_fill(~shown, -inf).softmax(-1)
            outputs.append((weights @ v[:, :end]).unflatten(1, (group, -1)))
        return torch.cat(outputs, 2).flatten(0, 1)[None]

    return attend


def chunks(start: int, end: int) -> list[tuple[int, int]]:
    """Return the parts of a range between multiples of CHUNK."""
    cuts = [start, *range(start - start % CHUNK + CHUNK, end, CHUNK), end]
    return list(pairwise(cuts))


def window(method: Multipole) -> Attend:
    """Return the rule that spends the budget of a method on the first keys and the last ones."""

    def allowed(rows: Rows) -> Tensor:
        keys = torch.arange(rows.seen)
        last = budget(method, rows.positions) - method.sinks
        return (keys < method.sinks) | (keys > (rows.positions - last)[:, None])

    return masked(allowed)


def select(method: Multipole, score: Score, scan: float) -> Attend:
    """Return the rule that reads the near keys and the blocks with the best scores.

    Args:
        method: Multipole, whose budget, near keys and blocks are used.
        score: The function that ranks the blocks.
        scan: The work of ranking, in keys per block.
    """
    size, sinks = method.block, method.sinks

    def allowed(rows: Rows) -> Tensor:
        far = (rows.positions + 1 - sinks - method.window).clamp(min=0) // size  # (gn,) whole blocks before the window
        keys, count = torch.arange(rows.seen), int(far.max())
        near = (keys < sinks) | (keys >= (sinks + size * far)[:, None])
        if not count:
            return near
        end = sinks + count * size
        in_blocks = (rows.key[:, sinks:end].unflatten(1, (count, size)),
                     rows.logits[..., sinks:end].unflatten(-1, (count, size)))  # fmt: skip
        scores = score(rows.query, *in_blocks).masked_fill(torch.arange(count) >= far[:, None], -inf)
        left = budget(method, rows.positions) - (rows.positions + 1 - size * far) - scan * far
        chosen = best(scores, (left // size).clamp(min=0).minimum(far))
        return near | pad(chosen.repeat_interleave(size, -1), (sinks, rows.seen - end))

    return masked(allowed)


def best(scores: Tensor, counts: Tensor) -> Tensor:
    """Return a mask of the `counts` (n,) largest scores of each row: (h, n, b) -> (h, n, b)."""
    ranks = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return ranks < counts[:, None]


def by_centroid(query: Tensor, keys: Tensor, logits: Tensor) -> Tensor:
    """Return the logit of the mean key of each block."""
    return query @ keys.mean(2).mT


def by_bound(query: Tensor, keys: Tensor, logits: Tensor) -> Tensor:
    """Return an upper bound of the logits in each block, from the range of its keys in each coordinate."""
    return query.clamp(min=0) @ keys.amax(2).mT + query.clamp(max=0) @ keys.amin(2).mT


def by_mass(query: Tensor, keys: Tensor, logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of the weights in each block."""
    return logits.logsumexp(-1)


def antidiagonal(method: Multipole) -> Attend:
    """Return XAttention's rule: the first block, the queries' own block, and the past blocks with the best scores.

    XAttention selects blocks until they hold a share of the estimated mass; here as many as the budget allows. The
    queries of a block share the choice, so a query's choice depends on up to 127 queries after it.
    """

    def allowed(rows: Rows) -> Tensor:
        positions = rows.positions[: len(rows.positions) // rows.group]
        count = int(positions[0]) // CHUNK  # past blocks
        if count < 2:
            return torch.ones(rows.seen, dtype=torch.bool)
        own = positions % CHUNK + 1  # keys read in the queries' own block
        scan = (positions + 1) / (2 * STRIDE)  # half a key for each tile
        work = budget(method, positions) - own - scan
        affordable = (work.mean() // CHUNK).clamp(1, count).expand(rows.group)
        scores = antidiagonal_scores(rows)[..., :count]
        scores[..., 0] = inf
        chosen = pad(best(scores, affordable), (0, 1), value=True).repeat_interleave(CHUNK, -1)  # (h, g, ...)
        return chosen[..., : rows.seen].repeat_interleave(len(positions), 1)

    return masked(allowed)


def antidiagonal_scores(rows: Rows) -> Tensor:
    """Return the estimated mass (h, g, blocks) of the blocks of CHUNK keys, the last of them that of the queries.

    A tile is STRIDE queries by STRIDE keys. The sum over its antidiagonal is the product of the queries, in reverse
    order and side by side, with the keys side by side. Queries and keys that do not exist count as zeros.
    """
    first = int(rows.positions[0])
    start, end = first - first % CHUNK, first - first % CHUNK + CHUNK
    query = pad(rows.query.unflatten(1, (rows.group, -1)), (0, 0, first - start, end - rows.seen))  # (h, g, CHUNK, d)
    query = query.unflatten(2, (-1, STRIDE)).flip(3).flatten(3).flatten(1, 2)  # (h, g tiles, STRIDE d)
    key = pad(rows.key, (0, 0, 0, end - rows.seen)).unflatten(1, (-1, STRIDE)).flatten(2)
    logits = (query @ key.mT / STRIDE).unflatten(1, (rows.group, -1))  # (h, g, tiles of queries, tiles of keys)
    tiles = torch.arange(start, end, STRIDE)[:, None]
    weights = logits.masked_fill(torch.arange(0, end, STRIDE) > tiles, -inf).softmax(-1)
    exists = (tiles + STRIDE > first) & (tiles < rows.seen)
    return (weights * exists).unflatten(-1, (-1, CHUNK // STRIDE)).sum((2, -1))
