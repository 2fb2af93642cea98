"""Exact attention: torch's own, with the masks and the state that the linear methods have too.

    out_i = sum_j exp(x_ij) v_j / sum_j exp(x_ij),    over the keys j that row i may see

Without padding, segments or a state this is one call. With them torch needs the mask itself, whose size is the square
of the length; so it is made for a block of rows at a time.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._features import Exact
from subquad._layout import Layout
from subquad._masks import View
from subquad._state import State

BLOCK = 512  # Rows whose mask is made at once.


def exact_attention(
    layout: Layout, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, keep: Tensor | None,
    runs: Tensor | None, last_segment: Tensor | None, state: State | None, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, State]:  # fmt: skip
    """query (..., heads, n, d), key and value (..., key heads, m, ·), keep and runs (b, m)."""
    if attn_mask is not None:
        attn_mask = attn_mask[None] if attn_mask.dim() == 1 else attn_mask
        rows, columns = attn_mask.shape[-2:]
        if rows not in (1, layout.queries) or columns not in (1, layout.keys):
            expected = f"(..., {layout.queries}, {layout.keys})"
            raise ValueError(f"attn_mask: expected shape {expected}, got {tuple(attn_mask.shape)}")
    key = key.expand(*layout.batch, layout.key_heads, *key.shape[-2:])
    value = value.expand(*layout.batch, layout.key_heads, *value.shape[-2:])
    keep = None if keep is None else layout.unfold(keep)  # (..., key heads, m)
    before = 0
    if state is not None:
        assert state.keys is not None and state.values is not None
        before = state.length
        keep = _joined(state.keep, keep, state.keys, key)
        key, value = torch.cat([state.keys, key], -2), torch.cat([state.values, value], -2)
    # A segment sees of the past what the state still holds of it: the keys of earlier segments are hidden for good.
    if runs is not None and state is not None:
        runs = torch.cat([runs.new_zeros(runs.shape[0], before), runs], 1)
    if state is not None and layout.queries == 1:
        is_causal = False  # A single query, aligned to the end, sees every key.
    offset = before + (layout.keys - layout.queries if state is not None else 0)
    outputs, start = [], 0
    for rows in query.split(BLOCK, -2):
        here = slice(start, start + rows.shape[-2])
        row_runs = None if runs is None else runs[:, before:][:, here]
        seen = None
        if is_causal or runs is not None:
            seen = View(is_causal, offset + start, row_runs, runs).mask(rows.shape[-2], key.shape[-2], key.device)
        if seen is not None and state is not None:
            # Keys of the state lie before every query, also where there are fewer new keys than queries.
            past = torch.arange(key.shape[-2], device=key.device) < before
            seen = seen | past if runs is None else seen
        start += rows.shape[-2]
        if seen is not None:
            seen = layout.unfold(seen) if seen.shape[0] == layout.rows else seen
        if keep is not None:
            seen = keep[..., None, :] if seen is None else seen & keep[..., None, :]
        if seen is not None and layout.group > 1 and seen.shape[-3] > 1:  # One for each key head.
            seen = seen.repeat_interleave(layout.group, -3)
        if attn_mask is not None:
            part = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., here, :]
            seen = part if seen is None else _with_bias(part, seen)
        grouped = layout.group > 1
        outputs.append(
            F.scaled_dot_product_attention(rows, key, value, seen, dropout_p, scale=scale, enable_gqa=grouped)
        )
    if last_segment is not None:
        kept = runs == runs[:, -1:] if runs is not None and runs.shape[1] else None
        keep = _and(keep, None if kept is None else layout.unfold(kept))
    segment = None if last_segment is None else layout.unfold(last_segment)
    output = torch.cat(outputs, -2)
    return output, State(Exact(), before + layout.keys, segment=segment, keys=key, values=value, keep=keep)


def _with_bias(mask: Tensor, seen: Tensor) -> Tensor:
    """A boolean mask, or a bias, that also hides what is not seen."""
    return mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, float("-inf"))


def _and(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


def _joined(old: Tensor | None, new: Tensor | None, old_keys: Tensor, new_keys: Tensor) -> Tensor | None:
    if old is None and new is None:
        return None
    old = old_keys.new_ones(old_keys.shape[:-1], dtype=torch.bool) if old is None else old
    new = new_keys.new_ones(new_keys.shape[:-1], dtype=torch.bool) if new is None else new
    return torch.cat([old, new], -1)
