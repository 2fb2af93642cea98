"""One meaning, four ways to compute it.

    dense     every row against every key that it may see, in blocks of rows     O(n m)          the oracle
    linear    phi(Q) (phi(K)^T V): the keys are summed, then read                O((n + m) r e)  not causal
    chunked   pair by pair inside a chunk, the sums of the chunks before it      O(n r e)        causal, or in segments
    step      one token: its key joins the sums, its query reads them            O(r e)          at any length

    fused     linear or chunked, in one native kernel; where the call is not for it, the forms above do it

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
s chunks. q is (b, g, n, d); k (b, m, d); v (b, m, e); keep (b, m), True = may be seen; runs (b, m), the segments.

Every part forgets its intermediate results and computes them again in the backward (`_recompute`), so that only inputs,
outputs and one state per unit are kept. No state is ever recovered by subtraction.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from subquad._kernel import (
    EMPTY,
    FeatureKernel,
    Kernel,
    Keys,
    Sums,
    absorb,
    merge,
    merged_in_turn,
    ready_keys,
    ready_queries,
)
from subquad._masks import View
from subquad._recompute import recomputed, scanned
from subquad._separable import SeparableKernel
from subquad.native import _fused as native


def dense(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    runs: Tensor | None,
    is_causal: bool,
    block: int,
) -> Tensor:
    """Blocks of `block` rows against all the keys that they may see."""

    def rows(first: int, kernel: Kernel, q: Tensor, keys: Tensor, values: Tensor, features: Tensor | None,
             log_scales: Tensor | None, poison: Tensor, keep: Tensor | None, runs: Tensor | None,
             row_runs: Tensor | None) -> tuple[Tensor]:  # fmt: skip
        seen = Keys(keys, values, poison, keep, runs, features, log_scales)
        return (kernel.meet(ready_queries(kernel, q), seen, View(is_causal, first, row_runs, runs), ()).to(q.dtype),)

    keys = ready_keys(kernel, k, v, keep, runs, mapped=not kernel.from_logits)
    outputs: list[Tensor] = []
    start = 0
    for part, part_runs in zip(q.split(block, 2), _cut(runs, block, q.shape[2]), strict=True):
        end = min(k.shape[1], start + part.shape[2]) if is_causal else k.shape[1]
        floats = (_until(x, end) for x in (keys.keys, keys.values, keys.features, keys.log_scales))
        constants = (_until(x, end) for x in (keys.poison, keys.keep, keys.runs))
        outputs += recomputed(kernel, partial(rows, start), (part, *floats), (*constants, part_runs))
        start += part.shape[2]
    return torch.cat(outputs, 2)


def linear(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, before: Sums | None, block: int
) -> tuple[Tensor, Sums]:
    """All queries see all keys. Features are made for `block` tokens at a time."""
    sums = summed(kernel, k, v, keep, before, block)
    return reading(kernel, q, sums, block), sums


def chunked(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, runs: Tensor | None, before: Sums | None,
    chunk: int, wave: int, unit: int, want_sums: bool,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """Causal, as many queries as keys. The chunks of a `wave` are computed side by side, as far as they fit the cache;
    one state is kept per `unit`, a multiple of the wave, for the backward."""

    def part(last: bool, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None
             ) -> tuple[Tensor, ...]:  # fmt: skip
        *tensors, keep, runs, runs_before = rest
        sums, outputs = _sums(tensors, None if runs_before is None else runs_before[:, 0]), []
        waves = _cut_all(_sizes(k.shape[1], chunk, wave), q, k, v, keep, runs)
        for i, (q_w, k_w, v_w, keep_w, runs_w) in enumerate(waves):
            count = max(1, k_w.shape[1] // chunk)
            q_c, k_c, v_c, keep_c, runs_c = _fold(count, q_w, k_w, v_w, keep_w, runs_w)
            final = last and i + 1 == len(waves) and count == 1  # Nobody will read the sums of these keys.
            keys = ready_keys(kernel, k_c, v_c, keep_c, runs_c, mapped=not (final and kernel.from_logits))
            if final:
                before = sums
            elif count == 1:
                before, sums = sums, _join(sums, absorb(kernel, keys))
            else:
                before, sums = _prefixes(sums, absorb(kernel, keys), count)
            view, around = View(True, 0, runs_c, runs_c), _around(runs_c, before)
            outputs.append(
                _unfold(count, kernel.meet_chunk(ready_queries(kernel, q_c), keys, view, around).to(q.dtype))
            )
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        return output, *(() if last or sums is None else _tensors(sums))

    units = _sizes(k.shape[1], chunk, unit)
    runs_before = None
    if runs is not None:
        first = torch.full_like(runs[:, :1], -1) if before is None or before.run is None else before.run[:, None]
        runs_before = torch.cat([first, runs[:, :-1]], 1)
    if len(units) == 1:
        inputs = (q, k, v, *_parts(before))
        output, *tensors = recomputed(kernel, partial(part, not want_sums), inputs, (keep, runs, runs_before))
    else:
        carry = _tensors(before or kernel.empty(k, v))
        output, *tensors = scanned(kernel, partial(part, False), units, (q, k, v), carry, (keep, runs, runs_before))
    return output, _sums(tensors, None if runs is None else runs[:, -1])


def uneven(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, before: Sums | None, chunk: int, wave: int,
    unit: int, want_sums: bool,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """Causal with different numbers of queries and keys: chunked where they run side by side, linear where not.

    Aligned at the start as in torch; with sums before them, at the end.
    """
    n, m = q.shape[2], k.shape[1]
    both = min(n, m)
    if before is None:
        (q, late_q), (k, late_k), (v, late_v) = (
            q.split([both, n - both], 2),
            _halves(k, both),
            _halves(v, both),
        )
        keep, late_keep = (None, None) if keep is None else _halves(keep, both)
        output, sums = chunked(kernel, q, k, v, keep, None, None, chunk, wave, unit, want_sums or n > m)
        if n > m:
            assert sums is not None
            output = torch.cat([output, reading(kernel, late_q, sums, wave)], 2)
        if n < m and want_sums:
            sums = summed(kernel, late_k, late_v, late_keep, sums, wave)
        return output, sums
    (early_q, q), (early_k, k), (early_v, v) = (
        q.split([n - both, both], 2),
        _halves(k, m - both),
        _halves(v, m - both),
    )
    early_keep, keep = (None, None) if keep is None else _halves(keep, m - both)
    first = [reading(kernel, early_q, before, wave)] if n > m else []
    if n < m:
        before = summed(kernel, early_k, early_v, early_keep, before, wave)
    output, sums = chunked(kernel, q, k, v, keep, None, before, chunk, wave, unit, want_sums)
    return torch.cat([*first, output], 2), sums


def segmented(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    runs: Tensor,
    before: Sums | None,
    chunk: int,
) -> tuple[Tensor, Sums | None]:
    """Not causal, in segments: a chunk reads sums of its first segment on the left, and of its last on the right."""

    def add(backwards: bool, kernel: Kernel, k: Tensor, v: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        *tensors, keep, runs, run = rest
        own = absorb(kernel, ready_keys(kernel, k, v, keep, runs), backwards)
        return _tensors(_join(_sums(tensors, run), own))

    def along(pieces: list[Any], sums: Sums | None, backwards: bool) -> list[Sums | None]:
        """The sums before each piece, in the order of the pieces, and after the last."""
        found = [sums]
        for _, k, v, keep, runs in pieces:
            constants = (keep, runs, None if sums is None else sums.run)
            tensors = recomputed(kernel, partial(add, backwards), (k, v, *_parts(sums)), constants)
            sums = _sums(tensors, runs[:, 0 if backwards else -1])
            found.append(sums)
        return found

    def rows(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> tuple[Tensor]:
        left, right, (keep, runs, left_run, right_run) = rest[:3], rest[3:6], rest[6:]
        keys = ready_keys(kernel, k, v, keep, runs, mapped=not kernel.from_logits)
        around = _around(runs, _sums(left, left_run), _sums(right, right_run))
        return (kernel.meet_chunk(ready_queries(kernel, q), keys, View(False, 0, runs, runs), around).to(q.dtype),)

    pieces = _cut_all(chunk, q, k, v, keep, runs)
    lefts = along(pieces, before, backwards=False)
    rights = along(pieces[:0:-1], None, backwards=True)[::-1]
    outputs: list[Tensor] = []
    for (q_c, k_c, v_c, keep_c, runs_c), left, right in zip(pieces, lefts[:-1], rights, strict=True):
        edges = (None if side is None else side.run for side in (left, right))
        outputs += recomputed(kernel, rows, (q_c, k_c, v_c, *_parts(left), *_parts(right)), (keep_c, runs_c, *edges))
    return torch.cat(outputs, 2), lefts[-1]


def step(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    runs: Tensor | None,
    before: Sums | None,
) -> tuple[Tensor, Sums]:
    """One token: its query sees the sums and its own key."""
    if keep is None and runs is None and before is not None:
        quick = kernel.advance(q, k, v, before)
        if quick is not None:
            return quick[0].to(q.dtype), quick[1]
    sums = _join(before, absorb(kernel, ready_keys(kernel, k, v, keep, runs)))
    return kernel.read(ready_queries(kernel, q), sums).to(q.dtype), sums


def fused(
    kernel: FeatureKernel, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, before: Sums | None, is_causal: bool,
    want_sums: bool, chunk: int,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """By the native kernels, of whose answer the sums are made here."""
    assert kernel.recipe is not None
    output, sums = native.fused(
        kernel.recipe, kernel.root_scale, kernel.table, kernel.size, kernel.normalized, q, k, v, keep,
        None if before is None else (before.values, before.poison, before.log_scale), is_causal, want_sums, chunk,
    )  # fmt: skip
    return output, None if sums is None else Sums(*sums)


def fused_separable(
    kernel: SeparableKernel, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, chunk: int,
    otherwise: Callable[[], Tensor],
) -> Tensor:  # fmt: skip
    """By the native kernels, without a largest exponent; rows that see too large a key or value, in another form."""
    output, left = native.separable(kernel.root_scale, q, k, v, keep, chunk)
    return output if left is None else torch.where(left[..., None], otherwise(), output)


# --- Halves of the linear form, also used where a causal call has more keys than queries, or fewer ------------------


def summed(kernel: Kernel, k: Tensor, v: Tensor, keep: Tensor | None, before: Sums | None, block: int) -> Sums:
    """All keys added up, whatever the order."""

    def add(kernel: Kernel, k: Tensor, v: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        *tensors, keep = rest
        return _tensors(_join(_sums(tensors, None), absorb(kernel, ready_keys(kernel, k, v, keep, None))))

    sums = before
    for k_c, v_c, keep_c in zip(k.split(block, 1), v.split(block, 1), _cut(keep, block, k.shape[1]), strict=True):
        sums = _sums(recomputed(kernel, add, (k_c, v_c, *_parts(sums)), (keep_c,)), None)
    assert sums is not None
    return sums


def reading(kernel: Kernel, q: Tensor, sums: Sums, block: int) -> Tensor:
    """(b, g, n, e): queries that see the sums and nothing else."""

    def rows(kernel: Kernel, q: Tensor, values: Tensor, poison: Tensor) -> tuple[Tensor]:
        return (kernel.read(ready_queries(kernel, q), Sums(values, poison)).to(q.dtype),)

    return torch.cat(
        [recomputed(kernel, rows, (part, sums.values, sums.poison), ())[0] for part in q.split(block, 2)], 2
    )


# --- Sums between chunks ---------------------------------------------------------------------------------------------


def _join(before: Sums | None, own: Sums) -> Sums:
    return own if before is None else merge(before, own)


def _prefixes(before: Sums | None, own: Sums, count: int) -> tuple[Sums, Sums]:
    """Of sums (b*s, ...) of single chunks: the sums before each chunk (b*s, ...), and those after the last (b, ...)."""
    chunks = Sums(*(None if part is None else part.unflatten(0, (-1, count)) for part in own))  # type: ignore[arg-type]
    if before is None:
        nothing = (None if x is None else torch.full_like(x[:, 0], fill) for x, fill in zip(chunks, EMPTY, strict=True))
        before = Sums(*cast(Any, nothing))
    found = merged_in_turn(before, chunks)
    stacked = (None if x is None else torch.stack(x, 1).flatten(0, 1) for x in _columns(found[:-1]))
    return Sums(*cast(Any, stacked)), found[-1]


def _columns(sums: Sequence[Sums]) -> list[Any]:
    return [None if parts[0] is None else parts for parts in zip(*sums, strict=True)]


def _around(runs: Tensor | None, *sides: Sums | None) -> list[tuple[Sums, Tensor | None]]:
    """The sums beside a chunk, and which of its rows may read each: those of the same segment."""
    return [
        (sums, None if runs is None or sums.run is None else runs == sums.run[:, None])
        for sums in sides
        if sums is not None
    ]


# Sums travel into and out of a part as plain tensors, some of them missing.


def _parts(sums: Sums | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if sums is None else sums[:3]


def _tensors(sums: Sums) -> tuple[Tensor, ...]:
    return tuple(part for part in sums[:3] if part is not None)


def _sums(tensors: Sequence[Tensor | None], run: Tensor | None) -> Sums | None:
    values, poison, log_scale = (*tensors, None, None, None)[:3]
    return None if values is None or poison is None else Sums(values, poison, log_scale, run)


# --- Cutting: split, never slices, because the backward of a slice is as long as the whole ---------------------------


def _sizes(length: int, chunk: int, unit: int) -> list[int]:
    """Units, then the chunks that are left, then what is left of a chunk."""
    whole, rest = length // unit, length % unit  # Not divmod, which torch.compile does not know for symbolic lengths.
    tail = rest % chunk
    return [unit] * whole + [size for size in (rest - tail, tail) if size]


def _cut(tensor: Tensor | None, sizes: int | list[int], length: int) -> Any:
    if tensor is None:
        return [None] * (-(-length // sizes) if isinstance(sizes, int) else len(sizes))
    return tensor.split(sizes, 1)


def _cut_all(
    sizes: int | list[int], q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, runs: Tensor | None
) -> list[Any]:
    return list(zip(q.split(sizes, 2), *(_cut(t, sizes, k.shape[1]) for t in (k, v, keep, runs)), strict=True))


def _halves(tensor: Tensor, first: int) -> tuple[Tensor, ...]:
    return tensor[:, :first], tensor[:, first:]


def _until(tensor: Tensor | None, end: int) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[1] == end else tensor[:, :end]


def _fold(count: int, q: Tensor, *others: Tensor | None) -> Any:
    """Chunks as batches: (b, g, s*n, d) -> (b*s, g, n, d), and (b, s*m, ...) -> (b*s, m, ...)."""
    if count == 1:
        return q, *others
    folded = (None if t is None else t.unflatten(1, (count, -1)).flatten(0, 1) for t in others)
    return q.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1), *folded


def _unfold(count: int, output: Tensor) -> Tensor:
    return output if count == 1 else output.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
