"""Queries and keys in the coordinates of a fitted method (`methods/alignment.py`).

    q' = p (q - b),    k' = (k - c) / p,    log-scale of a key = s b.(k - c)

so that s q.k = s q'.k' + the log-scale + terms of q alone, which cancel in the normalizer. With a `query_shift` b the
log-scale is the last column of the keys, divided by the factor that all columns of a key are multiplied by later.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._engines.features.kernel import root_scales
from subquad._engines.finite import widen
from subquad._torch_internals import has_numbers, is_recorded
from subquad.methods.method import FeatureMethod, Vectors
from subquad.methods.tables import constant


class Coordinates(NamedTuple):
    """The vectors of a method as tensors, (1, d) or (h, d) each, for h key heads, and the factors of q and k."""

    key_shift: Tensor | None
    query_shift: Tensor | None
    balance: Tensor | None
    roots: tuple[float, float]

    @classmethod
    def of(cls, method: FeatureMethod, layout: Layout, scale: float, like: Tensor) -> "Coordinates":
        """Return those for the heads of a call.

        Args:
            method: The method.
            layout: The sizes of the call.
            scale: The factor of the logits.
            like: A tensor with the device of the call, and with its dtype or a narrower one.
        """
        named = dict(key_shift=method.key_shift, query_shift=method.query_shift, balance=method.balance)
        shift, query_shift, balance = (_for_heads(name, x, layout, like) for name, x in named.items())
        return cls(shift, query_shift, balance, root_scales(scale))

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return (b, g, n, d), and (b, m, d) or with log-scales (b, m, d + 1), of folded queries and keys."""
        shift, query_shift, balance = (None if x is None else _for_rows(x, len(k)) for x in self[:3])
        k = widen(k)
        k = k if shift is None else k - shift
        if query_shift is not None:
            k = torch.cat([k, (k * query_shift).sum(-1, keepdim=True) * self.roots[0]], -1)
            q = widen(q) - query_shift[:, None]
        if balance is not None:
            q, k = widen(q) * balance[:, None], k / balance
        return q, k

    def packed(self, width: int) -> Tensor:
        """Return (h, 5, d) for the kernels: what the queries and keys, already scaled, are multiplied by and what is
        added to them, and the vector whose product with a key is its log-scale."""
        given = next(x for x in self[:3] if x is not None)
        heads = max(len(x) for x in self[:3] if x is not None)
        zero, one = given.new_zeros(heads, width), given.new_ones(heads, width)
        shift, query_shift = (zero if x is None else x.expand(heads, -1) for x in (self.key_shift, self.query_shift))
        factor = one if self.balance is None else self.balance.expand(heads, -1)
        of_query, of_key = self.roots
        vectors = [factor, -of_query * query_shift, 1 / factor, -of_key * shift / factor, of_query * query_shift]
        return torch.stack(vectors, 1)


def packed(method: FeatureMethod, layout: Layout, scale: float, like: Tensor) -> Tensor:
    """Return `Coordinates.packed`, kept from one call to the next; arguments as for `Coordinates.of`."""
    if torch.compiler.is_compiling() or is_recorded() or not has_numbers(like):
        return Coordinates.of(method, layout, scale, like).packed(layout.width)
    own = replace(layout, batch=(), group=1, queries=1, keys=1, value_width=1)
    return _kept(method.key_shift, method.query_shift, method.balance, own, scale, like.dtype)


@constant
def _kept(
    key_shift: Vectors | None, query_shift: Vectors | None, balance: Vectors | None, layout: Layout, scale: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    named, like = dict(key_shift=key_shift, query_shift=query_shift, balance=balance), torch.empty(0, dtype=dtype)
    vectors = (_for_heads(name, x, layout, like.to(layout.device)) for name, x in named.items())
    return Coordinates(*vectors, root_scales(scale)).packed(layout.width)  # type: ignore[call-arg, arg-type]


def as_packed(packed: Tensor, is_tilted: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return scaled queries and keys as the kernels bring them to the coordinates of `Coordinates.packed`."""
    factor, offset, key_factor, key_offset, tilt = (_for_rows(x, len(k)) for x in packed.unbind(1))
    q, k = q * factor[:, None] + offset[:, None], k * key_factor + key_offset
    return q, torch.cat([k, (k * tilt).sum(-1, keepdim=True)], -1) if is_tilted else k


def aligned(method: FeatureMethod, call: Call) -> tuple[Tensor, Tensor]:
    """Return the folded queries and keys of a call in the coordinates of the method; see `Coordinates`."""
    q, k, _ = call.folded()
    return Coordinates.of(method, call.layout, call.logit_scale, k)(q, k) if method.is_aligned else (q, k)


def _for_heads(name: str, given: Vectors | None, layout: Layout, like: Tensor) -> Tensor | None:
    """Return (1, d) or (h, d): the vector of all heads, or of each."""
    if given is None:
        return None
    vector = torch.tensor(given, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    heads, width = layout.own_key_heads, layout.width
    if vector.shape not in ((width,), (heads, width)):
        raise ValueError(f"{name}: expected shape {(width,)} or {(heads, width)}, got {tuple(vector.shape)}")
    return vector[None] if vector.dim() == 1 else vector.repeat_interleave(layout.copies, 0)


def _for_rows(vector: Tensor, rows: int) -> Tensor:
    """Return (1, 1, d) or (b, 1, d): the heads follow each other in every batch."""
    return vector[:, None] if len(vector) == 1 else vector.repeat(rows // len(vector), 1)[:, None]
