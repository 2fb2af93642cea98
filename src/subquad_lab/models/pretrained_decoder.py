"""transformers models as decoders whose attention layers can get other methods; see `decoders`."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subquad_lab import UsageError
from subquad_lab.models.decoders import Decoder, Stream
from subquad_lab.models.learned_maps import HeadShape
from subquad_lab.models.pretrained import Layer, watch


class PretrainedDecoder(Decoder):
    """A transformers model with a language model head."""

    network: Any

    @property
    def shape(self) -> HeadShape:
        config = self.network.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return HeadShape(config.num_hidden_layers, heads, getattr(config, "num_key_value_heads", None) or heads, width)

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(tokens, use_cache=False).logits
        return logits

    def layers(self, tokens: Tensor) -> list[Layer]:
        found: list[Layer] = []
        watch(self.network.base_model, tokens, found.append)  # The head would not add a layer.
        if len(found) != self.shape.layers:
            raise UsageError(
                f"--model: expected {self.shape.layers} layers with the attention interface of transformers, "
                f"got {len(found)} in {type(self.network).__name__}"
            )
        return found

    def stream(self) -> Stream:
        return _PretrainedStream(self.network)

    def _give(self, methods: Sequence[Any]) -> None:
        from subquad.integrations.transformers import replace_attention  # here: transformers is optional

        self.attention_names = []
        for number, method in enumerate(methods):
            report = replace_attention(self.network, method, layers=[number])
            self.attention_names.append(report.layers[number].name)

    def _projections(self) -> Iterable[str]:
        for name in self.attention_names:
            for inner, module in self.network.get_submodule(name).named_modules():
                if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                    yield f"{name}.{inner}"


class _PretrainedStream(Stream):
    def __init__(self, network: Any) -> None:
        from subquad.integrations.transformers import state_cache

        self.network, self.cache = network, state_cache(network)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        last: Tensor = self.network(tokens[None], past_key_values=self.cache, use_cache=True).logits[0, -1]
        return last

    @property
    def nbytes(self) -> int:
        return sum(map(_size_of, self.cache.layers))


def _size_of(layer: Any) -> int:
    """Return the bytes that a layer of a cache keeps: a state, or keys and values."""
    state = getattr(layer, "state", None)
    return int(state.nbytes if state is not None else layer.keys.nbytes + layer.values.nbytes)
