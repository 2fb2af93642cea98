"""What each mask can express: hiding keys, or a choice for every pair.

A weight phi(q_i).phi(k_j) can lose a key j for all queries at once (padding), for the queries before it (causality) and
for the queries of other segments (packing), because each of these only decides which sums a query reads. A mask that
treats every pair (i, j) separately, or adds a number to a logit, has no such form. A matrix of pairs may still be one
of the above, written out: `split_pairs` finds the keys that it hides and whether it is causal.

Axes: b batch and key heads, n queries, m keys.
"""

from typing import Literal

import torch
from torch import Tensor

from subquad._calls.layout import Layout
from subquad._torch_internals import has_numbers, in_trace, in_vmap

# An attn_mask hides keys from all queries, differs between query heads that share a key head, or treats pairs.
MaskKind = Literal["keys", "heads", "pairs"]

# A finite number at most this large hides a key from a row that sees another one: next to it, the weight is 0 in every
# dtype.
HIDING = -1e4


class NotServed(ValueError):
    """A valid argument that the method does not support; the message begins with its name."""


def is_true(condition: Tensor) -> bool | None:
    """Return whether a condition holds; None where it is not known: in recorded programs, vmap, the meta device."""
    if torch.compiler.is_compiling() or in_trace() or in_vmap() or not has_numbers(condition):
        return None
    return bool(condition)


def only_hides(numbers: Tensor) -> Tensor:
    """Return whether numbers that are added to the logits do nothing but hide keys."""
    shown = numbers == 0
    hidden = (numbers <= HIDING) & shown.any(-1, keepdim=True)
    return (shown | hidden | (numbers == -torch.inf)).all()


def shown_by(attn_mask: Tensor) -> Tensor | None:
    """Return a mask as booleans, True = attend; None if it adds numbers to the logits, or cannot be read."""
    if attn_mask.dtype == torch.bool:
        return attn_mask
    if attn_mask.requires_grad and torch.is_grad_enabled():  # a bias that is learned, whatever it is now
        return None
    shown = attn_mask == 0
    is_usual = is_true((shown | (attn_mask == -torch.inf)).all())  # found faster
    return shown if is_usual or is_true(only_hides(attn_mask)) else None


def unexpanded(mask: Tensor) -> Tensor:
    """Return a mask with size 1 where it repeats itself, so that nothing is read twice."""
    for axis, (size, stride) in enumerate(zip(mask.shape[:-1], mask.stride()[:-1], strict=True)):
        mask = mask.narrow(axis, 0, 1) if size > 1 and stride == 0 else mask
    return mask


def split_pairs(shown: Tensor) -> tuple[Tensor, bool] | None:
    """Split a mask (..., n, m) into the keys that it shows, (..., 1, m), and causality; None if it is another one."""
    keys = shown.any(-2, keepdim=True)
    if shown.shape[-2] == 1 or is_true((shown == keys).all()):
        return keys, False
    return (keys, True) if is_true((shown == keys.expand_as(shown).tril()).all()) else None


def kind_of(attn_mask: Tensor, layout: Layout) -> MaskKind:
    """Return what an attn_mask does."""
    if attn_mask.dtype != torch.bool or (attn_mask.dim() > 1 and attn_mask.shape[-2] != 1):
        return "pairs"
    return "heads" if layout.group > 1 and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1 else "keys"


def folded_padding(layout: Layout, key_padding_mask: Tensor) -> Tensor:
    """Return (b, m), True = attend."""
    if key_padding_mask.dtype != torch.bool:
        raise ValueError(f"key_padding_mask: expected a boolean tensor, True = attend, got {key_padding_mask.dtype}")
    return layout.fold_mask("key_padding_mask", key_padding_mask, layout.keys)


def folded_key_mask(layout: Layout, attn_mask: Tensor) -> Tensor:
    """Return (b, m) of an attn_mask that hides keys, (..., heads, 1, m) or (m,)."""
    by_key = attn_mask.squeeze(-2) if attn_mask.dim() > 1 else attn_mask
    missing = len(layout.batch) + 2 - by_key.dim()
    if missing < 0 or attn_mask.shape[-1] not in (1, layout.keys):
        raise ValueError(f"attn_mask: expected shape (..., 1, {layout.keys}), got {tuple(attn_mask.shape)}")
    return layout.fold_mask("attn_mask", by_key[(None,) * missing], layout.keys)


def unfactored(attn_mask: Tensor, way_out: str) -> NotServed:
    """Return the error for an attn_mask of pairs, with the alternative that works."""
    if attn_mask.dtype != torch.bool:
        return NotServed(
            f"attn_mask: got {attn_mask.dtype}, a bias added to each logit, which only exact attention supports; "
            "expected booleans, or numbers that are all 0 or -inf. Where they cannot be read, as under torch.compile, "
            f"pass booleans of shape (..., 1, keys). For a bias, {way_out}."
        )
    return NotServed(
        f"attn_mask: got shape {tuple(attn_mask.shape)}, a choice for each pair of query and key, which only exact "
        "attention supports; expected a query dimension of 1. Use is_causal for causality, key_padding_mask for "
        "padding, segment_ids for packed sequences, Window or BlockSparse for windows and blocks; for any other "
        f"mask, {way_out}."
    )


def numbered_segments(layout: Layout, segment_ids: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (b, n) segments numbered 0, 1, 2, ..., and (b,) the last id.

    A segment is a run of equal ids: the same id after another one begins a new segment. Segment 0 continues that of
    `before`, the last id of a state, if there is one.
    """
    if segment_ids.is_floating_point() or segment_ids.dtype == torch.bool:
        raise ValueError(f"segment_ids: expected integers, got {segment_ids.dtype}")
    if layout.queries != layout.keys:
        raise ValueError(
            "segment_ids: packed sequences attend to themselves; expected as many queries as keys, "
            f"got {layout.queries} queries and {layout.keys} keys"
        )
    ids = layout.fold_mask("segment_ids", segment_ids, layout.keys)
    first = ids[:, :1] if before is None else before.reshape(-1, 1).to(ids)
    changes = torch.diff(torch.cat([first, ids], 1), dim=1) != 0
    last = torch.cat([first, ids], 1)[:, -1] if layout.keys or before is not None else ids.new_zeros(layout.rows)
    return changes.cumsum(1), last
