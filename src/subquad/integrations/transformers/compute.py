"""Attention to the keys of a call: from a state, from the keys of a cache, or with any mask.

Axes: b batch, n queries of this call, m keys of this call.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention import quiet_attention
from subquad.integrations.transformers.layers import keeps_state
from subquad.integrations.transformers.mask import Mask, Seen, shown_pairs, visible_keys
from subquad.integrations.transformers.state_layer import StateLayer, cut
from subquad.methods import BlockSparse


def attend_to_all(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, is_causal: bool,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Compute exact attention with any mask, as transformers does with torch's function."""
    matrix = mask.matrix if isinstance(mask, Mask) else mask
    is_causal = is_causal and matrix is None and query.shape[-2] > 1
    if bias is not None:
        matrix, is_causal = _with_bias(bias, matrix, is_causal), False
    output: Tensor = quiet_attention(query, key, value, attn_mask=matrix, is_causal=is_causal, **options)
    return output


def attend_to_recent(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, window: Any,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Compute exact attention with any mask to the keys that the state of a window holds, and to the new ones.

    Args:
        query, key, value: The new tokens; the key is marked with its `StateLayer`.
        mask: The mask, which must not show keys that the state does not hold.
        bias: A bias added to each logit, with the columns of the mask; or None.
        window: The `Window` whose state it is.
        **options: Options of exact attention.

    Raises:
        ValueError: The mask shows a key that the state does not hold, or it is not the state of a window.
    """
    state_layer: StateLayer = key.subquad_layer  # type: ignore[attr-defined]
    keys, values = state_layer.recent(window, key, value)
    n, m, total = query.shape[-2], key.shape[-2], state_layer.get_seq_length() + key.shape[-2]
    matrix = mask.matrix if isinstance(mask, Mask) else mask
    if matrix is None:
        matrix = torch.ones(1, 1, n, total, dtype=torch.bool, device=key.device).tril(total - n)
    missing = matrix.shape[-1] - keys.shape[-2]
    if missing > 0 and bool(shown_pairs(matrix[..., :missing]).any()):
        raise ValueError(
            f"past_key_values: the mask shows keys that the state of {window} no longer holds; pass use_cache=False"
        )
    keys, values = (x[:, :, max(0, -missing) :] for x in (keys, values))
    matrix, bias = (x if x is None else x[..., max(0, missing) :] for x in (matrix, bias))
    output = attend_to_all(query, keys, values, matrix, bias, False, **options)
    state_layer.attend(
        query[:, :, :0], key, value, method=window, attn_mask=visible_keys(mask, m), is_causal=True, segment_ids=None,
        scale=options["scale"], enable_gqa=options["enable_gqa"],
    )  # fmt: skip
    return output


def attend_to_seen(query: Tensor, key: Tensor, value: Tensor, seen: Seen, **options: Any) -> Tensor:
    """Continue from the state that comes with the keys, if any; otherwise compute on all keys of the cache."""
    output: Tensor
    state_layer: StateLayer | None = getattr(key, "subquad_layer", None)
    n, m = query.shape[-2], key.shape[-2]
    options |= dict(attn_mask=seen.keys, is_causal=seen.is_causal, segment_ids=seen.segment_ids)
    if state_layer is not None:
        output = state_layer.attend(query, key, value, **options)
        return output
    before = max(0, m - n) if seen.is_causal else 0  # The queries are the last of the positions.
    if before and isinstance(options["method"], BlockSparse):
        raise ValueError("past_key_values: BlockSparse describes a whole sequence; pass use_cache=False")
    has_head_masks = seen.keys is not None and seen.keys.shape[1] > 1
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    # A state has one mask for all heads, and gradients are faster without one.
    if before and (has_head_masks or is_recorded or not keeps_state(options["method"])):
        output = quiet_attention(F.pad(query, (0, 0, before, 0)), key, value, **options)
        return output[:, :, before:]
    if before:
        (empty, *old, first), (query, key, value, options) = cut((query, key, value, options), before)
        _, options["state"] = quiet_attention(empty, *old, return_state=True, **first)
    output = quiet_attention(query, key, value, **options)
    return output


def _with_bias(bias: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return a bias (1, heads, n, m) that hides what the mask hides.

    It uses a finite number, so that a row that sees no key is an average, as in transformers.
    """
    if is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
