"""Cutting tokens into parts, and sums into tensors and back: what the forms share.

Tensors are split, never sliced, because the backward pass of a slice is as long as the whole.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
s chunks.
"""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from subquad._calls.sums import Sums
from subquad._engines.features.sums import Tokens


def cut_sizes(length: int, chunk: int, unit: int) -> list[int]:
    """Return whole units, then the chunks that are left, then what is left of a chunk."""
    whole, rest = length // unit, length % unit  # Not divmod, which torch.compile rejects for symbolic lengths.
    tail = rest % chunk
    return [unit] * whole + [size for size in (rest - tail, tail) if size]


def cut(tensor: Tensor | None, sizes: int | list[int], length: int) -> Any:
    if tensor is None:
        return [None] * (-(-length // sizes) if isinstance(sizes, int) else len(sizes))
    return tensor.split(sizes, 1)


def cut_all(sizes: int | list[int], tokens: Tokens) -> list[Tokens]:
    q, *others = tokens
    parts = zip(q.split(sizes, 2), *(cut(t, sizes, tokens.k.shape[1]) for t in others), strict=True)
    return [Tokens(*part) for part in parts]


def halves(tensor: Tensor, first: int) -> tuple[Tensor, ...]:
    return tensor[:, :first], tensor[:, first:]


def until(tensor: Tensor | None, end: int) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[1] == end else tensor[:, :end]


def fold_chunks(count: int, tokens: Tokens) -> Tokens:
    """Make chunks batches: (b, g, s*n, d) -> (b*s, g, n, d), and (b, s*m, ...) -> (b*s, m, ...)."""
    if count == 1:
        return tokens
    q, *others = tokens
    folded = (None if t is None else t.unflatten(1, (count, -1)).flatten(0, 1) for t in others)
    return Tokens(q.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1), *cast(Any, folded))


def unfold_chunks(count: int, output: Tensor) -> Tensor:
    return output if count == 1 else output.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


# Sums enter and leave a recomputed part as plain tensors, some of them missing.


def parts_of(sums: Sums | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if sums is None else sums[:3]


def tensors_of(sums: Sums) -> tuple[Tensor, ...]:
    return tuple(part for part in sums[:3] if part is not None)


def sums_of(tensors: Sequence[Tensor | None], segment: Tensor | None) -> Sums | None:
    values, poison, log_scale = (*tensors, None, None, None)[:3]
    return None if values is None or poison is None else Sums(values, poison, log_scale, segment)
