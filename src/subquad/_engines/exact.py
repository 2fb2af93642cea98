"""The engine of exact attention: torch's own function, with the masks and the state that other methods have.

    out_i = sum_j exp(x_ij) v_j / sum_j exp(x_ij),    over the keys j that row i may see

Without padding, segments or a state this is one call. With them torch needs the mask itself, whose size is the square
of the length; so it is made for a block of rows at a time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._calls.masks import unfactored
from subquad._calls.state import State
from subquad._calls.view import View
from subquad._engines.result import Result

BLOCK_ROWS = 512  # rows whose mask is made at once


def run(method: Any, call: Call) -> Result:
    """Compute the call."""
    layout = call.layout
    if call.is_empty or layout.value_width == 0:  # Torch then forgets the batch of the keys.
        query = call.query.expand(*layout.batch, layout.key_heads * layout.group, *call.query.shape[-2:])
        call = call._replace(query=query)
    is_masked = call.padding is not None or call.segments is not None
    is_both = call.attn_mask is not None and call.is_causal  # torch's function takes one of them
    if not (call.is_stateful or is_masked or is_both):
        return Result(_sdpa(call), None, "exact")
    if call.state is not None and call.attn_mask is not None and call.mask_kind == "pairs":
        raise unfactored(call.attn_mask, "leave out the state")
    if call.state is not None and call.mask_kind == "heads":
        call = call.factored()
    # A state remembers which keys are hidden from all queries; any other mask is for this call alone.
    is_remembered = call.is_stateful and call.mask_kind == "keys"
    keep = call.keep() if is_remembered else call.padding
    attn_mask = None if is_remembered else _checked_mask(call)
    output, state = _attend(method, call, attn_mask, None if keep is None else call.layout.unfold(keep))
    return Result(output[0] if call.is_headless else output, state if call.return_state else None, "exact")


def _sdpa(call: Call) -> Tensor:
    output = scaled_dot_product_attention(
        call.query, call.key, call.value, _checked_mask(call), call.dropout_p, call.is_causal, scale=call.scale,
        enable_gqa=call.layout.group > 1,
    )  # fmt: skip
    return output[0] if call.is_headless else output


def _checked_mask(call: Call) -> Tensor | None:
    mask = call.attn_mask
    if mask is None:
        return None
    mask = mask[None] if mask.dim() == 1 else mask
    rows, columns = mask.shape[-2:]
    if rows not in (1, call.layout.queries) or columns not in (1, call.layout.keys):
        expected = f"(..., {call.layout.queries}, {call.layout.keys})"
        raise ValueError(f"attn_mask: expected shape {expected}, got {tuple(mask.shape)}")
    return mask


def _attend(method: Any, call: Call, attn_mask: Tensor | None, keep: Tensor | None) -> tuple[Tensor, State]:
    """Return the output (..., heads, n, e) and the state; keep is (..., key heads, m)."""
    layout, state, segments = call.layout, call.state, call.segments
    key = call.key.expand(*layout.batch, layout.key_heads, *call.key.shape[-2:])
    value = call.value.expand(*layout.batch, layout.key_heads, *call.value.shape[-2:])
    before = 0
    if state is not None:
        assert state.keys is not None and state.values is not None
        before = state.length
        keep = _joined(state.keep, keep, state.keys, key)
        key, value = torch.cat([state.keys, key], -2), torch.cat([state.values, value], -2)
        # A segment sees what the state still holds of it: the keys of earlier segments are hidden for good.
        if segments is not None:
            segments = torch.cat([segments.new_zeros(segments.shape[0], before), segments], 1)
    outputs, start = [], 0
    for rows in call.query.split(BLOCK_ROWS, -2):
        seen = _seen(call, segments, slice(start, start + rows.shape[-2]), before, key.shape[-2])
        seen = _with_masks(layout, seen, keep, attn_mask, slice(start, start + rows.shape[-2]))
        start += rows.shape[-2]
        outputs.append(
            scaled_dot_product_attention(
                rows, key, value, seen, call.dropout_p, scale=call.scale, enable_gqa=layout.group > 1
            )
        )
    segment = None
    if call.last_segment is not None:
        kept = segments == segments[:, -1:] if segments is not None and segments.shape[1] else None
        kept = None if kept is None else layout.unfold(kept)
        keep = kept if keep is None else keep if kept is None else keep & kept
        segment = layout.unfold(call.last_segment)
    length = before + layout.keys
    return torch.cat(outputs, -2), State(
        method, length, call.logit_scale, segment=segment, keys=key, values=value, keep=keep
    )


def _seen(call: Call, segments: Tensor | None, rows: slice, before: int, keys: int) -> Tensor | None:
    """Return the keys that causality and segments let these rows see, (1 or b, n, m); None if all."""
    # A single query after a state is aligned to the end, and so sees every key.
    is_causal = call.is_causal and not (call.state is not None and call.layout.queries == 1)
    if not is_causal and segments is None:
        return None
    offset = before + (call.layout.keys - call.layout.queries if call.state is not None else 0)
    row_segments = None if segments is None else segments[:, before:][:, rows]
    view = View(is_causal, offset + rows.start, row_segments, segments)
    seen = view.mask(rows.stop - rows.start, keys, call.key.device)
    if call.state is not None and segments is None:
        # Keys of the state precede every query, also where there are fewer new keys than queries.
        seen = seen | (torch.arange(keys, device=call.key.device) < before)
    return seen


def _with_masks(
    layout: Layout, seen: Tensor | None, keep: Tensor | None, attn_mask: Tensor | None, rows: slice
) -> Tensor | None:
    """Return all masks of some rows in one, as torch takes it."""
    if seen is not None and seen.shape[0] == layout.rows:
        seen = layout.unfold(seen)
    if keep is not None:
        seen = keep[..., None, :] if seen is None else seen & keep[..., None, :]
    if seen is not None and layout.group > 1 and seen.shape[-3] > 1:  # one for each key head
        seen = seen.repeat_interleave(layout.group, -3)
    if attn_mask is None:
        return seen
    part = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
    if seen is None:
        return part
    return part & seen if part.dtype == torch.bool else torch.where(seen, part, float("-inf"))


def _joined(old: Tensor | None, new: Tensor | None, old_keys: Tensor, new_keys: Tensor) -> Tensor | None:
    if old is None and new is None:
        return None
    old = old_keys.new_ones(old_keys.shape[:-1], dtype=torch.bool) if old is None else old
    new = new_keys.new_ones(new_keys.shape[:-1], dtype=torch.bool) if new is None else new
    return torch.cat([old, new], -1)
