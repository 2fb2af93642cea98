"""What a linear form can hide, and what it must refuse.

A weight phi(q_i).phi(k_j) can lose a key j for all queries at once (padding), for the queries before it (causality) and
for the queries of other segments (packing), because each of these only decides which sums a query reads. A mask that
treats every pair (i, j) for itself, or adds a number to a logit, has no such form.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad._layout import Layout


def key_mask(layout: Layout, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """The keys that may be seen, as (b, m), True = attend; None if all."""
    masks = []
    if key_padding_mask is not None:
        check_bool("key_padding_mask", key_padding_mask)
        masks.append(layout.fold_mask("key_padding_mask", key_padding_mask, layout.keys))
    if attn_mask is not None:
        # Without its query dimension it is a mask of keys: (..., heads, 1, m) -> (..., heads, m)
        by_key = attn_mask.squeeze(-2) if attn_mask.dim() > 1 else attn_mask
        missing = len(layout.batch) + 2 - by_key.dim()
        if missing < 0 or attn_mask.shape[-1] not in (1, layout.keys):
            expected = f"(..., 1, {layout.keys})"
            raise ValueError(f"attn_mask: expected shape {expected}, got {tuple(attn_mask.shape)}")
        masks.append(layout.fold_mask("attn_mask", by_key[(None,) * missing], layout.keys))
    if len(masks) == 2:
        return masks[0] & masks[1]
    return masks[0] if masks else None


def check_bool(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"{name}: expected a boolean tensor, True = attend, got {mask.dtype}")


def refuse_unfactored(attn_mask: Tensor, stateful: bool) -> None:
    """Only a boolean mask without a query dimension of its own has a linear form, or a place in a state."""
    way_out = "leave out the state" if stateful else 'use method="exact"'
    if attn_mask.dtype != torch.bool:
        raise ValueError(
            f"attn_mask: got {attn_mask.dtype}, a bias added to each logit, which no feature map can factor; "
            f"expected a boolean mask of shape (..., 1, keys). For a bias, {way_out}."
        )
    if attn_mask.dim() > 1 and attn_mask.shape[-2] != 1:
        raise ValueError(
            f"attn_mask: got shape {tuple(attn_mask.shape)}, a choice for each pair of query and key, which no feature "
            "map can factor; expected a query dimension of 1. Use is_causal for causality, key_padding_mask for "
            f"padding, segment_ids for packed sequences; for any other mask, {way_out}."
        )


def is_per_query_head(attn_mask: Tensor | None, layout: Layout) -> bool:
    """Whether a key mask differs between query heads that share a key head."""
    return attn_mask is not None and layout.group > 1 and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1


def segment_runs(layout: Layout, segment_ids: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """(b, n): segments as runs 0, 1, 2, ..., where run 0 goes on from the state; and (b,) the last id.

    A segment is a run of equal ids: the same id after another one begins a new segment.
    """
    if segment_ids.is_floating_point() or segment_ids.dtype == torch.bool:
        raise ValueError(f"segment_ids: expected integers, got {segment_ids.dtype}")
    if layout.queries != layout.keys:
        raise ValueError(
            f"segment_ids: packed sequences attend to themselves, so as many queries as keys are expected; "
            f"got {layout.queries} queries and {layout.keys} keys"
        )
    ids = layout.fold_mask("segment_ids", segment_ids, layout.keys)
    first = ids[:, :1] if before is None else before.reshape(-1, 1).to(ids)
    changes = torch.diff(torch.cat([first, ids], 1), dim=1) != 0
    last = torch.cat([first, ids], 1)[:, -1] if layout.keys or before is not None else ids.new_zeros(layout.rows)
    return changes.cumsum(1), last


class View(NamedTuple):
    """Which keys a block of rows may see, apart from padding: those not after it, and those of its segment.

    Or, where rows stand at any places, those that `seen` says.
    """

    is_causal: bool
    first: int = 0  # The place of the first row among the keys: row i sees keys 0 .. first + i.
    row_runs: Tensor | None = None  # (b, n)
    key_runs: Tensor | None = None  # (b, m)
    seen: Tensor | None = None  # (b, n, m), True = may be seen

    @property
    def is_regular(self) -> bool:
        """Whether a row sees all keys, or all up to its own place."""
        return self.row_runs is None and self.seen is None

    def mask(self, n: int, m: int, device: torch.device) -> Tensor:
        """(1 or b, n, m), True = may be seen."""
        if self.seen is not None:
            return self.seen
        seen = torch.ones(1, n, m, dtype=torch.bool, device=device)
        seen = seen.tril(self.first) if self.is_causal else seen
        if self.row_runs is None or self.key_runs is None:
            return seen
        return seen & (self.row_runs[:, :, None] == self.key_runs[:, None, :])

    def hide(self, weights: Tensor) -> Tensor:
        """Weights (b, g, n, m) with zeros where a key may not be seen, whatever stood there."""
        if self.is_regular:
            return weights.tril(self.first) if self.is_causal else weights  # Far quicker than a mask.
        return torch.where(self.mask(weights.shape[-2], weights.shape[-1], weights.device)[:, None], weights, 0.0)

    def poison(self, keys: Tensor, n: int) -> Tensor:
        """(b, n): NaN in the rows that see a NaN of keys (b, m), which are NaN or 0; else 0."""
        if not self.is_regular:
            return torch.where(self.mask(n, keys.shape[-1], keys.device), keys[:, None], 0.0).sum(-1)
        if not self.is_causal:
            return keys.sum(-1, keepdim=True).expand(-1, n)
        return self._by_row(keys.cumsum(-1), n)  # A sum with NaN in it is NaN from there on.

    def highest(self, keys: Tensor, n: int) -> Tensor:
        """(b, n): the largest of keys (b, m) that each row sees."""
        if not self.is_regular:
            return torch.where(self.mask(n, keys.shape[-1], keys.device), keys[:, None], float("-inf")).amax(-1)
        if not self.is_causal:
            return keys.amax(-1, keepdim=True).expand(-1, n)
        return self._by_row(keys.cummax(-1).values, n)

    def _by_row(self, until: Tensor, n: int) -> Tensor:
        """Of something (b, m) that has grown key by key, what it is at each row."""
        m = until.shape[-1]
        if self.first == 0 and n == m:
            return until
        return until[:, torch.arange(self.first, self.first + n, device=until.device).clamp(max=m - 1)]
