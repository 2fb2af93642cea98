"""Queries and keys in the coordinates of a fitted method (`methods/alignment.py`).

    q' = p (q - b),    k' = (k - c) / p,    log-scale of a key = s b.(k - c)

so that s q.k = s q'.k' + the log-scale + terms of q alone, which cancel in the normalizer. With a `query_shift` b the
log-scale is the last column of the keys, divided by the factor that all columns of a key are multiplied by later.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._engines.features.kernel import root_scales
from subquad._engines.finite import widen
from subquad.methods.method import FeatureMethod, Vectors


class Coordinates(NamedTuple):
    """The vectors of a method as tensors, (d,) or (b, 1, d), and the factor of the queries."""

    key_shift: Tensor | None
    query_shift: Tensor | None
    balance: Tensor | None
    root: float

    @classmethod
    def of(
        cls, method: FeatureMethod, layout: Layout, scale: float, like: Tensor, heads: int | None = None
    ) -> "Coordinates":
        """Return those for the heads of a call.

        Args:
            method: The method.
            layout: The sizes of the call.
            scale: The factor of the logits.
            like: A tensor with the device of the call, and with its dtype or a narrower one.
            heads: The key heads that the method has vectors for, if the layout repeats them for each query head.
        """
        named = dict(key_shift=method.key_shift, query_shift=method.query_shift, balance=method.balance)
        shift, query_shift, balance = (_for_heads(name, x, layout, heads, like) for name, x in named.items())
        return cls(shift, query_shift, balance, root_scales(scale)[0])

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return (b, g, n, d), and (b, m, d) or with log-scales (b, m, d + 1), of folded queries and keys."""
        k = widen(k)
        k = k if self.key_shift is None else k - self.key_shift
        if self.query_shift is not None:
            k = torch.cat([k, (k * self.query_shift).sum(-1, keepdim=True) * self.root], -1)
            q = widen(q) - _for_queries(self.query_shift)
        if self.balance is not None:
            q, k = widen(q) * _for_queries(self.balance), k / self.balance
        return q, k


def aligned(method: FeatureMethod, call: Call, heads: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the folded queries and keys of a call in the coordinates of the method; see `Coordinates`."""
    q, k, _ = call.folded()
    return Coordinates.of(method, call.layout, call.logit_scale, k, heads)(q, k) if method.is_aligned else (q, k)


def _for_heads(name: str, given: Vectors | None, layout: Layout, heads: int | None, like: Tensor) -> Tensor | None:
    """Return (d,) or (b, 1, d): the vector of each head."""
    if given is None:
        return None
    vector = torch.tensor(given, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    heads, width = heads or layout.key_heads, layout.width
    if vector.shape not in ((width,), (heads, width)):
        raise ValueError(f"{name}: expected shape {(width,)} or {(heads, width)}, got {tuple(vector.shape)}")
    if vector.dim() == 1:
        return vector
    vector = vector.repeat_interleave(layout.key_heads // heads, 0)
    return vector.expand(*layout.batch, layout.key_heads, width).reshape(layout.rows, 1, width)


def _for_queries(vector: Tensor) -> Tensor:
    return vector if vector.dim() == 1 else vector[:, None]
