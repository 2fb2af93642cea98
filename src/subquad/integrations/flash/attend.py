"""attend: which computation serves a call, once its last query is aligned to its last key.

    exact, all keys to the left       Exact, or Window(None, softcap=...)
    exact, causal window              Window(left + 1)
    exact, symmetric window           Window(left + 1), if there are as many queries as keys
    exact, another window             a causal Window(left + right + 1) after `right` hidden keys are added at the end
    exact, ALiBi or log-sum-exp       rows.py, as causal calls with more keys than queries and no window
    another method                    the method itself

Queries that see no key give 0, and keys that no query sees are dropped. In a causal call with more keys than queries,
a method takes the keys that precede all queries as a state.

Axes: b batch, h query heads, g key heads, n queries, m keys, d width, e value width.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.sums import NEVER
from subquad._engines.finite import widen
from subquad.attention import attention
from subquad.integrations.flash.rows import attend_rows
from subquad.integrations.flash.rule import Rule
from subquad.methods import BlockSparse, Window
from subquad.planning.auto import Auto


def attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """Return the output (b, h, n, e), and the log-sum-exp (b, h, n) if the rule asks for it.

    Args:
        q: Queries (b, h, n, d).
        k: Keys (b, g, m, d).
        v: Values (b, g, m, e).
        rule: What the call computes.
    """
    n, m, left, right = q.shape[2], k.shape[2], rule.left, rule.right
    if not rule.is_exact:
        _check_lengths(rule, n, m)
    unseeing = 0 if right is None else max(0, n - m - right)  # first queries, which see no key
    unseen = 0 if left is None else max(0, m - n - left)  # first keys, which no query sees
    q, k, v, n, m = q[:, :, unseeing:], k[:, :, unseen:], v[:, :, unseen:], n - unseeing, m - unseen
    if rule.is_exact:  # A limit that hides nothing is not a limit.
        has_left, has_right = left is not None and left < m - 1, right is not None and right < n - 1
        rule = replace(rule, left=left if has_left else None, right=right if has_right else None)
    is_late = rule.is_exact and rule.right == 0 and n < m and rule.left is None and rule.softcap is None
    lse: Tensor | None = None
    with torch.autocast(q.device.type, enabled=False):
        if n == 0 or m == 0:
            output = F.pad(q[..., :0], (0, v.shape[-1]))  # 0, with a gradient
            lse = torch.full(q.shape[:3], NEVER, dtype=widen(q[:0]).dtype, device=q.device)
        elif rule.needs_lse or rule.slopes is not None or is_late:
            output, lse = attend_rows(q, k, v, rule)
        else:
            output = _attend_by_method(q, k, v, rule)
    if unseeing:
        output = F.pad(output, (0, 0, unseeing, 0))
        lse = None if lse is None else F.pad(lse, (unseeing, 0), value=NEVER)
    return output, lse if rule.needs_lse else None


def _attend_by_method(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    n, m, left, right = q.shape[2], k.shape[2], rule.left, rule.right
    is_causal, method, state, shown = right == 0, rule.method, None, None
    ahead = 0  # hidden keys at the end, which move the positions of a causal call forward
    if not is_causal and not (left == right and (n == m or left is None)):
        is_causal, ahead = True, n - 1 if right is None else right
        k, v = (F.pad(x, (0, 0, 0, ahead)) for x in (k, v))
    if left is not None or rule.softcap is not None or ahead:
        method = Window(None if left is None else left + ahead + 1, softcap=rule.softcap)
    before = m + ahead - n if is_causal else 0
    if before:
        _, state = attention(
            q[:, :, :0], k[:, :, :before], v[:, :, :before], is_causal=True, scale=rule.scale, enable_gqa=True,
            method=method, return_state=True,
        )  # fmt: skip
    if ahead:
        shown = torch.arange(before, m + ahead, device=k.device) < m
    return attention(
        q, k[:, :, before:], v[:, :, before:], dropout_p=rule.dropout_p, is_causal=is_causal, scale=rule.scale,
        enable_gqa=True, method=method, key_padding_mask=shown, state=state,
    )  # fmt: skip


def _check_lengths(rule: Rule, n: int, m: int) -> None:
    """Check that a method can be aligned to the last key, where there are more or fewer keys than queries."""
    is_causal, method = rule.right == 0, rule.method
    if n != m and is_causal and isinstance(method, Auto | BlockSparse):
        advice = 'use another method, or leave out "causal" for a single query'
        raise ValueError(f"causal: expected as many queries as keys with {method}, got {n} and {m}; {advice}")
    if n != m and not is_causal and isinstance(method, Window) and method.size is not None:
        advice = 'use method="exact" with window_size, which is aligned to the last key'
        raise ValueError(f"method: expected as many queries as keys with {method}, got {n} and {m}; {advice}")
