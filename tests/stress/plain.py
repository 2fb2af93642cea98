"""A drawn call in the oracle's form: all heads and batches written out, all masks as one of pairs.

q (b, h, n, d)    k (b, h, m, d)    v (b, h, m, e)    seen (b, h, n, m)
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from stress.draws import Drawn
from subquad import BlockSparse, Window


class Plain(NamedTuple):
    """Finite inputs, the pairs that are seen, and the rows that must be NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor
    poisoned: Tensor  # (b, h, n)
    scale: float


def plain(drawn: Drawn) -> Plain:
    """Return the call in the oracle's form; what is not finite is 0 there."""
    sizes = drawn.sizes
    batch, heads, d = math.prod(sizes.batch), sizes.heads * sizes.group, sizes.d
    lead = (*sizes.batch, heads)

    def spread(x: Tensor, own_heads: int) -> Tensor:
        x = x.double()
        if sizes.is_headless:
            return x[None, None]
        x = x.repeat_interleave(heads // own_heads, -3) if x.shape[-3] == own_heads else x
        return x.expand(*lead, *x.shape[-2:]).reshape(batch, heads, *x.shape[-2:])

    q = spread(drawn.query, heads)
    k, v = (spread(x, sizes.heads) for x in (drawn.key, drawn.value))
    seen = _seen(drawn, batch, heads)
    bad_q, bad_k, bad_v = ((~x.isfinite()).any(-1) for x in (q, k, v))
    poisoned = (seen & (bad_q[..., None] | (bad_k | bad_v)[..., None, :])).any(-1)
    q, k, v = (torch.where(x.isfinite(), x, 0.0) for x in (q, k, v))
    if d == 0:  # All logits are 0, as with one number that is 0.
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))
    scale = drawn.options.get("scale")
    return Plain(q, k, v, seen, poisoned, 1 / math.sqrt(max(1, d)) if scale is None else scale)


def _seen(drawn: Drawn, batch: int, heads: int) -> Tensor:
    """Return (b, h, n, m)."""
    n, m, method = drawn.sizes.n, drawn.sizes.m, drawn.method
    row, key = torch.arange(n)[:, None], torch.arange(m)
    keep, segments = _keep(drawn, batch, heads), _segments(drawn, batch, heads)
    seen = torch.ones(n, m, dtype=torch.bool)
    if drawn.cuts is not None:  # Without causality a piece sees all keys up to its own end.
        ends = torch.tensor(drawn.cuts).cumsum(0).repeat_interleave(torch.tensor(drawn.cuts))
        seen = seen & (key < ends[:, None])
    if drawn.options.get("is_causal"):
        seen = seen & (key <= row)
    seen = seen & keep[..., None, :]
    if segments is not None:
        seen = seen & (segments[..., :, None] == segments[..., None, :])
    if isinstance(method, Window) and method.size is not None:
        near = (key > row - method.size) & (key < row + method.size)
        seen = seen & (near | _sinks(method.sinks, keep, segments)[..., None, :])
    if isinstance(method, BlockSparse) and n and m:
        layout = method.layout.expand(heads, -1, -1)
        blocks = [math.ceil(length / count) for length, count in zip((n, m), layout.shape[1:], strict=True)]
        seen = seen & layout[:, torch.arange(n) // blocks[0]][:, :, key // blocks[1]]
    return seen


def _keep(drawn: Drawn, batch: int, heads: int) -> Tensor:
    """Return (b, h, m): the keys that padding and a mask of keys show."""
    sizes, options = drawn.sizes, drawn.options
    lead, keep = (*sizes.batch, heads), torch.ones(batch, heads, sizes.m, dtype=torch.bool)
    padding, mask = options.get("key_padding_mask"), options.get("attn_mask")
    if padding is not None:
        if padding.dim() == len(sizes.batch) + 2:
            padding = padding.repeat_interleave(sizes.group, -2)
        elif padding.dim() > 1:
            padding = padding[..., None, :]
        keep = keep & padding.expand(*lead, sizes.m).reshape(keep.shape)
    if mask is not None:
        mask = mask if mask.dim() == 1 else mask.squeeze(-2)
        keep = keep & mask.expand(*lead, sizes.m).reshape(keep.shape)
    return keep


def _segments(drawn: Drawn, batch: int, heads: int) -> Tensor | None:
    """Return (b, h, m): the number of each token's segment."""
    ids, sizes = drawn.options.get("segment_ids"), drawn.sizes
    if ids is None:
        return None
    ids = ids.expand(*sizes.batch, sizes.m).reshape(batch, 1, sizes.m).expand(-1, heads, -1)
    changes = torch.zeros_like(ids, dtype=torch.bool)
    changes[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return changes.cumsum(-1)


def _sinks(count: int, keep: Tensor, segments: Tensor | None) -> Tensor:
    """Return (b, h, m): the first `count` visible keys, of each segment."""
    if segments is None:
        return keep & (keep.cumsum(-1) <= count)
    same = segments[..., :, None] == segments[..., None, :]
    earlier = (same & keep[..., None, :]).tril().sum(-1)
    return keep & (earlier <= count)
