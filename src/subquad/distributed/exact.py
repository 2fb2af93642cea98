"""Exact attention over several ranks: keys and values travel around a ring, and every rank meets them all.

    out = sum_s exp(l_s - l) out_s,    l = log sum_s exp(l_s),    over the slices s of all ranks

where out_s and l_s are the output and the log-sum-exp of a slice. While a rank meets one slice, the next one travels.
The backward pass goes around once more, with the gradients of keys and values beside them. The volume grows with the
length, as the cost does.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.sums import NEVER, finite
from subquad._engines.finite import widen
from subquad._engines.sparse.native_call import is_served
from subquad._engines.sparse.operators import computed
from subquad._engines.sparse.pattern import Pattern
from subquad.distributed.gathering import padded
from subquad.distributed.peers import Peers
from subquad.distributed.recorded import Exchange
from subquad.distributed.segments import Runs

TILE_ROWS = 256  # rows whose weights torch's operations make at once


class Slice(NamedTuple):
    """Keys of one rank, as they travel: as long as the longest slice, the rest hidden."""

    k: Tensor  # (b, m, d)
    v: Tensor  # (b, m, e)
    keep: Tensor  # (b, m), True = may be seen
    runs: Tensor  # (b, m), the number of the segment


def attend(method: Any, call: Call, peers: Peers, runs: Runs | None) -> Tensor:
    """Return the output of this rank's queries (..., heads, n, e)."""
    call = call.factored()
    q, k, v = call.folded()
    ring = Ring(peers, call, runs)
    with torch.autocast(call.layout.device.type, enabled=False):
        return call.unfolded(ring.run(q, k, v)[0].to(call.dtype))


class Ring(Exchange):
    """Keys and values of all ranks in turn, beginning with the rank's own."""

    def __init__(self, peers: Peers, call: Call, runs: Runs | None) -> None:
        self.peers, self.scale, self.is_causal = peers, call.logit_scale, call.is_causal
        b, m = call.layout.rows, call.layout.keys
        keep, device = call.keep(), call.layout.device
        self.keep = torch.ones(b, m, dtype=torch.bool, device=device) if keep is None else keep
        self.runs = torch.zeros(b, m, dtype=torch.long, device=device) if runs is None else runs.numbers

    def forward(self, *tensors: Any) -> tuple[Tensor, ...]:
        q, k, v = tensors
        output = widen(q).new_zeros(*q.shape[:3], v.shape[-1])
        level, poison = output.new_full(q.shape[:3], NEVER), output.new_zeros(q.shape[:3])
        for rank, held, travelling in self._around(self._own(k, v)):
            if self._sees(rank):
                one, own_level, own_poison = meet(q, held, self._pattern(q, held, rank), self.scale)
                output, level = joined(output, level, one, own_level)
                poison = poison + own_poison
            for transfer in travelling:
                transfer.wait()
        self.saved = (q, k, v, output, level)
        return (output.masked_fill(poison.isnan()[..., None], float("nan")),)
