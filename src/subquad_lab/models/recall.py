"""A Transformer for recall: the second half of each embedding is the previous token's.

    x_t = [e(token_t)[: w/2], e(token_{t-1})[w/2 :]]

A value thus carries its key, and one layer can find it. Without the shift, a first layer has to learn to look at the
previous token, which takes most of the training: the models of *Zoology* (2023) and *Simple linear attention language
models balance the recall-throughput tradeoff* (2024) have short convolutions for this purpose.

Axes: b sequences, n tokens, w width, h heads, d = w / h.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subquad_lab.models.language import Embedding, Transformer

NUMBER_BYTES = 4  # of a float32


def shifted(x: Tensor) -> Tensor:
    """Return x (b, n, w) with the second half of each row from the row before it, and zeros in the first."""
    half = x.shape[-1] // 2
    before = torch.cat([torch.zeros_like(x[:, :1, half:]), x[:, :-1, half:]], 1)
    return torch.cat([x[..., :half], before], -1)


class ShiftedEmbedding(nn.Module):
    """An embedding with a shift of its second half."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.inner = embedding

    def forward(self, tokens: Tensor) -> Tensor:
        return shifted(self.inner(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)


class RecallTransformer(nn.Module):
    """tokens (b, n) -> logits (b, n, vocabulary); layer i uses method i, and they repeat."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, length: int, methods: Sequence[Any],
        positions: Literal["none", "rotary", "learned"], shift: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.transformer = Transformer(vocabulary, width, layers, heads, length, 0.0, tuple(methods), positions)
        self.shift = width // 2 if shift else 0  # numbers of the previous token
        if shift:
            self.transformer.register_module("embedding", ShiftedEmbedding(self.transformer.embedding))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.transformer(tokens)[0]
        return logits

    @torch.no_grad()
    def state_bytes(self, length: int) -> int:
        """Return the size of what one sequence of `length` tokens leaves for the next: of all layers and the shift."""
        _, (_, states) = self.transformer(torch.zeros(1, length, dtype=torch.long), self.transformer.start(1))
        sizes: list[int] = [state.nbytes for state in states]
        return NUMBER_BYTES * self.shift + sum(sizes)
