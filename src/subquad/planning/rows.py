"""A sample of rows, computed exactly and by a method: O(rows * keys).

Rows are drawn where they matter. A row's risk is |q_i| times the largest |k_j| that it sees: no logit of it is larger.
The rows of the highest risk are all taken, and those with the largest logits with the few loudest keys; in causal calls
the first ones too, which are averages of few values and so the largest. The others are sorted in the same order, cut
into equal parts, and one row is drawn from each part.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, p picked rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.view import View
from subquad._engines import engine_of, run
from subquad._engines.features.alignment import aligned
from subquad._engines.features.kernel import ready_keys, ready_queries
from subquad._engines.features.mapped import mapped
from subquad._engines.features.method_kernel import kernel_of
from subquad._engines.finite import widen
from subquad.methods.memory_limit import check_memory, needs_features
from subquad.methods.method import feature_method
from subquad.methods.window import Window
from subquad.planning.multipole_rows import is_rowwise, multipole_rows
from subquad.planning.sparse_pairs import has_places
from subquad.planning.window_rows import window_rows

BLOCK_PAIRS = 1 << 20  # weights that are made at once
SAFE_NORMS = 1e-15, 1e18  # of vectors whose squares float32 can add up
LOUD_KEYS = 16  # keys of the largest norms that every row is compared with
WINDOW_ROW_PRICE = 64  # rows of a call of Window that take as long as one row alone


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Switch off autograd and autocast."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def sampled_call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Call:
    """Return a call without history whose masks can be factored; options as for `Call.of`."""
    return Call.of(query.detach(), key.detach(), value.detach(), **options).factored()


def risks(call: Call, tokens: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return (b, g, n): no scaled logit of a row is larger in magnitude.

    Args:
        call: The call.
        tokens: Its folded queries and keys, if they are in other coordinates.
    """
    keep, (q, k) = call.keep(), tokens or (call.layout.fold_query(call.query), call.layout.fold_key(call.key))
    norms = _norms(k)
    norms = norms if keep is None else torch.where(keep, norms, 0.0)
    n, m = call.layout.queries, call.layout.keys
    if call.is_causal:
        largest = norms.cummax(-1).values[:, torch.arange(n, device=norms.device).clamp(max=m - 1)]
    else:
        largest = norms.amax(-1, keepdim=True)
    own = _norms(q)
    return own * largest[:, None] * (abs(call.logit_scale) * (1 + 1e-9))  # allows for rounding of the product


def _norms(x: Tensor) -> Tensor:
    """Return norms of vectors (..., d), float64, rounded up: in float32, unless squares could vanish or overflow."""
    if x.dtype != torch.float64:
        found: Tensor = widen(x).norm(dim=-1)
        if bool(((found > SAFE_NORMS[0]) & (found < SAFE_NORMS[1])).all()):
            return found.double() * (1 + x.shape[-1] * torch.finfo(found.dtype).eps)
    wide: Tensor = x.double().norm(dim=-1)
    return wide * (1 + 1e-9)


def loudest(call: Call) -> Tensor:
    """Return (b, g, n): the largest magnitude of a row's logits with the few keys of the largest norms.

    A row can have a harmless norm and yet align with one loud key.
    """
    k, keep = widen(call.layout.fold_key(call.key)), call.keep()
    norms = k.norm(dim=-1) if keep is None else torch.where(keep, k.norm(dim=-1), -1.0)
    top = norms.topk(min(LOUD_KEYS, call.layout.keys), -1).indices.sort(-1).values  # (b, t)
    keys = k.gather(1, top[..., None].expand(-1, -1, k.shape[-1]))
    logits = torch.einsum("bgnd,btd->bgnt", widen(call.layout.fold_query(call.query)), keys).abs()
    if call.is_causal:
        places = torch.arange(call.layout.queries, device=k.device)[:, None]
        logits = torch.where(top[:, None, None] <= places, logits, 0.0)
    if keep is not None:
        logits = torch.where(keep.gather(1, top)[:, None, None], logits, 0.0)
    return logits.amax(-1) * abs(call.logit_scale)


class Picked(NamedTuple):
    """Sampled rows, and how many rows each of them represents: 1 for the first `certain` ones of each head."""

    places: Tensor  # (b, g, p)
    weights: Tensor  # (p,)
    certain: int

    def total(self, squares: Tensor) -> tuple[float, float]:
        """Return an estimate of the sum over all rows, from the sampled ones (b, g, p), and its standard error."""
        drawn = squares[..., self.certain :]
        spread = 0.0
        count = drawn.shape[-1]
        if count:
            # One row was drawn from each part, so neighbors tell how much parts vary inside.
            steps = drawn.diff(dim=-1).square().sum() / 2 * count / (count - 1) if count > 1 else drawn.square().sum()
            spread = float(self.weights[-1]) * sqrt(float(steps))
        return float((squares * self.weights).sum()), spread


def pick_rows(call: Call, rows: int, seed: int = 0, by_risk: Tensor | None = None) -> Picked:
    """Pick `rows` rows of each head, or all if there are no more; `by_risk`: the risks, if they are known."""
    by_risk = risks(call) if by_risk is None else by_risk
    n, device = by_risk.shape[-1], by_risk.device
    if rows >= n:
        return Picked(torch.arange(n, device=device).expand_as(by_risk), by_risk.new_ones(n).double(), n)
    # Half by the largest possible logit, half by the largest one with a loud key.
    rank = torch.minimum(_ranks(by_risk), _ranks(loudest(call)))
    if call.is_causal:
        rank[..., : rows // 4] = -1
    order = rank.argsort(dim=-1, stable=True)
    certain = 3 * rows // 4 if call.is_causal else rows // 2
    parts, length = rows - certain, n - certain
    generator = torch.Generator().manual_seed(seed)
    within = torch.rand(*by_risk.shape[:-1], parts, generator=generator, dtype=torch.float64).to(device)
    drawn = ((torch.arange(parts, device=device) + within) * (length / parts)).long().clamp(max=length - 1)
    places = torch.cat([order[..., :certain], order[..., certain:].gather(-1, drawn)], -1)
    weights = torch.ones(rows, dtype=torch.float64, device=device)
    weights[certain:] = length / parts
    return Picked(places, weights, certain)


def _ranks(x: Tensor) -> Tensor:
    """Return the place of each number among those of its row, the largest first."""
    order = torch.nan_to_num(x.float(), nan=inf).argsort(-1, descending=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(x.shape[-1], device=x.device).expand_as(order))


class RowBlock(NamedTuple):
    """A few heads, each with its picked rows, as a batch of heads without groups."""

    heads: slice  # of b
    rows: slice  # of p
    q: Tensor  # (b*g, p, d)
    seen: Tensor  # (b*g, p, m)


def row_blocks(call: Call, picked: Picked, numbers: int = 1, q: Tensor | None = None) -> Iterator[RowBlock]:
    """Yield all picked rows, in blocks of about BLOCK_PAIRS weights of `numbers` numbers each.

    Args:
        call: The call.
        picked: The rows.
        numbers: How many numbers are made for each weight.
        q: (b, g, n, d), the queries, if they are in other coordinates.
    """
    b, g, p = picked.places.shape
    m, q, keep = call.layout.keys, call.layout.fold_query(call.query) if q is None else q, call.keep()
    heads = max(1, BLOCK_PAIRS // max(1, g * p * m * numbers))
    rows = p if heads > 1 else max(1, BLOCK_PAIRS // max(1, g * m * numbers))
    keys = torch.arange(m, device=q.device)
    for first in range(0, b, heads):
        of_heads = slice(first, first + heads)
        for start in range(0, p, rows):
            places = picked.places[of_heads, :, start : start + rows].flatten(0, 1)  # (b*g, p)
            own = q[of_heads].flatten(0, 1)
            taken = own.gather(1, places[..., None].expand(-1, -1, own.shape[-1]))
            seen = keys <= places[..., None] if call.is_causal else torch.ones_like(places, dtype=torch.bool)[..., None]
            seen = seen.expand(*places.shape, m)
            if keep is not None:
                seen = seen & keep[of_heads].repeat_interleave(g, 0)[:, None]
            if call.segments is not None:
                segments = call.segments[of_heads].repeat_interleave(g, 0)
                seen = seen & (segments.gather(1, places)[..., None] == segments[:, None])
            yield RowBlock(of_heads, slice(start, start + rows), taken, seen)


def exact_rows(call: Call, picked: Picked, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return (b, g, p, e), float64: the picked rows of exact attention, computed in `dtype`."""
    k = call.layout.fold_key(call.key)
    return _rows_by_logits(call, picked, k, lambda x, seen: x.masked_fill_(~seen, -inf).softmax(-1), dtype)


def _rows_by_logits(
    call: Call, picked: Picked, k: Tensor, weigh: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """Return (b, g, p, e), float64: rows whose weights follow from the logits and from which keys are seen."""
    b, g, p = picked.places.shape
    v, keep = call.layout.fold_key(call.value), call.keep()
    output = torch.empty(b, g, p, v.shape[-1], dtype=torch.float64, device=v.device)
    for block in row_blocks(call, picked):
        keys, values = (x[block.heads].to(dtype) for x in (k, v))
        # All rows that meet the same keys, of every query head of a group, in one product.
        scaled = block.q.to(dtype) * call.logit_scale
        rows, seen = (x.unflatten(0, (-1, g)).flatten(1, 2) for x in (scaled, block.seen))
        weights = weigh(torch.bmm(rows, keys.mT), seen)
        if keep is not None:
            values = torch.where(keep[block.heads][..., None], values, 0.0)
        if keep is not None or call.segments is not None:
            weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)  # A row without keys is 0.
        output[block.heads, :, block.rows] = torch.bmm(weights, values).unflatten(1, (g, -1)).double()
    return output


def method_rows(method: Any, call: Call, picked: Picked) -> Tensor:
    """Return (b, g, p, e), float64: the picked rows of an approximation."""
    n, m = call.layout.queries, call.layout.keys
    is_few = WINDOW_ROW_PRICE * picked.places.shape[-1] < n
    if isinstance(method, Window) and is_few and has_places(method, n, m, call.is_causal):
        return window_rows(method, call, picked.places)
    if engine_of(method) == "multipole" and is_rowwise(call):
        return multipole_rows(method, call, picked.places)
    if engine_of(method) in ("hybrid", "multipole", "sparse"):  # A row alone costs as much as many of them in one call.
        wide = torch.promote_types(call.dtype, torch.float32)
        rows = call.layout.fold_query(run(method, call._replace(dtype=wide, is_headless=False)).output)
        return rows.gather(2, picked.places[..., None].expand(-1, -1, -1, rows.shape[-1])).double()
    (b, g, p), features, all_keep = picked.places.shape, feature_method(method), call.keep()
    if features.is_learned:
        features, call = mapped(method, call)[:2]
    if needs_features(features, "dense"):
        check_memory(features, call.layout.width, call.layout.value_width + 1)
    (q, k), v = aligned(features, call), call.layout.fold_key(call.value)
    has_log_scales = k.shape[-1] > q.shape[-1]
    if features.of_logits is not None and features.normalizer == "row" and all_keep is None and not has_log_scales:
        wide = torch.promote_types(call.dtype, torch.float32)
        return _rows_by_logits(call, picked, k, partial(_polynomial_weights, features.of_logits), wide)
    output = torch.empty(b, g, p, v.shape[-1], dtype=torch.float64, device=v.device)
    numbers = k.shape[-1] if features.normalizer == "feature" else 1  # Its weights are made feature by feature.
    for block in row_blocks(call, picked, numbers, q):
        keys, values = (x[block.heads].repeat_interleave(g, 0) for x in (k, v))
        keep = None if all_keep is None else all_keep[block.heads].repeat_interleave(g, 0)
        kernel, queries, keys = kernel_of(features, block.q[:, None], keys, call.logit_scale, pairs_alone=True)
        ready = ready_keys(kernel, keys, values, keep, None, mapped=not kernel.from_logits)
        rows = kernel.meet(ready_queries(kernel, queries), ready, View(False, seen=block.seen), ())
        output[block.heads, :, block.rows] = rows[:, 0].double().unflatten(0, (-1, g))
    return output


def _polynomial_weights(of_logits: Callable[[Tensor], Tensor], logits: Tensor, seen: Tensor) -> Tensor:
    weights = of_logits(logits).masked_fill_(~seen, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def logit_ends(call: Call, picked: Picked) -> tuple[float, float]:
    """Return the lowest and the highest scaled logit of the picked rows."""
    ends: list[Tensor] = []
    k = call.layout.fold_key(call.key)
    for block in row_blocks(call, picked):
        keys = widen(k[block.heads]).repeat_interleave(call.layout.group, 0)
        logits = torch.bmm(widen(block.q), keys.mT) * call.logit_scale
        ends.append(torch.stack([torch.where(block.seen, sign * logits, -inf).max() for sign in (-1, 1)]))
    low, high = torch.stack(ends).amax(0).tolist()  # NaN, if there is one.
    return (0.0, 0.0) if high == -inf else (-low, high)
