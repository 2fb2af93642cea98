"""The attention function for transformers: finds the method of a layer, reads its requests and its mask.

    position bias, chunks of keys            -> exact attention, whatever the method
    sliding window, soft-capping, sinks      -> Window, whatever the method
    a mask that Window cannot express        -> torch's function and a matrix, if the method is exact attention
    otherwise                                -> the method

Axes: b batch, n queries of this call, m keys of this call.
"""

import re
import warnings
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from subquad._engines import engine_of
from subquad.attention import MethodLike, redirect, resolve, warn_about
from subquad.integrations.transformers.cache import hold_state
from subquad.integrations.transformers.compute import attend_to_all, attend_to_recent, attend_to_seen
from subquad.integrations.transformers.layers import Choice, method_of, methods
from subquad.integrations.transformers.mask import Mask, Seen, read
from subquad.integrations.transformers.request import Request, has_no_window, needs_exact, planned, serve
from subquad.integrations.transformers.state_layer import StateLayer
from subquad.integrations.transformers.unsupported import EXACT_ONLY, NO_METHOD, Unsupported
from subquad.methods import AnyMethod
from subquad.methods.exact import Exact
from subquad.planning.auto import Auto

NAME = "subquad"


def register(method: MethodLike, name: str = NAME) -> None:
    """Make `attn_implementation=name` select a method, in `from_pretrained` and `set_attn_implementation`.

    Importing `subquad.integrations.transformers` registers "subquad" for exact attention.

    Args:
        method: A method or its name, as for `attention`.
        name: A name that begins with "subquad", of letters, digits, "_", "." and "-". transformers downloads names
            with a slash from the Hub, and takes names with "flash" for FlashAttention.

    Raises:
        ValueError: The name or the method is invalid.

    Example:
        >>> import torch
        >>> from subquad import Taylor
        >>> from transformers import BertConfig, BertModel
        >>> register(Taylor(2), "subquad_taylor")
        >>> config = BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> config._attn_implementation = "subquad_taylor"  # what from_pretrained(..., attn_implementation=...) sets
        >>> BertModel(config).eval()(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 8])
    """
    if not re.fullmatch(NAME + r"[\w.-]*", name) or "flash" in name:  # Other names have a meaning in transformers.
        raise ValueError(
            f'name: expected one that begins with "{NAME}", of letters, digits, "_", "." and "-", without "flash", '
            f"got {name!r}"
        )
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
        **others: Further requests of the layer, such as `sliding_window`, `softcap` and `s_aux`.

    Returns:
        The output (b, n, heads, e), and None instead of weights.

    Raises:
        ValueError: The method does not support a request or the mask; the message names the layer.
    """
    chosen = method_of(layer)
    assert chosen is not None  # Otherwise transformers would have called another function.
    _watch(layer)
    if engine_of(chosen) != "exact" and needs_exact(layer):
        chosen = Exact()
    method = chosen
    requested = {name: value for name, value in others.items() if value is not None and value is not False}
    requested |= dict(dropout=dropout) if dropout else {}
    request = Request(*(requested.get(name) for name in ("sliding_window", "softcap", "s_aux")))
    options: dict[str, Any] = dict(scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    is_causal = getattr(layer, "is_causal", True) if is_causal is None else is_causal
    is_split = redirect() is not None
    try:
        _check(requested, NO_METHOD)
        seen = _seen(chosen, request, requested, key, attention_mask, is_causal)
        if seen is not None:
            request = replace(request, window=seen.window)
            if has_no_window(chosen, request, _length(query, key, attention_mask)):
                request = replace(request, window=None)
            method = serve(chosen, request)
        if seen is not None and (engine_of(method) != "exact" or is_split):
            _check(requested, EXACT_ONLY)
            if engine_of(method) == "exact":
                options["dropout_p"] = dropout
            else:
                _warn_about_dropout(layer, method, dropout)
            output = attend_to_seen(query, key, value, seen, method=method, **options)
        else:
            given = (query, key, value, attention_mask, requested.get("position_bias"))
            options |= dict(method=chosen, dropout_p=dropout)
            if hasattr(key, "subquad_layer"):
                output = attend_to_recent(*given, planned(layer, chosen)[0], **options)
            else:
                output = attend_to_all(*given, is_causal, **options)
    except ValueError as error:
        choice: Choice | None = getattr(layer, "subquad_choice", None)
        place = f"{type(layer).__name__} {getattr(layer, 'layer_idx', '')}" if choice is None else choice.place
        advice = error.advice(engine_of(chosen) == "exact") if isinstance(error, Unsupported) else ""
        raise ValueError(f"{place} with {type(method).__name__}: {error}{advice}") from error
    return output.transpose(1, 2).contiguous(), None


def _watch(layer: Any) -> None:
    """Make the cache of a layer whose method was selected by name hold states from the next call on."""
    is_watched = hasattr(layer, "subquad_choice") or hasattr(layer, "subquad_is_watched")
    if not is_watched and not torch.compiler.is_compiling():
        layer.register_forward_pre_hook(hold_state, with_kwargs=True)
        layer.subquad_is_watched = True


def _length(query: Tensor, key: Tensor, mask: Mask | Tensor | None) -> float:
    """Return the number of tokens so far, some of which a sliding cache that holds keys has dropped.

    It is infinite if the window stays although tokens were removed.
    """
    if hasattr(key, "subquad_layer"):
        state_layer: StateLayer = key.subquad_layer
        return inf if state_layer.has_outgrown else state_layer.length_with(key)
    if isinstance(mask, Mask):
        return mask.length + int(mask.arguments.get("kv_offset", 0))
    return key.shape[-2] + (key.shape[-2] != query.shape[-2])  # A full cache returns as many keys as the window has.


def _warn_about_dropout(layer: Any, method: AnyMethod | Auto, dropout: float) -> None:
    if dropout and not hasattr(layer, "subquad_choice"):  # The report of `replace_attention` has listed it.
        warnings.warn(
            f"{type(layer).__name__}: {type(method).__name__} does not support dropout on the weights: removed",
            stacklevel=3,
        )


def _check(requested: dict[str, Any], not_supported: dict[str, str]) -> None:
    for name, meaning in not_supported.items():
        if name in requested:
            raise Unsupported(name, meaning)


def _seen(
    chosen: AnyMethod | Auto, request: Request, requested: dict[str, Any], key: Tensor, mask: Mask | Tensor | None,
    is_causal: bool,
) -> Seen | None:  # fmt: skip
    """Return the mask as `Window`, approximate methods and calls over several ranks read it; None for a matrix.

    Raises:
        Unsupported: The mask cannot be read, and a matrix does not help.
    """
    needs_method = engine_of(chosen) != "exact" or request.changes_weights or redirect() is not None
    if not needs_method:
        window = mask.rule.window if isinstance(mask, Mask) and mask.rule is not None else None
        hides_keys = window is not None and key.shape[-2] > window
        if requested.keys() & {"position_bias", "dropout"} or not (hides_keys or hasattr(key, "subquad_layer")):
            return None
    try:
        return read(mask, is_causal, key.shape[-2], request.window)
    except Unsupported:
        if needs_method:
            raise
        return None
