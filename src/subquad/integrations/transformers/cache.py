"""Caches whose layers hold states: made by `state_cache`, by `generate`, or from a cache that holds keys.

hold_states     an empty cache: one StateLayer for each layer whose methods have states
hold_state      before each call of an attention layer: its layer of the cache, also if it holds keys, only once
"""

from math import inf
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from subquad.integrations.transformers.layers import keeps_state, layers_of, method_of
from subquad.integrations.transformers.request import planned, short_length
from subquad.integrations.transformers.state_layer import StateLayer

STATIC = (
    "past_key_values: a static cache holds keys, but {} a state; "
    'use a DynamicCache (or drop cache_implementation="static")'
)


def state_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache for `past_key_values=`, with states in the layers whose method has one, else with keys.

    After `replace_attention`, the caches that `generate` and the model itself create are such caches too.

    Args:
        model: A transformers model whose layers have methods.

    Returns:
        A `DynamicCache`, or an `EncoderDecoderCache` of two.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10)).eval()
        >>> from subquad.integrations.transformers import replace_attention
        >>> report, cache = replace_attention(model, "taylor"), state_cache(model)
        >>> logits = [model(torch.tensor([[token]]), past_key_values=cache).logits for token in (1, 2, 3)]
        >>> cache.layers[0].state
        State(Taylor(2), length=3, bytes=608)
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=config))
    hold_states(model, cache)
    return cache


def hold_states(model: nn.Module, cache: Cache) -> None:
    """Replace the layers of an empty cache by StateLayers where all methods that read them have states.

    Raises:
        ValueError: It is a static cache, and some of its layers would hold states and others keys.
    """
    layers = [layer for layer in layers_of(model).values() if getattr(layer, "layer_idx", None) is not None]
    if isinstance(cache, EncoderDecoderCache):
        parts = [(cache.self_attention_cache, True), (cache.cross_attention_cache, False)]
        chosen = [(part, [x for x in layers if getattr(x, "is_causal", True) == causal]) for part, causal in parts]
    else:
        chosen = [(cache, layers)]
    for part, readers in chosen:
        if type(part) not in (DynamicCache, StaticCache) or part.offloading:
            continue  # A subclass may do more with its layers than this function knows.
        # Encoder and decoder may use the same indices. Which of them reads a layer is unknown, so all must agree.
        by_index: dict[int, list[Any]] = {layer.layer_idx: [] for layer in readers}
        for layer in readers:
            by_index[layer.layer_idx].append(layer)
        states = {index: read for index, read in by_index.items() if all(map(_holds_state, read))}
        if type(part) is StaticCache and states and len(states) < len(by_index):
            # Masks are made for all layers at once, at the length of one of them.
            raise ValueError(STATIC.format(f"some layers ({', '.join(map(str, states))}) keep"))
        for index, read in states.items():
            _replace(part, index, short_length(read[0], method_of(read[0])))


def hold_state(layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Make the cache of a layer hold its state, before a call of the layer; keys that it holds are read once.

    Training keeps keys: gradients are faster without a state, and a cache that was made in passing is not read.

    Raises:
        ValueError: It is a static cache, and the method of the layer has a state.
    """
    cache = next((x for x in (*arguments, *keywords.values()) if isinstance(x, Cache)), None)
    index = getattr(layer, "layer_idx", None)
    if cache is None or index is None or torch.compiler.is_compiling():
        return
    if isinstance(cache, EncoderDecoderCache):
        is_causal = getattr(layer, "is_causal", True)
        cache = cache.self_attention_cache if is_causal else cache.cross_attention_cache
    old = cache.layers[index] if index < len(cache.layers) else None
    if type(old) is StateLayer and method_of(layer) is not None:
        old.expect()
    if type(old) is StateLayer or (layer.training and torch.is_grad_enabled()) or not _holds_state(layer):
        return
    if isinstance(old, StaticLayer):
        raise ValueError(STATIC.format(f"{type(method_of(layer)).__name__} keeps"))
    if type(cache) is DynamicCache and not cache.offloading:
        # A model whose method was selected by name does not tell whether it is going to remove tokens; windows do.
        may_remove = not hasattr(layer, "subquad_choice") and type(old) is not DynamicSlidingWindowLayer
        _replace(cache, index, inf if may_remove else short_length(layer, method_of(layer)))
        if isinstance(new := cache.layers[index], StateLayer):
            new.expect()


def _holds_state(layer: Any) -> bool:
    """Return whether a layer can read a state instead of keys, which some layers share, as in Gemma 3n."""
    return not getattr(layer.config, "num_kv_shared_layers", None) and keeps_state(planned(layer, method_of(layer))[0])


def _replace(cache: Cache, index: int, kept_up_to: float) -> None:
    """Replace a layer of a cache by a StateLayer, unless it holds more than keys and values."""
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    old = cache.layers[index]
    if type(old) not in (DynamicLayer, DynamicSlidingWindowLayer, StateLayer) and not isinstance(old, StaticLayer):
        return
    holds_keys = isinstance(old, DynamicLayer) and old.is_initialized
    keys, values, length = (old.keys, old.values, old.get_seq_length()) if holds_keys else (None, None, 0)
    new = StateLayer(keys, values, length, kept_up_to)
    if getattr(old, "record_past", False):
        new.activate_past_recording()
    cache.layers[index] = new
