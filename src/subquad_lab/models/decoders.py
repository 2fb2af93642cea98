"""Trained decoders behind one interface: the word Transformer, and transformers models (`pretrained_decoder`).

    logits(tokens)         (b, n) -> (b, n, words)
    layers(tokens)         queries, keys, values and output of each attention layer
    converted(methods)     a decoder with the same parameters, which it shares, and another method in each layer
    adapt(rank)            add matrices of low rank to the projections of the attention: W + B A
    stream()               one token after another, with a state of each layer

Axes: b texts, n tokens, h heads, d width.
"""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

import subquad
from subquad_lab import UsageError
from subquad_lab.models.language import Block, Transformer
from subquad_lab.models.learned_maps import HeadShape
from subquad_lab.models.pretrained import Layer


class Stream(ABC):
    """A decoder that reads one text; the state that it keeps is all that it knows of the tokens so far."""

    @abstractmethod
    def read(self, tokens: Tensor) -> Tensor:
        """Read further tokens (n,) and return the logits after the last of them."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size of the state of all layers."""


class Decoder(ABC):
    """A causal language model whose attention layers can get other methods."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    @property
    @abstractmethod
    def shape(self) -> HeadShape:
        """The attention of the model."""

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens, (b, n, words)."""

    @abstractmethod
    def layers(self, tokens: Tensor) -> list[Layer]:
        """Return what each attention layer reads and computes, without gradients."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a stream that has read nothing."""

    @abstractmethod
    def _give(self, methods: Sequence[Any]) -> None:
        """Give each layer its method."""

    @abstractmethod
    def _projections(self) -> Iterable[str]:
        """Return the names of the linear layers before and after the attention."""

    def converted(self, methods: Sequence[Any]) -> Self:
        """Return a decoder that shares all parameters, with a method for each layer, in evaluation mode."""
        shared = {id(tensor): tensor for tensor in (*self.network.parameters(), *self.network.buffers())}
        other = type(self)(copy.deepcopy(self.network, shared).eval())
        other._give(methods)
        return other

    def adapt(self, rank: int) -> dict[str, nn.Parameter]:
        """Add matrices of low rank to the projections, and return them by name; B = 0 at first."""
        import peft  # here: it imports transformers, which takes seconds

        names = list(self._projections())
        most = min(min(self.network.get_parameter(f"{name}.weight").shape) for name in names)
        if rank > most:
            raise UsageError(f"--rank: expected at most {most}, the smallest side of a projection, got {rank}")
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
        before = {id(parameter) for parameter in self.network.parameters()}
        required = [(parameter, parameter.requires_grad) for parameter in self.network.parameters()]
        peft.inject_adapter_in_model(config, self.network)
        self.network.eval()
        for parameter, is_required in required:  # peft freezes what it does not add.
            parameter.requires_grad_(is_required)
        return {name: each for name, each in self.network.named_parameters() if id(each) not in before}

    def checksum(self) -> str:
        """Return the SHA-256 of all parameters and their names."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.network.state_dict().items()):
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().numpy())
        return found.hexdigest()


class WordDecoder(Decoder):
    """A Transformer of the experiment `language`."""

    network: Transformer

    @property
    def shape(self) -> HeadShape:
        block = self._blocks[0]
        return HeadShape(len(self._blocks), block.heads, block.heads, block.outward.in_features // block.heads)

    @property
    def _blocks(self) -> list[Block]:
        return list(self.network.blocks)  # type: ignore[arg-type]

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(tokens)[0]
        return logits

    @torch.no_grad()
    def layers(self, tokens: Tensor) -> list[Layer]:
        found: list[Layer] = []

        def see(block: Block, arguments: tuple[Any, ...], _: Any) -> None:
            query, key, value = block.heads_of(*arguments[:2])
            output = subquad.attention(query, key, value, is_causal=True)
            found.append(Layer(query, key, value, output, None, True))

        hooks = [block.register_forward_hook(see) for block in self._blocks]
        try:
            self.network(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def stream(self) -> Stream:
        return _WordStream(self.network)

    def _give(self, methods: Sequence[Any]) -> None:
        for block, method in zip(self._blocks, methods, strict=True):
            vars(block)["method"] = method  # not as a module: its parameters belong to whoever made it

    def _projections(self) -> Iterable[str]:
        return (f"blocks.{i}.{name}" for i in range(len(self._blocks)) for name in ("inward", "outward"))


class _WordStream(Stream):
    def __init__(self, network: Transformer) -> None:
        self.network, self.state = network, network.start(1)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        logits, self.state = self.network(tokens[None], self.state)
        last: Tensor = logits[0, -1]
        return last

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.state[1])
