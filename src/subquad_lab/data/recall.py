"""Sequences whose answers are in the sequence, drawn from a seed; there is nothing to download.

    recall      key value key value ..., then other tokens and each key once: the target of a key is its value
    copy        tokens, blanks, then a mark and the tokens again: the target is the next token of the list
    induction   tokens drawn from a few: the target is what followed the same token the last time

`pairs` is what has to be remembered: the number of pairs, of tokens to copy, or of different tokens. The first task is
multi-query associative recall (*Zoology: Measuring and Improving Recall in Efficient Language Models*, 2023).

Axes: b sequences, n tokens, p pairs.
"""

import hashlib
from typing import Literal

import torch
from torch import Tensor

IGNORED = -100  # the target of a token without an answer, which `F.cross_entropy` skips
Task = Literal["recall", "copy", "induction"]


def draw(
    task: Task, rows: int, pairs: int, length: int, vocabulary: int, seed: tuple[object, ...]
) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, both (b, n); they depend on the arguments only.

    Example:
        >>> tokens, targets = draw("recall", 1, pairs=2, length=8, vocabulary=8, seed=(0,))
        >>> tokens[0].tolist(), targets[0].tolist()
        ([2, 4, 1, 6, 2, 7, 7, 1], [-100, -100, -100, -100, 4, -100, -100, 6])
    """
    digest = hashlib.sha256(repr((task, pairs, length, vocabulary, *seed)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    make = {"recall": _recall, "copy": _copy, "induction": _induction}[task]
    return make(rows, pairs, length, vocabulary, generator)


def min_length(task: Task, pairs: int) -> int:
    """Return the number of tokens that a sequence needs at least."""
    return {"recall": 3 * pairs, "copy": 2 * pairs, "induction": pairs + 1}[task]


def max_pairs(task: Task, vocabulary: int) -> int:
    """Return how many pairs a vocabulary has tokens for."""
    return {"recall": vocabulary // 2, "copy": vocabulary - 2, "induction": vocabulary}[task]


def _recall(rows: int, pairs: int, length: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The lower half of the vocabulary are keys, the upper half values."""
    keys_in_all = vocabulary // 2
    order = torch.rand(rows, keys_in_all, generator=generator).argsort(1)
    keys, unused = order[:, :pairs], order[:, pairs:]
    values = torch.randint(keys_in_all, vocabulary, (rows, pairs), generator=generator)
    # Between the queries: values, and keys without a pair, so that no token looks like a query and is none.
    others = torch.cat([unused, torch.arange(keys_in_all, vocabulary).expand(rows, -1)], 1)
    tokens = others.gather(1, torch.randint(others.shape[1], (rows, length), generator=generator))
    tokens[:, : 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
    places = 2 * pairs + torch.rand(rows, length - 2 * pairs, generator=generator).argsort(1)[:, :pairs]
    targets = torch.full((rows, length), IGNORED)
    return tokens.scatter(1, places, keys), targets.scatter(1, places, values)


def _copy(rows: int, pairs: int, length: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token 0 is blank and token 1 the mark before the copy, which is at the end."""
    originals = torch.randint(2, vocabulary, (rows, pairs), generator=generator)
    tokens, targets = torch.zeros(rows, length, dtype=torch.long), torch.full((rows, length), IGNORED)
    tokens[:, :pairs] = originals
    tokens[:, length - pairs] = 1
    tokens[:, length - pairs + 1 :] = originals[:, :-1]
    targets[:, length - pairs :] = originals
    return tokens, targets


def _induction(
    rows: int, pairs: int, length: int, vocabulary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    few = torch.rand(rows, vocabulary, generator=generator).argsort(1)[:, :pairs]
    tokens = few.gather(1, torch.randint(pairs, (rows, length), generator=generator))
    is_earlier = (tokens[:, :, None] == tokens[:, None]).tril(-1)  # (b, n, n)
    places = torch.arange(length)
    last = torch.where(is_earlier, places, -1).amax(2)
    followed = tokens.gather(1, (last + 1).clamp(max=length - 1))
    return tokens, followed.masked_fill(last < 0, IGNORED)
