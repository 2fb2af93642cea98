"""The layers of a model that look up their attention by a name, and the method of each."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from subquad._auto import Auto
from subquad._features import Exact
from subquad._methods import Method

methods: dict[str, Method] = {}  # by the name under which transformers knows them


@dataclass(frozen=True)
class Choice:
    """What `use` leaves in a layer."""

    method: Method
    place: str  # the name of the layer, for errors


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The layers that look up their attention by name, in the order of the model."""

    def looks_up(module: nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        is_layer = code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
        return is_layer and isinstance(getattr(module, "config", None), PreTrainedConfig)

    return {name: module for name, module in model.named_modules() if looks_up(module)}


def method_of(layer: Any) -> Method | None:
    """None where the layer's attention is not ours."""
    default = methods.get(layer.config._attn_implementation)
    choice: Choice | None = getattr(layer, "subquad_choice", None)
    return default if default is None or choice is None else choice.method


def keeps_state(method: Method | None) -> bool:
    """Exact attention is better off with the keys themselves, and Auto decides by them."""
    return method is not None and not isinstance(method, Exact | Auto)
