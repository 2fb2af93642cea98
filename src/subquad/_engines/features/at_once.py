"""All chunks at once, without a loop: one program for every length and batch.

torch.export, torch.compile(dynamic=True) and torch.jit.trace record a program before sizes are known. The tokens are
padded to whole chunks; a chunk meets itself pair by pair, and reads the sums of the chunks beside it, which are

    P_t = sum_u exp(c_u - top_t) S_u    over the chunks u up to t of the same segment,    top_t = the largest c_u

so t^2 products of sums for t chunks, 1/64 of the length: far below the n^2 products of all pairs.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
s chunks, t and u places before and behind chunks.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.sums import NEVER, Sums, finite
from subquad._calls.view import View
from subquad._engines.features.choose_form import CHUNK_TOKENS, Form
from subquad._engines.features.chunked import Found
from subquad._engines.features.kernel import Kernel, absorb, ready_keys, ready_queries
from subquad._engines.features.sums import Tokens, joined
from subquad._torch_internals import in_trace


def run_at_once(form: Form, kernel: Kernel, tokens: Tokens, before: Sums | None, is_causal: bool) -> Found:
    """Return the output (b, g, n, e), and the sums of all keys."""
    if form == "step":
        return kernel.step(tokens, before)
    if is_causal or tokens.segments is not None:
        return _in_chunks(kernel, tokens, before, is_causal)
    sums = joined(before, absorb(kernel, ready_keys(kernel, *tokens[1:])))
    return kernel.read(ready_queries(kernel, tokens.q), sums).to(tokens.q.dtype), sums


def _in_chunks(kernel: Kernel, tokens: Tokens, before: Sums | None, is_causal: bool) -> Found:
    """Compute causal attention, or attention in segments. Queries and keys are aligned at the start; after a state, at
    the end."""
    q, k, v, keep, segments = tokens
    n, m, at_end = q.shape[2], k.shape[1], before is not None
    if n != m and in_trace():  # which would keep for good which of them is longer
        raise ValueError(
            "query: torch.jit.trace cannot record a causal call with different numbers of queries and keys; use "
            "torch.export"
        )
    if in_trace():
        # A trace keeps no conditions, but fails here if it is later given other numbers of queries and keys.
        q = q.reshape(*q.shape[:2], m, q.shape[3])
    longest = n if n == m else torch.sym_max(n, m)
    count = (longest + 2 * CHUNK_TOKENS - 1) // CHUNK_TOKENS  # One extra chunk: torch specializes on sizes of 1.
    missing_q, missing = count * CHUNK_TOKENS - n, count * CHUNK_TOKENS - m
    keep = torch.ones_like(k[..., 0], dtype=torch.bool) if keep is None else keep
    if segments is not None:  # Hidden keys belong to the segment beside them.
        edge = segments[:, :1] if at_end else segments[:, -1:]
        more = edge.expand(-1, missing)
        segments = torch.cat([more, segments] if at_end else [segments, more], 1)
    whole = Tokens(_grown(q, missing_q, at_end), _grown(k, missing, at_end), _grown(v, missing, at_end),
                   _grown(keep[..., None], missing, at_end)[..., 0], segments)  # fmt: skip
    own = _folded(whole, count)
    keys = ready_keys(kernel, *own[1:])
    empty = kernel.empty(k, v)._replace(segment=None if segments is None else segments.new_full(segments.shape[:1], -1))
    lefts, after = _beside(before or empty, absorb(kernel, keys), count)
    around = [lefts]
    if not is_causal:  # Earlier rows see later keys of their segment.
        rights, _ = _beside(empty, _reversed(absorb(kernel, keys, backwards=True), count), count)
        around.append(_reversed(rights, count))
    if own.segments is None:
        seen = View(is_causal).mask(CHUNK_TOKENS, CHUNK_TOKENS, k.device)
        view = View(is_causal, seen=seen.expand(own.k.shape[0], -1, -1))
    else:
        view = View(is_causal, 0, own.segments, own.segments)
    readers = [_readers(own.segments, sums) for sums in around]
    output = kernel.meet_chunk(ready_queries(kernel, own.q), keys, view, list(zip(around, readers, strict=True)))
    output = output.unflatten(0, (q.shape[0], count)).transpose(1, 2).flatten(2, 3).to(q.dtype)
    first = missing_q if at_end else 0
    return output.index_select(2, torch.arange(first, first + n, device=q.device)), after  # A slice asks for strides.


def _grown(x: Tensor, missing: int, at_end: bool) -> Tensor:
    """Return x (..., n, d) with `missing` tokens of zeros behind it; before it, if it is aligned at the end."""
    return F.pad(x, (0, 0, missing, 0) if at_end else (0, 0, 0, missing))


def _folded(tokens: Tokens, count: int) -> Tokens:
    """Make chunks batches: (b, g, s*n, d) -> (b*s, g, n, d), and (b, s*m, ...) -> (b*s, m, ...)."""
    q, *others = tokens
    cut = (count, CHUNK_TOKENS)
    folded = (None if x is None else x.unflatten(1, cut).flatten(0, 1) for x in others)
    return Tokens(q.unflatten(2, cut).transpose(1, 2).flatten(0, 1), *cast(Any, folded))


def _reversed(sums: Sums, count: int) -> Sums:
    """Return the sums (b*s, ...) of chunks in the opposite order."""
    b = sums.poison.shape[0] // count
    parts = (None if x is None else x.unflatten(0, (b, count)).flip(1).flatten(0, 1) for x in sums)
    return Sums(*cast(Any, parts))


def _readers(segments: Tensor | None, sums: Sums) -> Tensor | None:
    """Return the rows that may read the sums, those of the same segment; None if all may."""
    return None if segments is None or sums.segment is None else segments == sums.segment[:, None]


def _beside(before: Sums, own: Sums, count: int) -> tuple[Sums, Sums]:
    """Return the sums before each chunk (b*s, ...), and after the last (b, ...), from those of single chunks."""
    b, pairs = before.poison.shape[0], zip(before, own, strict=True)
    entries = (None if x is None or y is None else torch.cat([x[:, None], y.unflatten(0, (b, count))], 1)
               for x, y in pairs)  # fmt: skip
    running = _running(Sums(*cast(Any, entries)))
    lefts = (None if x is None else x[:, :-1].flatten(0, 1) for x in running)
    return Sums(*cast(Any, lefts)), Sums(*cast(Any, (None if x is None else x[:, -1] for x in running)))


def _running(entries: Sums) -> Sums:
    """Return the sums of all entries (b, t, ...) up to each one."""
    values, poison, scale, segment = entries
    count = values.shape[1]
    is_before = View(True, 0, segment, segment).mask(count, count, values.device)  # (1 or b, t, u)
    all_poison = torch.where(is_before, poison[:, None], 0.0).sum(-1)
    if scale is None:
        if segment is None:
            return Sums(values.cumsum(1), all_poison, None, None)
        factors = is_before.to(values.dtype)
        return Sums((factors @ values.flatten(2)).unflatten(2, values.shape[2:]), all_poison, None, segment)
    logs = torch.where(is_before[..., None], scale[:, None], NEVER)  # (b, t, u, 1 or r)
    top = logs.amax(2)
    factors = (logs - finite(top)[:, :, None]).exp().permute(0, 3, 1, 2)  # (b, 1 or r, t, u)
    if factors.shape[1] == 1:
        added = (factors[:, 0] @ values.flatten(2)).unflatten(2, values.shape[2:])
    else:
        added = (factors @ values.transpose(1, 2)).transpose(1, 2)
    return Sums(added, all_poison, top, segment)
