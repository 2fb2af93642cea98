"""Exact attention, some rows at a time, with what no method has: the last query at the last key, ALiBi, log-sum-exp.

    out_i = sum_j p_ij v_j,    p_ij = exp(y_ij - lse_i),    lse_i = log sum_j exp(y_ij)

over the keys j that query i sees; y are the logits of `Rule`. A group of rows takes only the keys between the first and
the last that one of them sees. Memory is that of one group, also for gradients: the backward pass computes it again.

Axes: b batch, h query heads, g key heads, n queries, m keys, d width, e value width.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from subquad._calls.sums import NEVER
from subquad._engines.finite import widen
from subquad.integrations.flash.rule import Rule

MAX_ROWS = 128
MAX_PAIRS = 1 << 22  # logits that are held at once


def attend_rows(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """Return the output (b, h, n, e), and the log-sum-exp (b, h, n) if the rule asks for it; each row must see a key.

    Args:
        q: Queries (b, h, n, d).
        k: Keys (b, g, m, d).
        v: Values (b, g, m, e).
        rule: Which keys are seen, and the logits.
    """
    b, h, n, _ = q.shape
    m, left, right = k.shape[2], rule.left, rule.right
    keys = m if left is None or right is None else min(m, left + right + MAX_ROWS)
    size = max(1, min(MAX_ROWS, MAX_PAIRS // (b * h * keys)))
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    body = _attend if rule.softcap is not None or rule.slopes is not None or rule.needs_lse else _attend_by_torch
    parts = []
    for start in range(0, n, size):
        place = start + m - n  # of the first row among the keys
        low = 0 if left is None else max(0, place - left)
        high = m if right is None else min(m, place + size + right)
        part = (q[:, :, start : start + size], k[:, :, low:high], v[:, :, low:high], rule, place - low)
        parts.append(checkpoint(body, *part, use_reentrant=False) if is_recorded else body(*part))
    output, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return output, lse if rule.needs_lse else None


def _attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule, place: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the rows whose first one has this place among the keys."""
    (b, h, n, d), (g, m), e = q.shape, k.shape[1:3], v.shape[-1]
    scale = (d or 1) ** -0.5 if rule.scale is None else rule.scale
    grouped = (widen(q) * scale).reshape(b, g, h // g * n, d)  # query heads that share a key head
    logits = (grouped @ widen(k).mT).view(b, h, n, m)
    if rule.softcap is not None:
        logits = rule.softcap * (logits / rule.softcap).tanh()
    distance = _distance(n, m, place, q.device)
    if rule.slopes is not None:
        logits = logits - rule.slopes[..., None, None].to(logits.dtype) * distance.abs()
    logits = logits.masked_fill(~_seen(distance, rule), NEVER)
    weights = dropout(logits.softmax(-1), rule.dropout_p)
    output = (weights.view(b, g, h // g * n, m) @ widen(v)).view(b, h, n, e)
    return output.to(q.dtype), logits.logsumexp(-1) if rule.needs_lse else logits.new_empty(b, h, 0)


def _attend_by_torch(q: Tensor, k: Tensor, v: Tensor, rule: Rule, place: int) -> tuple[Tensor, Tensor]:
    """Return what `_attend` does, for logits without an addition."""
    seen = _seen(_distance(q.shape[2], k.shape[2], place, q.device), rule)
    output = scaled_dot_product_attention(q, k, v, seen, rule.dropout_p, scale=rule.scale, enable_gqa=True)
    return output, q.new_empty(*q.shape[:2], 0)


def _distance(n: int, m: int, place: int, device: torch.device) -> Tensor:
    """Return (n, m): how far each key lies before each row."""
    return torch.arange(place, place + n, device=device)[:, None] - torch.arange(m, device=device)


def _seen(distance: Tensor, rule: Rule) -> Tensor:
    """Return (n, m): which keys the rows see."""
    seen = torch.ones_like(distance, dtype=torch.bool)
    if rule.left is not None:
        seen &= distance <= rule.left
    if rule.right is not None:
        seen &= distance >= -rule.right
    return seen
