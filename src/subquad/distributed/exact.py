"""Exact attention over several ranks: keys and values travel around a ring, and every rank meets them all.

    out = sum_s exp(l_s - l) out_s,    l = log sum_s exp(l_s),    over the slices s of all ranks

where out_s and l_s are the output and the log-sum-exp of one slice. While a rank meets one slice, the next one arrives.
The backward pass goes around once more, with the gradients of keys and values beside them. The volume grows with the
length.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.sums import NEVER, finite
from subquad._engines.finite import cleaned, poison_of, widen
from subquad._engines.sparse.native_call import is_served
from subquad._engines.sparse.pattern import Pattern
from subquad.distributed.gathering import padded
from subquad.distributed.peers import Peers
from subquad.distributed.recorded import Exchange
from subquad.distributed.segments import Runs

TILE_ROWS = 256  # rows whose weights torch's operations make at once


class Slice(NamedTuple):
    """The keys of one rank as they travel: as many as the longest slice has."""

    k: Tensor  # (b, m, d)
    v: Tensor  # (b, m, e)
    keep: Tensor  # (b, m), uint8: 1 = may be seen; 0 behind the last key
    runs: Tensor  # (b, m), the number of the segment


def attend(method: Any, call: Call, peers: Peers, runs: Runs | None) -> Tensor:
    """Return the output of this rank's queries (..., heads, n, e)."""
    ring = Ring(peers, call, None if runs is None else runs.numbers)
    return call.unfolded(ring.run(*call.folded())[0])


class Ring(Exchange):
    """The slices of all ranks in turn, beginning with the rank's own."""

    saved: tuple[Tensor, ...]

    def __init__(self, peers: Peers, call: Call, runs: Tensor | None) -> None:
        self.peers, self.scale, self.is_causal, self.runs = peers, call.logit_scale, call.is_causal, runs
        keep, layout = call.keep(), call.layout
        self.keep = torch.ones(layout.rows, layout.keys, device=layout.device) if keep is None else keep

    def forward(self, *tensors: Any) -> tuple[Tensor, ...]:
        q, k, v = tensors
        output = widen(q).new_zeros(*q.shape[:3], v.shape[-1])
        level, poison = output.new_full(q.shape[:3], NEVER), output.new_zeros(q.shape[:3])
        for rank, held in self._around(self._own(k, v)):
            if self._is_seen(q, rank):
                one, own_level, own_poison = meet(q, held, self._pattern(q, held, rank), self.scale)
                output, level = joined(output, level, one, own_level)
                poison = poison + own_poison
        if self.is_recorded:
            self.saved = (q, k, v, output, level, poison)
        return (output.masked_fill(poison.isnan()[..., None], float("nan")).to(q.dtype),)

    def backward(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, output, level, poison = self.saved
        grad = torch.zeros_like(output) if grads[0] is None else grads[0].to(output.dtype)
        q_grad = torch.zeros_like(q, dtype=output.dtype)
        own = self._own(k, v)
        found = [torch.zeros_like(x, dtype=output.dtype) for x in (own.k, own.v)]
        for rank, held in self._around(own, found):
            if self._is_seen(q, rank):
                given = (grad, output, level, poison, q, held, self._pattern(q, held, rank), self.scale)
                for total, part in zip((q_grad, *found), differentiated(*given), strict=True):
                    total += part
        del self.saved
        k_grad, v_grad = (x[:, : k.shape[1]] for x in found)
        return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype)

    def _own(self, k: Tensor, v: Tensor) -> Slice:
        runs = torch.zeros_like(self.keep, dtype=torch.long) if self.runs is None else self.runs
        return Slice(*(padded(x, max(self.peers.lengths)) for x in (k, v, self.keep.to(torch.uint8), runs)))

    def _around(self, held: Slice, found: list[Tensor] | None = None) -> Iterator[tuple[int, Slice]]:
        """Yield the slices of all ranks, and whose they are, while the next one travels.

        Gradients `found` belong to the slice that a rank holds: they leave when it has added its part, and are replaced
        in the list by those of the next slice; at the end they are back with their owner.
        """
        peers = self.peers
        for turn in range(peers.size):
            rank = (peers.rank - turn) % peers.size
            is_last = turn + 1 == peers.size
            moving = [] if is_last else [peers.pass_on(x) for x in held]
            yield rank, held
            if not is_last:
                held = Slice(*(arriving.wait() for _, arriving in moving))
            if found is not None:
                leaving = [peers.pass_on(x) for x in found]
                found[:] = [arriving.wait() for _, arriving in leaving]
                moving += leaving
            for sent, _ in moving:
                sent.wait()

    def _is_seen(self, q: Tensor, rank: int) -> bool:
        """Return whether the queries see keys of a rank."""
        return q.shape[2] * self.peers.lengths[rank] > 0 and not (self.is_causal and rank > self.peers.rank)

    def _pattern(self, q: Tensor, held: Slice, rank: int) -> Pattern:
        """Return which keys of a rank's slice the queries see: one range for each."""
        n, m = q.shape[2], self.peers.lengths[rank]
        low, high = torch.zeros(1, n, dtype=torch.long, device=q.device), torch.full((1, n), m, device=q.device)
        if self.is_causal and rank == self.peers.rank:
            high = torch.arange(1, n + 1, device=q.device)[None]
        if self.runs is not None:
            theirs = held.runs[:, :m].contiguous()
            low = torch.searchsorted(theirs, self.runs.contiguous())
            high = torch.minimum(high, torch.searchsorted(theirs, self.runs.contiguous(), right=True))
        bounds = torch.stack(torch.broadcast_tensors(low, low, torch.minimum(low, high), high), 1)
        return Pattern(bounds.to(torch.int32), held.keep.bool())


def joined(output: Tensor, level: Tensor, other: Tensor, other_level: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the keys of both."""
    total = torch.logaddexp(level, other_level)
    mine, theirs = ((x - finite(total)).exp()[..., None] for x in (level, other_level))
    return output * mine + other * theirs, total


# --- One slice, by the kernels of sparse attention or by torch's operations -------------------------------------------


def meet(q: Tensor, held: Slice, pattern: Pattern, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (b, g, n, e) of queries that see one slice, their log-sum-exp and poison (b, g, n)."""
    if is_served(q, held.k, held.v, None):
        output, level, poison = torch.ops.subquad.sparse(q, held.k, held.v, None, *pattern, scale, None)
        return output, torch.where(level == torch.inf, NEVER, level), poison  # inf: no key is seen
    q, k, v = (widen(x) for x in (q, held.k, held.v))
    key_poison, row_poison = poison_of(k, v), poison_of(q)
    q, k, v = cleaned(q), cleaned(k), cleaned(v)
    found = []
    for rows in tiles(q.shape[2]):
        seen = pattern.seen(rows, slice(0, k.shape[1]), *q.shape[:2])
        logits = torch.where(seen, q[:, :, rows] @ k[:, None].mT * scale, NEVER)
        level = logits.logsumexp(-1)
        weights = (logits - finite(level)[..., None]).exp()
        poison = torch.where(seen, key_poison[:, None, None] + row_poison[:, :, rows, None], 0.0).sum(-1)
        found.append((weights @ v[:, None], level, poison))
    output, level, poison = (torch.cat(x, 2) for x in zip(*found, strict=True))
    return output, level, poison


def differentiated(
    grad: Tensor, output: Tensor, level: Tensor, poison: Tensor, q: Tensor, held: Slice, pattern: Pattern, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of one slice, from the output and the log-sum-exp over all slices."""
    if is_served(q, held.k, held.v, None):
        rest = (None, *pattern, scale, None, True, True)
        level = torch.where(level == NEVER, torch.inf, level)
        found = torch.ops.subquad.sparse_backward(grad, None, output, level, poison, q, held.k, held.v, *rest)
        return found[0], found[1], found[2]
    wide = [widen(x) for x in (q, held.k, held.v)]
    q, k, v = (cleaned(x) for x in wide)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for rows in tiles(q.shape[2]):
        seen = pattern.seen(rows, slice(0, k.shape[1]), *q.shape[:2])
        logits = torch.where(seen, q[:, :, rows] @ k[:, None].mT * scale, NEVER)
        weights = (logits - finite(level[:, :, rows])[..., None]).exp()
        own, delta = grad[:, :, rows], (grad[:, :, rows] * output[:, :, rows]).sum(-1, keepdim=True)
        slopes = weights * (own @ v[:, None].mT - delta) * scale
        grads[0][:, :, rows] = slopes @ k[:, None]
        grads[1] += (slopes.mT @ q[:, :, rows]).sum(1)
        grads[2] += (weights.mT @ own).sum(1)
    q_grad, k_grad, v_grad = (x.masked_fill(~y.isfinite(), 0.0) for x, y in zip(grads, wide, strict=True))
    return q_grad, k_grad, v_grad


def tiles(rows: int) -> Iterator[slice]:
    for start in range(0, rows, TILE_ROWS):
        yield slice(start, min(start + TILE_ROWS, rows))
