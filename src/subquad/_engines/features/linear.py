"""The linear form: phi(Q) (phi(K)^T V). The keys are added up, then read. O((n + m) r e), not causal.

Its halves also serve causal calls with more keys than queries, or fewer.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
s chunks.
"""

import torch
from torch import Tensor

from subquad._calls.sums import Sums
from subquad._engines.features.cutting import cut, parts_of, sums_of, tensors_of
from subquad._engines.features.kernel import Kernel, absorb, ready_keys, ready_queries
from subquad._engines.features.sums import Tokens, joined
from subquad._engines.recompute import recomputed


def linear(kernel: Kernel, tokens: Tokens, before: Sums | None, block: int) -> tuple[Tensor, Sums]:
    """Let all queries see all keys. Features are made for `block` tokens at a time."""
    sums = summed(kernel, tokens.k, tokens.v, tokens.keep, before, block)
    return reading(kernel, tokens.q, sums, block), sums


def summed(kernel: Kernel, k: Tensor, v: Tensor, keep: Tensor | None, before: Sums | None, block: int) -> Sums:
    """Return all keys added up, `block` at a time."""

    def add(kernel: Kernel, k: Tensor, v: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        *tensors, keep = rest
        return tensors_of(joined(sums_of(tensors, None), absorb(kernel, ready_keys(kernel, k, v, keep, None))))

    sums = before
    for k_c, v_c, keep_c in zip(k.split(block, 1), v.split(block, 1), cut(keep, block, k.shape[1]), strict=True):
        sums = sums_of(recomputed(kernel, add, (k_c, v_c, *parts_of(sums)), (keep_c,)), None)
    assert sums is not None
    return sums


def reading(kernel: Kernel, q: Tensor, sums: Sums, block: int) -> Tensor:
    """Return (b, g, n, e): queries that see the sums and nothing else."""

    def rows(kernel: Kernel, q: Tensor, values: Tensor, poison: Tensor) -> tuple[Tensor]:
        return (kernel.read(ready_queries(kernel, q), Sums(values, poison)).to(q.dtype),)

    return torch.cat(
        [recomputed(kernel, rows, (part, sums.values, sums.poison), ())[0] for part in q.split(block, 2)], 2
    )
