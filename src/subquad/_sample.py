"""How wrong an approximation is, and how far the logits reach, seen on a sample of rows: O(rows * keys).

    relative error = |out - exact| / |exact|     Frobenius norms over all rows, estimated from the sampled ones

Rows are drawn where they matter. A row's risk is |q_i| times the largest |k_j| that it sees: no logit of it is larger.
The rows of the highest risk are all taken, and those with the largest logits with the few loudest keys; in causal calls
the first ones too, which are averages of few values and so the largest. The others are sorted in the same order, cut
into equal parts, and one row is drawn from each part.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, p picked rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from subquad._auto import Auto
from subquad._error import Error
from subquad._features import Exact
from subquad._kernel import ready_keys, ready_queries, widen
from subquad._layout import Layout, check_shapes, check_tensors
from subquad._masks import View, key_mask, refuse_unfactored, segment_runs
from subquad._methods import Approximation, Method, kernel_of, resolve, shifted
from subquad._multipole import Multipole
from subquad._multipole_keys import multipole_attention
from subquad._separable import Separable

PAIRS = 1 << 22  # weights that are made at once
MARGIN = 2.0  # What was not sampled may be so much worse than what was.
LOUD = 16  # keys of the largest norms that every row is held against


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """No history, and no rounding to half precision, whatever the surroundings ask for."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@dataclass(frozen=True)
class Call:
    """The inputs of one call of attention, whatever its method."""

    layout: Layout
    query: Tensor
    key: Tensor
    value: Tensor
    keep: Tensor | None  # (b, m), True = may be seen
    runs: Tensor | None  # (b, m), the segments
    is_causal: bool
    scale: float

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False, key_padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> "Call":  # fmt: skip
        """Arguments as for `attention`."""
        check_tensors(query=query, key=key, value=value)
        layout = check_shapes(query, key, value, enable_gqa)
        query, key, value = (x.detach()[None] if x.dim() == 2 else x.detach() for x in (query, key, value))
        if attn_mask is not None:
            refuse_unfactored(attn_mask, stateful=False)
        keep = key_mask(layout, key_padding_mask, attn_mask)
        runs = None if segment_ids is None else segment_runs(layout, segment_ids, None)[0]
        scale = 1 / sqrt(layout.width or 1) if scale is None else scale
        return cls(layout, query, key, value, keep, runs, is_causal, scale)

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, or no key."""
        return self.layout.rows * self.layout.group * self.layout.queries * self.layout.keys == 0

    def risks(self, key: Tensor | None = None) -> Tensor:
        """(b, g, n): no scaled logit of a row is larger, in either direction. `key`: the keys, if they were shifted."""
        norms: Tensor = self.layout.fold_key(self.key if key is None else key).double().norm(dim=-1)
        norms = norms if self.keep is None else torch.where(self.keep, norms, 0.0)
        n, m = self.layout.queries, self.layout.keys
        if self.is_causal:
            largest = norms.cummax(-1).values[:, torch.arange(n, device=norms.device).clamp(max=m - 1)]
        else:
            largest = norms.amax(-1, keepdim=True)
        own: Tensor = self.layout.fold_query(self.query).double().norm(dim=-1)
        return own * largest[:, None] * (abs(self.scale) * (1 + 1e-9))  # Norms are rounded, too.

    def loudest(self) -> Tensor:
        """(b, g, n): the largest logit of a row, in either direction, with the few keys of the largest norms.

        A row can have a harmless norm and yet meet one loud key head on.
        """
        k = self.layout.fold_key(self.key).double()
        norms = k.norm(dim=-1) if self.keep is None else torch.where(self.keep, k.norm(dim=-1), -1.0)
        top = norms.topk(min(LOUD, self.layout.keys), -1).indices.sort(-1).values  # (b, t)
        keys = k.gather(1, top[..., None].expand(-1, -1, k.shape[-1]))
        logits = torch.einsum("bgnd,btd->bgnt", self.layout.fold_query(self.query).double(), keys).abs()
        if self.is_causal:
            places = torch.arange(self.layout.queries, device=k.device)[:, None]
            logits = torch.where(top[:, None, None] <= places, logits, 0.0)
        if self.keep is not None:
            logits = torch.where(self.keep.gather(1, top)[:, None, None], logits, 0.0)
        return logits.amax(-1) * abs(self.scale)


class Picked(NamedTuple):
    """Sampled rows, and how many rows each of them stands for: 1 for the first `certain` ones of each head."""

    places: Tensor  # (b, g, p)
    weights: Tensor  # (p,)
    certain: int

    def total(self, squares: Tensor) -> tuple[float, float]:
        """The sum over all rows of what the sampled ones have, (b, g, p), and its standard error."""
        drawn = squares[..., self.certain :]
        spread = 0.0
        count = drawn.shape[-1]
        if count:
            # One row was drawn from each part, so neighbours tell how much parts vary inside.
            steps = drawn.diff(dim=-1).square().sum() / 2 * count / (count - 1) if count > 1 else drawn.square().sum()
            spread = float(self.weights[-1]) * sqrt(float(steps))
        return float((squares * self.weights).sum()), spread


def pick_rows(call: Call, rows: int, seed: int = 0) -> Picked:
    """`rows` rows of each head, or all if there are no more."""
    risks = call.risks()
    n = risks.shape[-1]
    if rows >= n:
        return Picked(torch.arange(n, device=risks.device).expand_as(risks), risks.new_ones(n).double(), n)
    # Half by the largest possible logit, half by the largest one with a loud key.
    by_norm, by_loud = (torch.nan_to_num(x, nan=inf).argsort(-1, descending=True).argsort(-1) for x in
                        (risks, call.loudest()))  # fmt: skip
    rank = torch.minimum(by_norm, by_loud)
    if call.is_causal:
        rank[..., : rows // 4] = -1
    order = rank.argsort(dim=-1, stable=True)
    certain = 3 * rows // 4 if call.is_causal else rows // 2
    parts = rows - certain
    generator = torch.Generator().manual_seed(seed)
    within = torch.rand(*risks.shape[:-1], parts, generator=generator, dtype=torch.float64).to(risks.device)
    length = n - certain
    drawn = ((torch.arange(parts, device=risks.device) + within) * (length / parts)).long().clamp(max=length - 1)
    places = torch.cat([order[..., :certain], order[..., certain:].gather(-1, drawn)], -1)
    weights = torch.ones(rows, dtype=torch.float64, device=risks.device)
    weights[certain:] = length / parts
    return Picked(places, weights, certain)


class Block(NamedTuple):
    """A few heads, each with its picked rows, as a batch of heads without groups."""

    heads: slice  # of b
    rows: slice  # of p
    q: Tensor  # (b*g, p, d)
    seen: Tensor  # (b*g, p, m)


def blocks(call: Call, picked: Picked, wide: int = 1) -> Iterator[Block]:
    """All picked rows, in blocks of about PAIRS weights, each `wide` numbers."""
    b, g, p = picked.places.shape
    m, q = call.layout.keys, call.layout.fold_query(call.query)
    heads = max(1, PAIRS // max(1, g * p * m * wide))
    rows = p if heads > 1 else max(1, PAIRS // max(1, g * m * wide))
    keys = torch.arange(m, device=q.device)
    for first in range(0, b, heads):
        of_heads = slice(first, first + heads)
        for start in range(0, p, rows):
            places = picked.places[of_heads, :, start : start + rows].flatten(0, 1)  # (b*g, p)
            own = q[of_heads].flatten(0, 1)
            taken = own.gather(1, places[..., None].expand(-1, -1, own.shape[-1]))
            seen = keys <= places[..., None] if call.is_causal else torch.ones_like(places, dtype=torch.bool)[..., None]
            seen = seen.expand(*places.shape, m)
            if call.keep is not None:
                seen = seen & call.keep[of_heads].repeat_interleave(g, 0)[:, None]
            if call.runs is not None:
                runs = call.runs[of_heads].repeat_interleave(g, 0)
                seen = seen & (runs.gather(1, places)[..., None] == runs[:, None])
            yield Block(of_heads, slice(start, start + rows), taken, seen)


def exact_rows(call: Call, picked: Picked) -> Tensor:
    """(b, g, p, e), float64: the picked rows of exact attention."""
    b, g, p = picked.places.shape
    k, v = call.layout.fold_key(call.key), call.layout.fold_key(call.value)
    output = torch.empty(b, g, p, v.shape[-1], dtype=torch.float64, device=v.device)
    for block in blocks(call, picked):
        keys, values = (x[block.heads].double().repeat_interleave(g, 0) for x in (k, v))
        logits = torch.bmm(block.q.double(), keys.mT) * call.scale
        weights = torch.where(block.seen, logits, -inf).softmax(-1)
        weights = torch.where(block.seen.any(-1, keepdim=True), weights, 0.0)  # A row without keys is 0.
        values = values if call.keep is None else torch.where(_hidden(call, block, g), 0.0, values)
        output[block.heads, :, block.rows] = torch.bmm(weights, values).unflatten(0, (-1, g))
    return output


def method_rows(method: Approximation | Multipole, call: Call, picked: Picked) -> Tensor:
    """(b, g, p, e), float64: the picked rows of an approximation, pair by pair, as its dense form has them."""
    b, g, p = picked.places.shape
    if isinstance(method, Multipole):  # A row of it costs little, and its moments as much as those of all rows.
        layout = call.layout
        q, k, v = layout.fold_query(call.query), layout.fold_key(call.key), layout.fold_key(call.value)
        rows, _ = multipole_attention(method, layout, q, k, v, keep=call.keep, runs=call.runs, last_segment=None,
                                      state=None, is_causal=call.is_causal, scale=call.scale, return_state=False,
                                      twin=False)  # fmt: skip
        return rows.gather(2, picked.places[..., None].expand(-1, -1, -1, rows.shape[-1])).double()
    key = shifted(method, call.key, call.layout.key_heads)
    k, v = call.layout.fold_key(key), call.layout.fold_key(call.value)
    output = torch.empty(b, g, p, v.shape[-1], dtype=torch.float64, device=v.device)
    wide = k.shape[-1] if isinstance(method, Separable) else 1  # Its weights are made feature by feature.
    for block in blocks(call, picked, wide):
        keys, values = (x[block.heads].repeat_interleave(g, 0) for x in (k, v))
        keep = None if call.keep is None else call.keep[block.heads].repeat_interleave(g, 0)
        kernel, q, keys = kernel_of(method, block.q[:, None], keys, call.scale, pairs_alone=True)
        ready = ready_keys(kernel, keys, values, keep, None, mapped=not kernel.from_logits)
        rows = kernel.meet(ready_queries(kernel, q), ready, View(False, seen=block.seen), ())
        output[block.heads, :, block.rows] = rows[:, 0].double().unflatten(0, (-1, g))
    return output


def _hidden(call: Call, block: Block, group: int) -> Tensor:
    assert call.keep is not None
    return ~call.keep[block.heads].repeat_interleave(group, 0)[..., None]


def measure_error(
    method: Method | str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None, rows: int = 256, seed: int = 0,
) -> Error:  # fmt: skip
    """The error of `method` against exact attention on `rows` rows of each head, at O(rows * keys).

    Other arguments as for `attention`, but masks are the same for all query heads that share a key head. With as many
    rows as there are queries it is the error itself.

    >>> q, k, v = torch.randn(3, 1, 2, 1000, 16, generator=torch.Generator().manual_seed(0)).unbind()
    >>> print(measure_error("taylor", q / 2, k / 2, v, is_causal=True))
    0.01 on sampled rows
    >>> print(measure_error("taylor", q * 4, k * 4, v, is_causal=True))
    0.97 on sampled rows
    """
    _check_rows(rows)
    check_tensors(query=query, key=key, value=value)
    resolved = resolve(method)
    if isinstance(resolved, Auto):
        resolved = resolved.choose(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa,
                                   key_padding_mask=key_padding_mask, segment_ids=segment_ids).method  # fmt: skip
    if isinstance(resolved, Exact):
        return Error(0.0, "definition")
    with undisturbed(query.device):
        call = Call.of(query, key, value, attn_mask, is_causal, scale, enable_gqa, key_padding_mask, segment_ids)
        if call.is_empty:
            return Error(0.0, "sample")  # Nobody asks, or there is nothing to see: zeros in either way.
        picked = pick_rows(call, rows, seed)
        exact = exact_rows(call, picked)
        difference = picked.total((method_rows(resolved, call, picked) - exact).square().sum(-1))[0]
        return Error(relative(difference, picked.total(exact.square().sum(-1))[0]), "sample")


def _check_rows(rows: object) -> None:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows: expected a whole number >= 1, got {rows!r}")


def relative(difference: float, norm: float) -> float:
    """From sums of squares."""
    return sqrt(difference / norm) if norm > 0 else 0.0 if difference == 0 else inf if difference > 0 else difference


def logit_range(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None,
    rows: int | None = None, seed: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """(lowest, highest) scaled logit that a query can have, or has, with a key that it may see.

    rows: None for a rigorous range by the norms, |q_i.k_j| <= |q_i| |k_j|, at O(length * width); or how many rows of
    each head to look at, for a sharp range of those rows, at O(rows * keys). Other arguments as for `attention`.

    >>> q, k = torch.randn(2, 1, 2, 1000, 16, generator=torch.Generator().manual_seed(0)).unbind()
    >>> [round(end, 1) for end in logit_range(q, k)]
    [-9.9, 9.9]
    >>> [round(end, 1) for end in logit_range(q, k, rows=100)]
    [-6.0, 5.5]
    """
    if rows is not None:
        _check_rows(rows)
    check_tensors(query=query, key=key)
    with undisturbed(query.device):
        call = Call.of(query, key, key[..., :0], attn_mask, is_causal, scale, enable_gqa, key_padding_mask, segment_ids)
        if call.is_empty:
            return 0.0, 0.0
        if rows is None:
            largest = float(call.risks().max())
            return -largest, largest
        ends: list[Tensor] = []
        k = call.layout.fold_key(call.key)
        for block in blocks(call, pick_rows(call, rows, seed)):
            keys = widen(k[block.heads]).repeat_interleave(call.layout.group, 0)
            logits = torch.bmm(widen(block.q), keys.mT) * call.scale
            ends.append(torch.stack([torch.where(block.seen, sign * logits, -inf).max() for sign in (-1, 1)]))
        low, high = torch.stack(ends).amax(0).tolist()  # NaN, if there is one.
    return (0.0, 0.0) if high == -inf else (-low, high)
