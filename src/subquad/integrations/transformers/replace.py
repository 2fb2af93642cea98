"""Give the attention layers of a Hugging Face model another method, and undo it."""

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from subquad.attention import MethodLike, resolve, warn_about
from subquad.integrations.transformers.attend import NAME
from subquad.integrations.transformers.cache import hold_state, hold_states
from subquad.integrations.transformers.layers import Choice, head_sizes, layers_of, method_of
from subquad.integrations.transformers.request import dropout_of, planned
from subquad.integrations.transformers.unsupported import NO_METHOD
from subquad.methods import AnyMethod
from subquad.nn.binding import own_method
from subquad.nn.report import Replacement, Replacements, check_layers, describe
from subquad.planning.auto import Auto

MAP = "subquad_map"  # the attribute of a layer that holds its learned map
FITTED = "subquad_methods"  # the entry of a config that holds what `fit_attention` has chosen for each layer


def replace_attention(
    model: PreTrainedModel, method: MethodLike | Mapping[int, MethodLike], *, layers: Iterable[int] | None = None
) -> Replacements:
    """Give the attention layers of a Hugging Face model another method, in place.

    Parameters are not changed. Caches then hold a `State`, for methods that have one: those of `generate`, those that
    the model creates itself, and those that are passed in, even if they hold keys.

    Layers that the method cannot serve get what they need, and the report lists them: a sliding window, logit
    soft-capping or learned sinks a `Window` with the same options, which is exact; a position bias or chunks of keys
    `Exact`. Dropout on the weights is removed where the method does not support it.

    Args:
        model: A transformers model.
        method: A method or its name, as for `attention`; or one for each layer to change, by its number. A map that is
            made for each layer, as `Hedgehog()` or "window:64+hedgehog", becomes part of the layer, as `subquad_map`.
            The parameters of any other map are shared by all layers and do not become part of the model; pass them to
            the optimizer separately.
        layers: Numbers of the layers to change, in the order of the report; all by default. The other layers keep
            their attention, masks and cache.

    Returns:
        A report that prints as a table. Its `undo()` restores the attention that the layers had; used as a context
        manager, it does so on exit.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: No layer of the model looks up its attention by name, or `layers` or `method` is invalid.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        >>> report = replace_attention(model, "taylor", layers=[1])
        >>> print(report)
        layer  name                      before  now
        0      model.layers.0.self_attn  sdpa    unchanged
        1      model.layers.1.self_attn  sdpa    Taylor(2)
        >>> model.generate(torch.tensor([[1, 3]]), min_new_tokens=3, max_new_tokens=3, pad_token_id=0).shape
        torch.Size([1, 5])
        >>> report.undo()
    """
    found = _attention_layers(model)
    methods = _methods_of(method, layers, len(found))
    rows, without_dropout, own_methods = [], [], dict[str, Any]()
    for number, (name, layer) in enumerate(found.items()):
        before, _ = planned(layer, method_of(layer))
        label = layer.config._attn_implementation if before is None else describe(before)
        own = own_methods[name] = _own_method(layer, methods[number]) if number in methods else None
        now, note = planned(layer, own)
        if now is not None and (dropout := dropout_of(layer, methods[number], now)):
            without_dropout.append(f"{name} ({describe(now)})")
            note = f"{note}; dropout={dropout} removed".removeprefix("; ")
        rows.append(Replacement(number, name, label, now, note))
    report = Replacements(tuple(rows))
    _exchange(model, found, methods, own_methods, report)
    for each in {id(each): each for each in methods.values()}.values():
        warn_about(each, stacklevel=2)
    if without_dropout:
        warnings.warn(f"dropout on the weights is removed from {', '.join(without_dropout)}", stacklevel=2)
    return report


def _methods_of(method: Any, layers: Iterable[int] | None, count: int) -> dict[int, AnyMethod | Auto]:
    """Return the method of each layer that is to be changed, by number."""
    if not isinstance(method, Mapping):
        return dict.fromkeys(sorted(check_layers(layers, count)), resolve(method))
    if layers is not None:
        raise ValueError("layers: expected None with a method for each layer, which already says which to change")
    return {number: resolve(method[number]) for number in sorted(check_layers(method, count))}


def _attention_layers(model: Any) -> dict[str, Any]:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers model, got {type(model).__name__}; for a model that contains "
            "torch.nn.MultiheadAttention, use subquad.replace_attention"
        )
    found = layers_of(model)
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no layer that looks up its attention by name")
    return found


def _own_method(layer: Any, method: Any) -> Any:
    """Return the method of one layer: a learned map that is made for it, or an `Auto` that remembers its logits."""
    if getattr(method, "remember", False):
        return copy.copy(method)
    head_dim, heads, key_heads = head_sizes(layer)
    return own_method(method, head_dim, heads, next(layer.parameters(), None), key_heads)


def _exchange(
    model: PreTrainedModel, found: dict[str, Any], methods: dict[int, Any], own_methods: dict[str, Any],
    report: Replacements,
) -> None:  # fmt: skip
    """Set the attributes that select the method, and record in the report how to undo it."""
    put = partial(set_attribute, report)
    chosen = [(row, found[row.name]) for row in report.layers if row.method is not None]
    for row, layer in chosen:
        own = own_methods[row.name]
        put(layer, "subquad_choice", Choice(own, f"{type(model).__name__}.{row.name} (layer {row.number})"))
        made = own if isinstance(own, nn.Module) and own is not methods[row.number] else None
        if made is not None or getattr(layer, MAP, None) is not None:
            put(layer, MAP, made)
    if len(chosen) == len(found):
        for config in _configs_of(model):
            put(config, "_attn_implementation_internal", NAME)
    else:
        # Masks are created from the config that all layers share. It stays, for the unchanged layers; `attend` can read
        # their masks.
        for _, layer in chosen:
            put(layer, "config", copy.copy(layer.config))
            put(layer.config, "_attn_implementation_internal", NAME)
    for _, layer in chosen:
        report._undo_steps.append(layer.register_forward_pre_hook(hold_state, with_kwargs=True).remove)
    if hasattr(model, "_prepare_cache_for_generation"):
        put(model, "_prepare_cache_for_generation", partial(_prepare_cache, model))
    report._undo_steps.append(model.register_forward_pre_hook(_refuse_weights, with_kwargs=True).remove)
    choices = {row.name: layer.subquad_choice for row, layer in chosen}
    if saved := getattr(model.config, FITTED, None):  # Those of these layers hold no longer.
        put(model.config, FITTED, {name: method for name, method in saved.items() if name not in choices})
    report._is_in_place = lambda name: getattr(found[name], "subquad_choice", None) is choices[name]


def set_attribute(report: Replacements, owner: Any, name: str, value: Any) -> None:
    """Set an attribute, and record in the report how to undo it."""
    held = vars(owner) | vars(owner).get("_modules", {})
    missing, old = name not in held, held.get(name)
    report._undo_steps.append(lambda: delattr(owner, name) if missing else setattr(owner, name, old))
    setattr(owner, name, value)


def _configs_of(model: nn.Module) -> Iterator[PreTrainedConfig]:
    """Return every config in a model once."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    return (config for config in configs.values() if isinstance(config, PreTrainedConfig))


def _prepare_cache(model: Any, *arguments: Any, **keywords: Any) -> None:
    """Create the cache of `generate`, as transformers does, and make it hold states."""
    create = type(model)._prepare_cache_for_generation
    create(model, *arguments, **keywords)
    given = inspect.signature(create).bind(model, *arguments, **keywords).arguments
    cache = given["model_kwargs"].get("past_key_values")
    if isinstance(cache, Cache) and not cache.get_seq_length():
        hold_states(model, cache)
        if given["generation_config"].is_assistant:  # Its tokens are proposals, which may be removed.
            cache.activate_past_recording()


def _refuse_weights(model: Any, _: Any, arguments: dict[str, Any]) -> None:
    """Raise ValueError if weights are requested: not all models pass this argument to their layers."""
    weights = arguments.get("output_attentions") or getattr(model.config, "output_attentions", False)
    if weights and any(method_of(layer) for layer in layers_of(model).values()):
        raise ValueError(
            f"{type(model).__name__}: output_attentions ({NO_METHOD['output_attentions']}) is not supported; "
            'use attn_implementation="eager"'
        )
