"""Word language models with one interface: (tokens (b, n), state) -> (logits (b, n, words), state).

    rnn           h = sigmoid(h' H + e I + b1),  y = softmax(h U + b2)
    lstm          torch's LSTM with several layers
    transformer   x + attention(norm x), x + mlp(norm x), with any of subquad's methods

`start(b)` returns the initial state. With a state the models stream: processing a text in pieces gives the same result
as processing it at once. Without a state, the tokens are a complete text and the Transformer returns no state.

Axes: b texts, n tokens, e embedding, w width, h heads, d = w / h.
"""

from dataclasses import replace
from itertools import cycle, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subquad
from subquad.methods import for_layer

State = Any  # a tensor, a tuple of tensors, or one subquad.State per layer; None for a complete text


class Embedding(nn.Module):
    """Input embedding and output projection, with a shared matrix if they are tied."""

    def __init__(self, words: int, embedding: int, width: int, tied: bool) -> None:
        super().__init__()
        self.inward = nn.Parameter(torch.randn(words, embedding) * embedding**-0.5)
        self.narrow = nn.Linear(width, embedding, bias=False) if tied and width != embedding else None
        self.outward = None if tied else nn.Parameter(torch.randn(words, width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.inward)

    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.narrow is None else self.narrow(hidden)
        return F.linear(hidden, self.inward if self.outward is None else self.outward, self.bias)


class SigmoidRNN(nn.Module):
    """A plain recurrent network with a sigmoid activation."""

    def __init__(self, words: int, embedding: int, width: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding = Embedding(words, embedding, width, tied)
        self.inward = nn.Linear(embedding, width)  # I, b1
        self.recurrent = nn.Linear(width, width, bias=False)  # H
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_uniform_(self.inward.weight)
        nn.init.orthogonal_(self.recurrent.weight)

    def start(self, batch: int) -> Tensor:
        return self.recurrent.weight.new_zeros(batch, self.recurrent.in_features)

    def forward(self, tokens: Tensor, state: State = None) -> tuple[Tensor, Tensor]:
        h = self.start(len(tokens)) if state is None else state
        steps = []
        for inward in self.inward(self.dropout(self.embedding(tokens))).unbind(1):
            h = torch.sigmoid(inward + self.recurrent(h))
            steps.append(h)
        return self.embedding.logits(self.dropout(torch.stack(steps, 1))), h


class LSTM(nn.Module):
    """torch's LSTM; the state is (b, layers, 2, w)."""

    def __init__(self, words: int, embedding: int, width: int, layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding = Embedding(words, embedding, width, tied)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)

    def start(self, batch: int) -> Tensor:
        weight = next(self.lstm.parameters())
        return weight.new_zeros(batch, self.lstm.num_layers, 2, self.lstm.hidden_size)

    def forward(self, tokens: Tensor, state: State = None) -> tuple[Tensor, Tensor]:
        state = self.start(len(tokens)) if state is None else state
        h, c = (part.contiguous() for part in state.permute(2, 1, 0, 3))  # (layers, b, w) each
        hidden, (h, c) = self.lstm(self.dropout(self.embedding(tokens)), (h, c))
        return self.embedding.logits(self.dropout(hidden)), torch.stack([h, c]).permute(2, 1, 0, 3)


class Transformer(nn.Module):
    """Pre-norm blocks with causal attention; the state is the number of tokens and one `subquad.State` per layer."""

    def __init__(
        self, words: int, width: int, layers: int, heads: int, context: int, dropout: float,
        method: Any, positions: Literal["rotary", "learned", "none"],
    ) -> None:  # fmt: skip
        super().__init__()
        methods = method if isinstance(method, tuple) else (method,)  # of several, layer i uses number i, cyclically
        self.embedding = Embedding(words, width, width, tied=True)
        self.places = nn.Embedding(context, width) if positions == "learned" else None
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout, own, positions == "rotary") for own in islice(cycle(methods), layers)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def start(self, batch: int) -> State:
        return 0, [None] * len(self.blocks)

    def forward(self, tokens: Tensor, state: State = None, places: Tensor | None = None) -> tuple[Tensor, State]:
        """Return logits and state; `places` (n,) are the positions of the tokens, if these are part of a text."""
        before, states = (0, [None] * len(self.blocks)) if state is None else state
        if places is None:
            places = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        if self.places is not None:
            if before + tokens.shape[1] > self.places.num_embeddings:
                raise ValueError(f"tokens: expected at most {self.places.num_embeddings} with learned positions, "
                                 f"got {before + tokens.shape[1]}")  # fmt: skip
            x = x + self.places(places)
        x, after = self.dropout(x), []
        for block, memory in zip(self.blocks, states, strict=True):
            x, memory = block(x, places, memory, state is not None)
            after.append(memory)
        logits = self.embedding.logits(self.dropout(self.norm(x)))
        return logits, None if state is None else (before + tokens.shape[1], after)


class Block(nn.Module):
    """Attention, then an MLP with one hidden layer, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, method: Any, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary, self.method = heads, rotary, for_layer(method, width // heads, heads)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inward, self.outward = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)
        drawn = method.draw(width // heads) if isinstance(method, subquad.RandomFeatures) else None
        self.register_buffer("random_matrix", drawn)

    def forward(
        self, x: Tensor, places: Tensor, memory: subquad.State | None, streams: bool
    ) -> tuple[Tensor, subquad.State | None]:
        q, k, v = self.heads_of(x, places)
        method = self.method
        if self.random_matrix is not None:
            method = replace(method, matrix=self.random_matrix)
        if streams:
            mixed, memory = subquad.attention(q, k, v, is_causal=True, method=method, state=memory, return_state=True)
        else:
            mixed = subquad.attention(q, k, v, is_causal=True, method=method)
        x = x + self.dropout(self.outward(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norms[1](x))), memory

    def heads_of(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the attention, (b, h, n, d) each."""
        q, k, v = self.inward(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return (rotate(q, places), rotate(k, places), v) if self.rotary else (q, k, v)


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Apply RoPE: rotate pairs of coordinates by the position, so that products depend on distances only."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = places[:, None] * speeds  # (n, d / 2)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine, rest], -1)


Model = SigmoidRNN | LSTM | Transformer


@torch.no_grad()
def generate(
    model: Model, prompt: list[int], count: int, *, temperature: float = 1.0, top_k: int | None = None,
    top_p: float | None = None, generator: torch.Generator | None = None, end: int | None = None,
    banned: int | None = None,
) -> list[int]:  # fmt: skip
    """Return up to `count` words after the prompt; stop after `end`, and never generate `banned`."""
    logits, state = model(torch.tensor([prompt]), model.start(1))
    words: list[int] = []
    while len(words) < count:
        scores = logits[0, -1].float()
        if banned is not None:
            scores[banned] = -torch.inf
        word = int(choose(scores, temperature, top_k, top_p, generator))
        words.append(word)
        if word == end:
            break
        logits, state = model(torch.tensor([[word]]), state)
    return words


def choose(
    scores: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Sample a word from the `top_k` most likely ones and, among them, from the nucleus of probability `top_p`."""
    if temperature == 0:
        return scores.argmax()
    ordered, words = ((scores - scores.max()) / temperature).sort(descending=True, stable=True)
    ordered, words = ordered[:top_k], words[:top_k]
    shares = F.softmax(ordered, -1)
    if top_p is not None:
        shares = torch.where(shares.cumsum(-1) - shares < top_p, shares, 0.0)
    return words[torch.multinomial(shares, 1, generator=generator)][0]
