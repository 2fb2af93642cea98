"""Speech to characters: an encoder of audio frames, and a decoder that attends to them.

    encoder      two convolutions over time, the second with stride 2, + sinusoids; blocks x + attention(norm x),
                 x + mlp(norm x); norm                                                        812,800 parameters
    lstm         embedding, norm, LSTM; a block that attends to the frames; norm, linear      658,435
    attention    embedding + learned positions; x + causal attention(norm x); the same block;
                 norm, linear                                                                 517,035

(80 mels, width 200, 2 blocks, 35 characters, 98 positions.) Padding is masked in every layer: the result for a clip
does not depend on the other clips of the batch. `start` returns the initial state of a decoder; with a state, a decoder
continues with one or more characters.

Axes: b clips, t frames, n characters, w width, h heads.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subquad
from subquad.methods import for_layer

State = Any  # of a decoder; `picked` selects and reorders its clips
Seen = tuple[Tensor, Tensor, Tensor]  # keys and values (b, h, t, w / h), and the mask (b, t), True = attend
Decoder = Literal["lstm", "attention"]


class Attention(nn.Module):
    """Multi-head attention without a bias on the keys, with any of subquad's methods."""

    def __init__(self, width: int, heads: int, method: Any) -> None:
        super().__init__()
        self.heads, self.method = heads, for_layer(method, width // heads, heads)
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)
        drawn = method.draw(width // heads) if isinstance(method, subquad.RandomFeatures) else None
        self.register_buffer("random_matrix", drawn)

    def seen(self, x: Tensor, keep: Tensor) -> Seen:
        """Return keys and values of x (b, t, w), and the mask keep (b, t)."""
        return self._split(self.key(x)), self._split(self.value(x)), keep

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        """Attend from x (b, n, w) to `seen`."""
        k, v, keep = seen
        q = self._split(self.query(x))
        return self._join(subquad.attention(q, k, v, method=self._drawn(), key_padding_mask=keep))

    def stream(self, x: Tensor, memory: subquad.State | None) -> tuple[Tensor, subquad.State]:
        """Causal attention of x (b, n, w) to earlier tokens in `memory` and to itself."""
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed, memory = subquad.attention(q, k, v, is_causal=True, method=self._drawn(), state=memory,
                                          return_state=True)  # fmt: skip
        return self._join(mixed), memory

    def causal(self, x: Tensor) -> Tensor:
        """Causal attention of x to itself, without a state, for training."""
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        return self._join(subquad.attention(q, k, v, is_causal=True, method=self._drawn()))

    def weights(self, x: Tensor, seen: Seen) -> Tensor:
        """Return the weights of exact attention, (b, h, n, t); rows sum to 1."""
        k, _, keep = seen
        scores: Tensor = (self._split(self.query(x)) @ k.mT) * k.shape[-1] ** -0.5
        return scores.masked_fill(~keep[:, None, None], -torch.inf).softmax(-1)

    def _drawn(self) -> Any:
        return self.method if self.random_matrix is None else replace(self.method, matrix=self.random_matrix)

    def _split(self, x: Tensor) -> Tensor:
        parts: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return parts

    def _join(self, mixed: Tensor) -> Tensor:
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x), with attention to `seen`."""

    def __init__(self, width: int, heads: int, method: Any, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads, method)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x), seen))
        made: Tensor = x + self.dropout(self.mlp(self.norms[1](x)))
        return made

    def of_itself(self, x: Tensor, keep: Tensor) -> Tensor:
        """Apply the block with attention of x to itself."""
        made: Tensor = self(x, self.attention.seen(self.norms[0](x), keep))
        return made


class Encoder(nn.Module):
    """Frames (b, t, mels) and their valid `lengths` (b) -> features (b, ceil(t / 2), w) and their mask."""

    def __init__(self, mels: int, width: int, heads: int, blocks: int, method: Any, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv1d(mels, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(width, heads, method, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.first((frames * first(lengths, frames.shape[1])[..., None]).mT))
        x = F.gelu(self.second(x * first(lengths, frames.shape[1])[:, None])).mT
        keep = first((lengths + 1) // 2, x.shape[1])
        x = self.dropout(x + sinusoids(x.shape[1], x.shape[2]).to(x))
        for block in self.blocks:
            assert isinstance(block, Block)
            x = block.of_itself(x, keep)
        return self.norm(x), keep


def first(lengths: Tensor, size: int) -> Tensor:
    """Return a mask (b, size) that is True for the first `lengths` positions of each row."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def sinusoids(length: int, width: int) -> Tensor:
    """Return sinusoidal positions (length, width): sines, then cosines, with wavelengths from 2 pi to 20,000 pi."""
    half = width // 2
    speeds = 10_000.0 ** (-torch.arange(half) / (half - 1))
    angles = torch.arange(length)[:, None] * speeds
    return torch.cat([angles.sin(), angles.cos()], 1)


class LSTMDecoder(nn.Module):
    """LSTM decoder; the state is (b, 2, w)."""

    def __init__(self, characters: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.cross = Block(width, heads, subquad.Exact(), dropout)
        self.out = nn.Linear(width, characters)
        self.dropout = nn.Dropout(dropout)

    def start(self, clips: int) -> State:
        return self.out.weight.new_zeros(clips, 2, self.out.in_features)

    def before_cross(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = (part[None].contiguous() for part in state.unbind(1))
        x, (h, c) = self.lstm(self.dropout(self.norms[0](self.embedding(tokens))), (h, c))
        return x, torch.stack([h[0], c[0]], 1)

    def forward(self, tokens: Tensor, seen: Seen, state: State) -> tuple[Tensor, State]:
        x, state = self.before_cross(tokens, self.start(len(tokens)) if state is None else state)
        return self.out(self.norms[1](self.cross(x, seen))), state


class AttentionDecoder(nn.Module):
    """Attention decoder; the state is the number of characters so far and a `subquad.State`."""

    def __init__(self, characters: int, width: int, heads: int, dropout: float, positions: int, method: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.places = nn.Embedding(positions, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads, method)
        self.cross = Block(width, heads, subquad.Exact(), dropout)
        self.out = nn.Linear(width, characters)
        self.dropout = nn.Dropout(dropout)

    def start(self, clips: int) -> State:
        return 0, None

    def before_cross(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        before, memory = (0, None) if state is None else state
        places = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.places(places))
        if state is None:
            return x + self.dropout(self.attention.causal(self.norms[0](x))), None
        mixed, memory = self.attention.stream(self.norms[0](x), memory)
        return x + self.dropout(mixed), (before + tokens.shape[1], memory)

    def forward(self, tokens: Tensor, seen: Seen, state: State) -> tuple[Tensor, State]:
        x, state = self.before_cross(tokens, state)
        return self.out(self.norms[1](self.cross(x, seen))), state


def picked(state: State, clips: Tensor) -> State:
    """Return the state with clips selected, repeated or reordered."""
    if isinstance(state, Tensor):
        return state[clips]
    before, memory = state
    return before, None if memory is None else memory[clips]


class Speech(nn.Module):
    """Frames and the characters so far -> logits of the next characters (b, n, characters)."""

    def __init__(self, encoder: Encoder, decoder: LSTMDecoder | AttentionDecoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def seen(self, frames: Tensor, lengths: Tensor) -> Seen:
        """Return the keys and values of the decoder's cross-attention."""
        return self.decoder.cross.attention.seen(*self.encoder(frames, lengths))

    def forward(self, frames: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.decoder(tokens, self.seen(frames, lengths), None)[0]
        return logits

    @torch.no_grad()
    def look(self, frames: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
        """Return the cross-attention weights of the decoder, (b, h, n, ceil(t / 2))."""
        x, _ = self.decoder.before_cross(tokens, self.decoder.start(len(tokens)))
        cross = self.decoder.cross
        return cross.attention.weights(cross.norms[0](x), self.seen(frames, lengths))


@torch.no_grad()
def spell(
    model: Speech, frames: Tensor, lengths: Tensor, begin: int, end: int, never: list[int], limit: int, beams: int = 1
) -> list[list[int]]:
    """Decode each clip by beam search up to `end`, with at most `limit` characters and none of `never`.

    A beam width of 1 is greedy. Finished texts wait for the others; the result is the text with the highest mean log
    probability of its characters and its end.
    """
    clips, device = len(frames), frames.device
    k, v, keep = (x.repeat_interleave(beams, 0) for x in model.seen(frames, lengths))
    state = model.decoder.start(clips * beams)
    texts = torch.full((clips, beams, 1), begin, device=device)
    scores = torch.full((clips, beams), -torch.inf, device=device)
    scores[:, 0] = 0.0  # All beams start equal, so only the first counts.
    ended = torch.zeros(clips, beams, dtype=torch.bool, device=device)
    sizes = torch.zeros(clips, beams, device=device)
    for _ in range(limit):
        logits, state = model.decoder(texts[:, :, -1].flatten()[:, None], (k, v, keep), state)
        logits[..., never] = -torch.inf
        steps = logits[:, 0].log_softmax(-1).view(clips, beams, -1)
        waiting = torch.full_like(steps, -torch.inf)
        waiting[..., end] = 0.0
        steps = torch.where(ended[..., None], waiting, steps)
        scores, places = (scores[..., None] + steps).flatten(1).topk(beams)
        origin, character = places // steps.shape[-1], places % steps.shape[-1]
        texts = torch.cat(
            [texts.gather(1, origin[..., None].expand(-1, -1, texts.shape[-1])), character[..., None]], -1
        )
        sizes = sizes.gather(1, origin) + ~ended.gather(1, origin)
        ended = ended.gather(1, origin) | (character == end)
        state = picked(state, (torch.arange(clips, device=device)[:, None] * beams + origin).flatten())
        if ended.all():
            break
    best = (scores / sizes).argmax(1)
    chosen = texts[torch.arange(clips, device=device), best, 1:].tolist()
    return [text[: text.index(end)] if end in text else text for text in chosen]
