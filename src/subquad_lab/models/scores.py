"""What a decoder can do: predict a text, repeat it, and generate token by token.

    cross-entropy = mean of -log p(token | previous tokens of the same piece),  perplexity = exp(cross-entropy)

Axes: b pieces, n tokens.
"""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad_lab.models.decoders import Decoder

TOKENS_AT_ONCE = 2048  # per forward pass
MAX_ENTROPY = 700.0  # whose exponential is still finite
REPEATED_TOKENS = 8192  # that are read to see what is recalled
TIMED_TOKENS = 32


@torch.no_grad()
def entropy(decoder: Decoder, tokens: Tensor, context: int, check: Callable[[], None] = lambda: None) -> float:
    """Return the cross-entropy over all tokens (n,) except the first, in pieces of `context` tokens.

    Args:
        decoder: The decoder.
        tokens: The text.
        context: Length of a piece.
        check: Called regularly; it may raise to interrupt.
    """
    device = next(decoder.network.parameters()).device
    count = len(tokens) - 1
    whole = count // context * context
    pieces = [(tokens[:whole].view(-1, context), tokens[1 : whole + 1].view(-1, context)),
              (tokens[None, whole:-1], tokens[None, whole + 1 :])]  # fmt: skip
    total = torch.zeros((), dtype=torch.float64)
    for inputs, targets in pieces:
        if not inputs.numel():
            continue
        rows = max(1, TOKENS_AT_ONCE // inputs.shape[1])
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            check()
            logits = decoder.logits(x.to(device)).flatten(0, 1)
            total += F.cross_entropy(logits, y.to(device).flatten(), reduction="sum").double().cpu()
    return float(total) / count


def perplexity(entropy: float) -> float:
    """Return exp(entropy), bounded so that it is a finite number; NaN stays NaN.

    >>> perplexity(0.0), perplexity(1e9) < math.inf, perplexity(math.nan)
    (1.0, True, nan)
    """
    return math.exp(min(entropy, MAX_ENTROPY))


@torch.no_grad()
def repeated_entropies(decoder: Decoder, tokens: Tensor, context: int) -> tuple[float, float]:
    """Return the cross-entropy of pieces of a text, and of the same pieces when they are repeated at once.

    Each piece has half the context, so that the first copy is in reach of the second. A model that recalls the first
    copy can predict the second.
    """
    device, half = next(decoder.network.parameters()).device, context // 2
    count = max(1, min(REPEATED_TOKENS // context, len(tokens) // half))
    piece = tokens[: count * half].view(count, -1)
    twice = torch.cat([piece, piece], 1).to(device)
    losses = torch.cat([
        F.cross_entropy(decoder.logits(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
        for rows in twice.split(max(1, TOKENS_AT_ONCE // twice.shape[1]))
    ])  # fmt: skip
    half = piece.shape[1]  # The first token of the second copy cannot be predicted from the first copy.
    return float(losses[:, : half - 1].mean()), float(losses[:, half:].mean())


def decoding(decoder: Decoder, tokens: Tensor) -> tuple[int, float]:
    """Return the bytes of the state after a text, and tokens per second when its end is generated one by one."""
    tokens = tokens.to(next(decoder.network.parameters()).device)
    whole, stream = decoder.stream(), decoder.stream()
    whole.read(tokens)
    timed = min(TIMED_TOKENS, len(tokens) // 2)
    logits = stream.read(tokens[:-timed])
    logits = stream.read(logits.argmax()[None])  # The first step prepares those that follow.
    begin = time.perf_counter()
    for _ in range(timed - 1):
        logits = stream.read(logits.argmax()[None])
    return whole.nbytes, (timed - 1) / max(time.perf_counter() - begin, 1e-9)
