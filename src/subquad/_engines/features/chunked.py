"""The causal chunk loop: pair by pair inside a chunk, and the sums of the chunks before it. O(n r e).

Chunks are computed in waves, side by side; one state per unit of waves is kept for the backward pass, which computes
everything else again. No state is ever recovered by subtraction. Segments without causality go chunk by chunk too.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
s chunks.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from subquad._calls.sums import EMPTY, Sums
from subquad._calls.view import View
from subquad._engines.features.choose_form import Sizes
from subquad._engines.features.cutting import (
    cut_all,
    cut_sizes,
    fold_chunks,
    halves,
    parts_of,
    sums_of,
    tensors_of,
    unfold_chunks,
)
from subquad._engines.features.kernel import Kernel, absorb, ready_keys, ready_queries
from subquad._engines.features.linear import reading, summed
from subquad._engines.features.sums import Tokens, joined, merged_in_turn
from subquad._engines.recompute import recomputed, scanned

Found = tuple[Tensor, Sums | None]  # the output (b, g, n, e), and the sums of all keys


def chunked(kernel: Kernel, tokens: Tokens, before: Sums | None, sizes: Sizes, want_sums: bool) -> Found:
    """Compute causal attention with as many queries as keys.

    The chunks of a wave are computed side by side, as far as they fit the cache; one state is kept per unit, a multiple
    of the wave, for the backward pass.
    """
    q, k, v, keep, segments = tokens
    units = cut_sizes(k.shape[1], sizes.chunk, sizes.unit)
    segments_before = None
    if segments is not None:
        no_segment = before is None or before.segment is None
        first = torch.full_like(segments[:, :1], -1) if no_segment else before.segment[:, None]  # type: ignore[union-attr, index]
        segments_before = torch.cat([first, segments[:, :-1]], 1)
    if len(units) == 1:
        inputs = (q, k, v, *parts_of(before))
        part = partial(_chunked_unit, sizes, not want_sums)
        output, *tensors = recomputed(kernel, part, inputs, (keep, segments, segments_before))
    else:
        carry = tensors_of(before or kernel.empty(k, v))
        part = partial(_chunked_unit, sizes, False)
        output, *tensors = scanned(kernel, part, units, (q, k, v), carry, (keep, segments, segments_before))
    return output, sums_of(tensors, None if segments is None else segments[:, -1])


def _chunked_unit(
    sizes: Sizes, is_last: bool, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute one unit wave by wave; rest: the sums before it, keep, segments, and the segment before each key."""
    *tensors, keep, segments, segments_before = rest
    sums, outputs = sums_of(tensors, None if segments_before is None else segments_before[:, 0]), []
    waves = cut_all(cut_sizes(k.shape[1], sizes.chunk, sizes.wave), Tokens(q, k, v, keep, segments))
    for i, wave in enumerate(waves):
        count = max(1, wave.k.shape[1] // sizes.chunk)
        own = fold_chunks(count, wave)
        is_final = is_last and i + 1 == len(waves) and count == 1  # Nothing reads the sums of these keys.
        keys = ready_keys(kernel, *own[1:], mapped=not (is_final and kernel.from_logits))
        if is_final:
            before = sums
        elif count == 1:
            before, sums = sums, joined(sums, absorb(kernel, keys))
        else:
            before, sums = _prefixes(sums, absorb(kernel, keys), count)
        view, around = View(True, 0, own.segments, own.segments), _around(own.segments, before)
        output = kernel.meet_chunk(ready_queries(kernel, own.q), keys, view, around).to(q.dtype)
        outputs.append(unfold_chunks(count, output))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return output, *(() if is_last or sums is None else tensors_of(sums))


def uneven(kernel: Kernel, tokens: Tokens, before: Sums | None, sizes: Sizes, want_sums: bool) -> Found:
    """Compute causal attention with different numbers of queries and keys: chunked where they run side by side.

    They are aligned at the start, as in torch; with sums before them, at the end.
    """
    q, k, v, keep, _ = tokens
    n, m, wave = q.shape[2], k.shape[1], sizes.wave
    both = min(n, m)
    if before is None:
        (q, late_q), (k, late_k), (v, late_v) = q.split([both, n - both], 2), halves(k, both), halves(v, both)
        keep, late_keep = (None, None) if keep is None else halves(keep, both)
        output, sums = chunked(kernel, Tokens(q, k, v, keep), None, sizes, want_sums or n > m)
        if n > m:
            assert sums is not None
            output = torch.cat([output, reading(kernel, late_q, sums, wave)], 2)
        if n < m and want_sums:
            sums = summed(kernel, late_k, late_v, late_keep, sums, wave)
        return output, sums
    early_q, q = q.split([n - both, both], 2)
    (early_k, k), (early_v, v) = halves(k, m - both), halves(v, m - both)
    early_keep, keep = (None, None) if keep is None else halves(keep, m - both)
    first = [reading(kernel, early_q, before, wave)] if n > m else []
    if n < m:
        before = summed(kernel, early_k, early_v, early_keep, before, wave)
    output, sums = chunked(kernel, Tokens(q, k, v, keep), before, sizes, want_sums)
    return torch.cat([*first, output], 2), sums


def segmented(kernel: Kernel, tokens: Tokens, before: Sums | None, chunk: int, following: Sums | None = None) -> Found:
    """Compute attention in segments, not causal: a chunk reads the sums of its first segment on its left, and of its
    last segment on its right. Both may continue beyond the tokens, in the sums `before` and `following`."""

    def add(backwards: bool, kernel: Kernel, k: Tensor, v: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        *tensors, keep, segments, segment = rest
        own = absorb(kernel, ready_keys(kernel, k, v, keep, segments), backwards)
        return tensors_of(joined(sums_of(tensors, segment), own))

    def along(pieces: list[Tokens], sums: Sums | None, backwards: bool) -> list[Sums | None]:
        """Return the sums before each piece, in the order of the pieces, and after the last."""
        found = [sums]
        for _, k, v, keep, segments in pieces:
            assert segments is not None
            constants = (keep, segments, None if sums is None else sums.segment)
            tensors = recomputed(kernel, partial(add, backwards), (k, v, *parts_of(sums)), constants)
            sums = sums_of(tensors, segments[:, 0 if backwards else -1])
            found.append(sums)
        return found

    def rows(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> tuple[Tensor]:
        left, right, (keep, segments, left_segment, right_segment) = rest[:3], rest[3:6], rest[6:]
        keys = ready_keys(kernel, k, v, keep, segments, mapped=not kernel.from_logits)
        around = _around(segments, sums_of(left, left_segment), sums_of(right, right_segment))
        view = View(False, 0, segments, segments)
        return (kernel.meet_chunk(ready_queries(kernel, q), keys, view, around).to(q.dtype),)

    pieces = cut_all(chunk, tokens)
    lefts = along(pieces, before, backwards=False)
    rights = along(pieces[:0:-1], following, backwards=True)[::-1]
    outputs: list[Tensor] = []
    for (q, k, v, keep, segments), left, right in zip(pieces, lefts[:-1], rights, strict=True):
        edges = (None if side is None else side.segment for side in (left, right))
        outputs += recomputed(kernel, rows, (q, k, v, *parts_of(left), *parts_of(right)), (keep, segments, *edges))
    return torch.cat(outputs, 2), lefts[-1]


def _prefixes(before: Sums | None, own: Sums, count: int) -> tuple[Sums, Sums]:
    """Return the sums before each chunk (b*s, ...), and after the last (b, ...), from those of single chunks."""
    chunks = Sums(*(None if part is None else part.unflatten(0, (-1, count)) for part in own))  # type: ignore[arg-type]
    if before is None:
        nothing = (None if x is None else torch.full_like(x[:, 0], fill) for x, fill in zip(chunks, EMPTY, strict=True))
        before = Sums(*cast(Any, nothing))
    found = merged_in_turn(before, chunks)
    columns = [None if parts[0] is None else parts for parts in zip(*found[:-1], strict=True)]
    stacked = (None if x is None else torch.stack(cast(Any, x), 1).flatten(0, 1) for x in columns)
    return Sums(*cast(Any, stacked)), found[-1]


def _around(segments: Tensor | None, *sides: Sums | None) -> list[tuple[Sums, Tensor | None]]:
    """Return the sums beside a chunk, and which of its rows may read each: those of the same segment."""
    return [
        (sums, None if segments is None or sums.segment is None else segments == sums.segment[:, None])
        for sums in sides
        if sums is not None
    ]
