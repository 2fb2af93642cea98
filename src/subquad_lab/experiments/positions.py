"""Perplexity by position: what a language model makes of texts longer than those that it was trained on.

    perplexity of [a, b) = exp(mean of -log p(word | all words before it in the piece) over the positions a <= i < b)

Pieces of the longest length start at even distances and overlap, so that most words are predicted at positions of every
interval, and intervals differ by the context that the model sees rather than by the words.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad_lab import UsageError
from subquad_lab.figures.plots import axes_of, by_factors, plain, svg
from subquad_lab.models.scores import perplexity
from subquad_lab.training.run import Run

POSITIONS = "positions"  # the record of a run
FIRST_EDGE = 16
STARTS_PER_PIECE = 16
MAX_PIECES = 32
MAX_LENGTH = 1 << 20


def edges_of(longest: int) -> list[int]:
    """Return the ends of the intervals, which double.

    >>> edges_of(100)
    [0, 16, 32, 64, 100]
    """
    edges = [0, FIRST_EDGE]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return [*edges[:-1], longest]


@torch.no_grad()
def by_position(model: nn.Module, words: Tensor, longest: int, check: Callable[[], None]) -> dict[str, Any]:
    """Return the edges of the intervals and the cross-entropy in each of them, in nats per word.

    Args:
        model: A language model, (tokens (1, n), state) -> (logits, state).
        words: Numbers of the words of a text.
        longest: Number of words of a piece.
        check: Called before each piece; it may raise to interrupt.
    """
    last = len(words) - 1 - longest
    if last < 0:
        raise UsageError(f"longest: expected at most {len(words) - 1:,} words, as the text has, got {longest:,}")
    count = min(MAX_PIECES, 1 + last // max(1, longest // STARTS_PER_PIECE))
    total = torch.zeros(longest, dtype=torch.float64)
    for i in range(count):
        check()
        start = i * last // max(1, count - 1)
        piece = words[start : start + longest + 1].to(next(model.parameters()).device)
        logits, _ = model(piece[None, :-1], None)
        total += F.cross_entropy(logits[0], piece[1:], reduction="none").double().cpu()
    edges = edges_of(longest)
    sizes = [b - a for a, b in pairwise(edges)]
    means = [float(part.mean()) / count for part in total.split(sizes)]
    return {"edges": edges, "cross_entropy": means}


def perplexities(found: Mapping[str, Any]) -> list[tuple[int, int, float]]:
    """Return (first position, end, perplexity) of each interval of a record."""
    edges, means = found.get("edges"), found.get("cross_entropy")
    if not is_numbers(edges) or not is_numbers(means) or len(edges) != len(means) + 1:
        raise UsageError(f"{POSITIONS}.json: expected the edges of intervals and the cross-entropy in each")
    return [(a, b, perplexity(mean)) for (a, b), mean in zip(pairwise(edges), means, strict=True)]


def is_numbers(values: Any) -> TypeGuard[list[Any]]:
    return isinstance(values, list) and all(isinstance(x, int | float) and 0 <= x < 1e9 for x in values)


def positions_picture(groups: Mapping[str, Sequence[Run]]) -> dict[str, bytes]:
    """Plot perplexity by position, with a line for the mean over the seeds of each group of runs that recorded it."""
    recorded = {
        name: [perplexities(run.read_json(f"{POSITIONS}.json")) for run in runs]
        for name, runs in groups.items() if all(run.has(f"{POSITIONS}.json") for run in runs)
    }  # fmt: skip
    if not recorded:
        return {}
    figure, (axes,) = axes_of(1)
    for name, runs in recorded.items():
        ends = [b for _, b, _ in runs[0]]
        means = [sum(run[i][2] for run in runs) / len(runs) for i in range(min(map(len, runs)))]
        axes.plot(ends[: len(means)], means, "o-", markersize=3, label=plain(name))
    by_factors(axes)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlabel="position, up to", ylabel="test perplexity")
    axes.legend(fontsize="small")
    return {POSITIONS: svg(figure)}
