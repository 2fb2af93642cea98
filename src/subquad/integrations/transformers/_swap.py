"""A method into the layers of a model, and out again."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from subquad._methods import Method, resolve
from subquad.integrations.transformers._attend import NAME
from subquad.integrations.transformers._cache import hold_states
from subquad.integrations.transformers._layers import Choice, layers_of, method_of
from subquad.integrations.transformers._refusal import UNKNOWN


@dataclass(frozen=True)
class Swap:
    """One attention layer of a model: its number and name, what it had, and what it has now; None if it was left."""

    number: int
    name: str
    before: str
    method: Method | None


@dataclass
class Swapped:
    """What `use` did. `print` shows it, `undo` takes it back; as a context manager it does so at the end."""

    layers: tuple[Swap, ...]
    _restore: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give the layers back what they had. Of several calls of `use`, undo the last one first."""
        while self._restore:
            self._restore.pop()()

    def __enter__(self) -> "Swapped":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        rows = [("layer", "name", "before", "now")]
        rows += [(str(x.number), x.name, x.before, str(x.method or "as before")) for x in self.layers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def use(model: PreTrainedModel, method: Method | str, layers: Iterable[int] | None = None) -> Swapped:
    """Give the attention layers of a model, in place, another method; parameters are not touched.

    layers: the numbers of the layers, in the order in which the report lists them; all if not given. The others keep
        what they had.
    A method with parameters of its own is not made a part of the model: hand them to the optimiser yourself.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> swapped = use(model, "taylor", layers=[1])
    >>> print(swapped)
    layer  name                      before  now
    0      model.layers.0.self_attn  sdpa    as before
    1      model.layers.1.self_attn  sdpa    Taylor(degree=2, basis='symmetric', key_shift=None)
    >>> model.generate(torch.tensor([[1, 3]]), min_new_tokens=3, max_new_tokens=3, pad_token_id=0).shape
    torch.Size([1, 5])
    >>> swapped.undo()
    """
    method = resolve(method)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    found = layers_of(model)
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no layer that looks up its attention by name")
    wanted = range(len(found)) if layers is None else layers
    if not isinstance(wanted, Iterable):
        raise ValueError(f"layers: expected a list of numbers from 0 to {len(found) - 1}, got {layers!r}")
    wanted = list(wanted)
    if outside := [x for x in wanted if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < len(found)]:
        raise ValueError(f"layers: expected a list of numbers from 0 to {len(found) - 1}, got {outside}")
    swaps = []
    for number, (name, layer) in enumerate(found.items()):
        before = str(method_of(layer) or layer.config._attn_implementation)
        swaps.append(Swap(number, name, before, method if number in wanted else None))
    swapped = Swapped(tuple(swaps))

    def put(owner: Any, attribute: str, new: Any) -> None:
        missing, old = attribute not in vars(owner), vars(owner).get(attribute)
        swapped._restore.append(lambda: delattr(owner, attribute) if missing else setattr(owner, attribute, old))
        setattr(owner, attribute, new)

    chosen = [(swap, found[swap.name]) for swap in swaps if swap.method is not None]
    for swap, layer in chosen:
        place = f"{type(model).__name__}.{swap.name} (layer {swap.number})"
        put(layer, "subquad_choice", Choice(method, place))
    if len(chosen) == len(found):
        for config in _configs_of(model):
            put(config, "_attn_implementation_internal", NAME)
    else:
        # Masks are made by the config that all layers share. It stays, for those that stay; we read their masks.
        for _, layer in chosen:
            put(layer, "config", copy.copy(layer.config))
            put(layer.config, "_attn_implementation_internal", NAME)
    swapped._restore.append(model.register_forward_pre_hook(_prepare, with_kwargs=True).remove)
    return swapped


def _configs_of(model: nn.Module) -> Iterator[PreTrainedConfig]:
    """Every config in a model once."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    return (config for config in configs.values() if isinstance(config, PreTrainedConfig))


def _prepare(model: Any, _: Any, arguments: dict[str, Any]) -> None:
    """Before each call of a model: an empty cache that comes in, such as that of `generate`, learns to hold states."""
    weights = arguments.get("output_attentions") or getattr(model.config, "output_attentions", False)
    if weights and any(method_of(layer) for layer in layers_of(model).values()):
        # Not all models tell their layers.
        meaning = UNKNOWN["output_attentions"]
        raise ValueError(f'{type(model).__name__}: output_attentions is {meaning}; use attn_implementation="eager"')
    cache = arguments.get("past_key_values")
    if isinstance(cache, Cache) and not cache.get_seq_length():
        hold_states(model, cache)
