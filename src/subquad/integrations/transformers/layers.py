"""The layers of a model that look up their attention by name, and the method of each."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from subquad._engines import engine_of
from subquad.methods import AnyMethod
from subquad.methods.block_sparse import BlockSparse
from subquad.planning.auto import Auto

methods: dict[str, AnyMethod | Auto] = {}  # by the name that is registered in transformers


@dataclass(frozen=True)
class Choice:
    """The attribute `subquad_choice` that `replace_attention` sets on a layer."""

    method: AnyMethod | Auto
    place: str  # the name of the layer, for errors


def layers_of(model: nn.Module) -> dict[str, Any]:
    """Return the layers that look up their attention by name, in the order of the model."""

    def looks_up(module: nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        is_layer = code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
        return is_layer and isinstance(getattr(module, "config", None), PreTrainedConfig)

    return {name: module for name, module in model.named_modules() if looks_up(module)}


def method_of(layer: Any) -> AnyMethod | Auto | None:
    """Return the method that was chosen for a layer; None if its attention function is not `attend`."""
    default = methods.get(layer.config._attn_implementation)
    choice: Choice | None = getattr(layer, "subquad_choice", None)
    return default if default is None or choice is None else choice.method


def keeps_state(method: AnyMethod | Auto | None) -> bool:
    """Return whether a method caches a State; exact attention, Auto and BlockSparse need the keys themselves."""
    return method is not None and not isinstance(method, Auto | BlockSparse) and engine_of(method) != "exact"


def head_sizes(layer: Any) -> tuple[int, int, int]:
    """Return the width of a head, and the numbers of query heads and of key heads, by the layer and its config."""
    config = layer.config
    heads: int = getattr(config, "num_attention_heads", 1)
    width = getattr(layer, "head_dim", None) or getattr(config, "head_dim", None)
    return width or config.hidden_size // heads, heads, getattr(config, "num_key_value_heads", None) or heads
