"""The far part of Hybrid: a causal call of the feature engine, delayed by the window.

Query i sees the keys up to i - w: the last queries meet the first keys. The call is not normalized, and its values have
a column of ones, so that the sums of weights and their gradients come along.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, w near keys,
c keys that leave the window.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.call import Call
from subquad._calls.state import State
from subquad._calls.sums import NEVER, finite
from subquad._engines.features import engine as features
from subquad._engines.features.alignment import Coordinates
from subquad._engines.features.kernel import root_scales
from subquad._engines.features.mapped import mapped
from subquad._engines.finite import widen
from subquad._engines.sparse.memory import Tokens, folded
from subquad.methods.hybrid import Hybrid
from subquad.methods.method import FeatureMethod, feature_method


class Far(NamedTuple):
    """What the last queries see before the window."""

    total: Tensor  # (b, g, n, e + 1): sums of weights times values, and of weights
    log_scale: Tensor | None  # (b, g, n): both are to be multiplied by its exp()
    state: State | None  # the sums of all far keys, if they are wanted


def far_part(method: Hybrid, call: Call, form: Any, chunk: int | None) -> Far | None:
    """Return the far part of the rows that see far keys, the last ones; None if no key has left the window."""
    left = _left(method, call)
    if left is None:
        return None
    state, q = call.state, call.folded()[0]
    n, count = q.shape[2], left.keys.shape[1]
    before = None
    if state is not None and state.sums is not None:
        before = State(method.far, state.length, state.scale, state.sums, state.poison, state.log_scale)
    early = count - n  # keys that all queries see
    if early > 0:
        parts = (Tokens(x, y, z) for x, y, z in zip(*(_cut(x, early) for x in vars(left).values()), strict=True))
        first, left = parts
        found = _computed(method, call, q[:, :, :0], first, before, True, form, chunk)
        if n == 0:
            return found
        before = found.state
    return _computed(method, call, q[:, :, max(0, n - count) :], left, before, call.return_state, form, chunk)


def _cut(x: Tensor | None, count: int) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if x is None else (x[:, :count], x[:, count:])


def _left(method: Hybrid, call: Call) -> Tokens | None:
    """Return the keys (b, c, d) that leave the window during a call, hidden where they are sinks; None if none do."""
    layout, state, size = call.layout, call.state, method.window.reach
    held = 0 if state is None or state.keys is None else min(size, state.length)
    count = held + layout.keys - size
    if count <= 0:
        return None
    _, k, v = call.folded()
    tokens, places = Tokens(k, v, call.keep()), None
    is_sink = _first_visible(tokens, method.window.sinks)
    if state is not None and held:
        tail = folded(state, layout)[1]
        start = tail.keys.shape[1] - held
        keep = None if tail.keep is None else tail.keep[:, start:]
        tail = Tokens(tail.keys[:, start:], tail.values[:, start:], keep)
        places = state.parts[2].reshape(layout.rows, -1)  # of the sinks so far; -1: none
        own = torch.arange(state.length - held, state.length, device=k.device)
        was_sink = (own[:, None] == places[:, None]).any(-1)
        found = (places >= 0).sum(1, keepdim=True)
        is_sink = torch.cat([was_sink, _first_visible(tokens, method.window.sinks - found)], 1)
        tokens = tail.followed_by(tokens)
    keep = tokens.keep
    if method.window.sinks:
        keep = tokens.shown() & ~is_sink
    return Tokens(tokens.keys[:, :count], tokens.values[:, :count], None if keep is None else keep[:, :count])


def _first_visible(tokens: Tokens, count: int | Tensor) -> Tensor:
    """Return (b, m): which tokens are among the first `count` visible ones."""
    shown = tokens.shown()
    return shown & (shown.cumsum(1) <= count)


def _computed(
    method: Hybrid, whole: Call, q: Tensor, keys: Tokens, before: State | None, want_state: bool, form: Any,
    chunk: int | None,
) -> Far:  # fmt: skip
    """Return the far part of queries (b, g, n, d), as many as there are keys, or none."""
    own, q, k, v = feature_method(method.far), widen(q), widen(keys.keys), widen(keys.values)
    v = F.pad(v, (0, 1), value=1.0)
    layout = replace(whole.layout, queries=q.shape[2], keys=v.shape[1], value_width=v.shape[2])
    call = whole._replace(
        layout=layout, query=layout.unfold_query(q), key=layout.unfold(k), value=layout.unfold(v),
        dtype=q.dtype, attn_mask=None, mask_kind=None, padding=keys.keep,
        state=before, return_state=want_state, scale=whole.logit_scale, is_normalized=False, is_headless=False,
        is_autocast=False,
    )  # fmt: skip
    scales, plain, late = [], method.far, v.shape[1] - q.shape[2]
    if own.is_aligned:
        plain, call, found = _aligned(own, call, q, k)
        own = feature_method(plain)
        scales += [] if found is None else [found]
        if call.log_scales is not None:
            weights = call.log_scales * root_scales(whole.logit_scale)[1]
            scales.append(_level(weights, keys.keep, before)[:, None, late:])
    if own.has_log_scale or own.is_learned:
        own, call, query_scale, key_scale = mapped(plain, call)
        if query_scale is not None:
            scales.append(query_scale.reshape(q.shape[:3]))
        if key_scale is not None:
            scales.append(_level(key_scale.reshape(v.shape[:2]), keys.keep, before)[:, None, late:])
    result = features.run(own, call, form, chunk)
    log_scale = torch.stack(torch.broadcast_tensors(*scales)).sum(0) if scales else None
    return Far(layout.fold_query(result.output), log_scale, result.state)


def _aligned(own: FeatureMethod, call: Call, q: Tensor, k: Tensor) -> tuple[Any, Call, Tensor | None]:
    """Return the method without coordinates, the call in them, and the log-scale (b, g, n) of its queries.

    exp(q.k) = exp((q - b).(k - c)) exp(b.(k - c)) exp(q.c): the last factor does not cancel beside exact weights.
    """
    layout, names = call.layout, ("key_shift", "query_shift", "balance")
    into = Coordinates.of(own, layout, call.logit_scale, k)
    scale = None
    if into.key_shift is not None:
        center = into.key_shift.expand(layout.key_heads, -1).repeat(len(q) // layout.key_heads, 1)
        scale = (q * center[:, None, None]).sum(-1) * call.logit_scale
    plain = replace(own, **{name: None for name in names if getattr(own, name) is not None})  # type: ignore[type-var]
    q, k = into(q, k)
    width = layout.width
    log_scales = k[..., width] if k.shape[-1] > width else None
    call = call._replace(query=layout.unfold_query(q), key=layout.unfold(k[..., :width]), log_scales=log_scales)
    return plain, call, scale


def _level(key_scale: Tensor, keep: Tensor | None, before: State | None) -> Tensor:
    """Return (b, m): the largest log-scale up to each key, relative to which the feature engine adds up."""
    scale = key_scale.detach()
    scale = scale if keep is None else torch.where(keep, scale, NEVER)
    if before is not None and before.log_scale is not None:
        scale = torch.maximum(scale, before.log_scale.reshape(-1, 1))
    return finite(scale.cummax(1).values)
