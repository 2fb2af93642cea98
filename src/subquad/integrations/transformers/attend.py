"""The attention function for transformers: finds the method of a layer, reads the mask, computes attention.

Axes: b batch, n queries of this call, m keys of this call.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from subquad._engines import engine_of
from subquad.attention import MethodLike, resolve, warn_about
from subquad.integrations.transformers.cache import StateLayer
from subquad.integrations.transformers.layers import Choice, keeps_state, method_of, methods
from subquad.integrations.transformers.mask import Mask, read
from subquad.integrations.transformers.unsupported import EXACT_ONLY, NO_METHOD, unsupported
from subquad.nn.binding import quiet_attention

NAME = "subquad"


def register(method: MethodLike, name: str = NAME) -> None:
    """Make `attn_implementation=name` select a method, in `from_pretrained` and `set_attn_implementation`.

    Importing `subquad.integrations.transformers` registers "subquad" for exact attention.

    Args:
        method: A method or its name, as for `attention`.
        name: A name that begins with "subquad".

    Raises:
        ValueError: The name does not begin with "subquad", or the method is unknown.

    Example:
        >>> from subquad import Taylor
        >>> from transformers import BertConfig, BertModel
        >>> register(Taylor(2), "subquad_taylor")
        >>> config = BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> config._attn_implementation = "subquad_taylor"  # what from_pretrained(..., attn_implementation=...) sets
        >>> BertModel(config).eval()(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 8])
    """
    if not name.startswith(NAME):  # Other names have a meaning in transformers.
        raise ValueError(f'name: expected one that begins with "{NAME}", got {name!r}')
    found = resolve(method)
    warn_about(found, stacklevel=2)
    methods[name] = found
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, Mask)


def attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute the attention of a layer; called by transformers.

    Args:
        layer: The module whose attention is computed; its method is found by its config and `replace_attention`.
        query: (b, heads, n, d).
        key: (b, key heads, m, d).
        value: (b, key heads, m, e).
        attention_mask: A `Mask`, or a matrix (b, 1 or heads, n, m).
        dropout: Dropout on the weights; `Exact` only.
        scaling: Factor of the logits.
        is_causal: Overrides `layer.is_causal`.
        **others: Further requests of the layer.

    Returns:
        The output (b, n, heads, e), and None instead of weights.

    Raises:
        ValueError: The method does not support a request or the mask; the message names the layer.
    """
    method = method_of(layer)
    assert method is not None  # Otherwise transformers would have called another function.
    is_exact = engine_of(method) == "exact"
    is_causal = getattr(layer, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = dict(scale=scaling, enable_gqa=query.shape[1] != key.shape[1], method=method)
    requested = {name: value for name, value in others.items() if value is not None and value is not False}
    try:
        for name, meaning in (NO_METHOD if is_exact else NO_METHOD | EXACT_ONLY).items():
            if name in requested or (name == "dropout" and dropout):
                raise unsupported(name, meaning)
        if is_exact:
            bias = requested.get("position_bias")
            output = _exact(query, key, value, attention_mask, bias, is_causal, dropout_p=dropout, **options)
        else:
            output = _approximate(query, key, value, attention_mask, is_causal, **options)
    except ValueError as error:
        choice: Choice | None = getattr(layer, "subquad_choice", None)
        place = f"{type(layer).__name__} {getattr(layer, 'layer_idx', '')}" if choice is None else choice.place
        raise ValueError(f"{place} with {type(method).__name__}: {error}") from error
    return output.transpose(1, 2).contiguous(), None


def _exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, is_causal: bool,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Compute exact attention with any mask, as transformers does with torch's function."""
    if hasattr(key, "subquad_layer"):
        raise ValueError("past_key_values: expected a cache of keys, got states of another method")
    matrix = mask.matrix if isinstance(mask, Mask) else mask
    is_causal = is_causal and matrix is None and query.shape[-2] > 1
    if bias is not None:
        matrix, is_causal = _with_bias(bias, matrix, is_causal), False
    output: Tensor = quiet_attention(query, key, value, attn_mask=matrix, is_causal=is_causal, **options)
    return output


def _approximate(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, is_causal: bool, **options: Any
) -> Tensor:
    """Continue from the state that comes with the keys, if any; otherwise compute on all keys of the cache."""
    state_layer: StateLayer | None = getattr(key, "subquad_layer", None)
    n, m = query.shape[-2], key.shape[-2]
    seen = read(mask, is_causal, m)
    options |= dict(attn_mask=seen.keys, is_causal=seen.is_causal, segment_ids=seen.segment_ids)
    if state_layer is not None:
        return state_layer.attend(query, key, value, **options)
    before = max(0, m - n) if seen.is_causal else 0  # The queries are the last of the positions.
    output: Tensor
    has_head_masks = seen.keys is not None and seen.keys.shape[1] > 1
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    # A state has one mask for all heads, and gradients are faster without one.
    if before and (has_head_masks or is_recorded or not keeps_state(options["method"])):
        output = quiet_attention(F.pad(query, (0, 0, before, 0)), key, value, **options)
        return output[:, :, before:]
    if before:
        first, options = _cut(options, before)
        _, state = quiet_attention(
            query[:, :, :0], key[:, :, :before], value[:, :, :before], return_state=True, **first
        )
        key, value, options["state"] = key[:, :, before:], value[:, :, before:], state
    output = quiet_attention(query, key, value, **options)
    return output


def _cut(options: dict[str, Any], before: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options for the first keys, and for the others: masks of keys and segments are cut."""
    masks = {name: options[name] for name in ("attn_mask", "segment_ids") if options[name] is not None}
    first = options | {name: mask[..., :before] for name, mask in masks.items()}
    return first, options | {name: mask[..., before:] for name, mask in masks.items()}


def _with_bias(bias: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return a bias (1, heads, n, m) that hides what the mask hides.

    It uses a finite number, so that a row that sees no key is an average, as in transformers.
    """
    if is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
