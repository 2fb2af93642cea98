"""Sparse attention by torch's operations: the readable twin of the native kernels, and what differentiates twice.

Rows are computed in tiles, each with the keys between the first and the last that one of its rows sees, so time and
memory are those of the window, not of the whole sequence.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width.
"""

import torch
from torch import Tensor

from subquad._calls.sums import NEVER
from subquad._engines.finite import cleaned, poison_of
from subquad._engines.sparse.pattern import Pattern

TILE_ROWS = 256


def attend_by_torch(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, softcap: float | None, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output (b, g, n, e), and the logarithm of the sum of weights (b, g, n): +inf if a row sees nothing.

    Args:
        q: Scaled queries (b, g, n, d), wide.
        k: Keys (b, m, d).
        v: Values (b, m, e).
        pattern: The pairs that are seen.
        softcap: Soft-capping of the logits, or None.
        sink_logits: (b, g), or None.
    """
    row_poison, key_poison = poison_of(q), poison_of(k, v)
    q, k, v = cleaned(q), cleaned(k), cleaned(v)
    outputs, levels = [], []
    for start in range(0, q.shape[2], TILE_ROWS):
        rows = slice(start, min(start + TILE_ROWS, q.shape[2]))
        poison = row_poison[:, :, rows], key_poison
        output, level = _tile(q[:, :, rows], k, v, pattern, rows, poison, softcap, sink_logits)
        outputs.append(output)
        levels.append(level)
    return (torch.cat(outputs, 2), torch.cat(levels, 2)) if outputs else _nothing(q, k, v, sink_logits)


def _tile(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, rows: slice, poison: tuple[Tensor, Tensor],
    softcap: float | None, sink_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parts = [slice(low, high) for low, high in pattern.hull(rows)]
    if not parts:
        return _nothing(q, k, v, sink_logits)
    of_rows, of_keys = poison
    keys, values, of_keys = (torch.cat([x[:, part] for part in parts], 1) for x in (k, v, of_keys))
    seen = torch.cat([pattern.seen(rows, part, *q.shape[:2]) for part in parts], -1)
    return met(q, keys[:, None], values[:, None], seen, of_rows, of_keys[:, None, None], softcap, sink_logits)


def met(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, row_poison: Tensor, key_poison: Tensor, softcap: float | None,
    sink_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (b, g, ..., n, e) and (b, g, ..., n): all queries against all keys, of one tile, or of several.

    Args:
        q: (b, g, ..., n, d), scaled and finite.
        k: (b, 1, ..., m, d), finite.
        v: (b, 1, ..., m, e), finite.
        seen: (b or 1, g or 1, ..., n, m), True = seen.
        row_poison: (b, g, ..., n), NaN or 0.
        key_poison: (b, 1, ..., 1, m), NaN or 0.
        softcap: Soft-capping of the logits, or None.
        sink_logits: (b, g), or None.
    """
    logits = q @ k.mT
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = torch.where(seen, logits, NEVER)
    if sink_logits is not None:
        own = sink_logits.reshape(*sink_logits.shape, *(1,) * (logits.dim() - 2))
        logits = torch.cat([logits, own.expand(*logits.shape[:-1], 1)], -1)
    highest = logits.detach().amax(-1, keepdim=True)
    highest = torch.where(highest == NEVER, 0.0, highest)
    weights = (logits - highest).exp()
    total = weights.sum(-1, keepdim=True)
    is_empty = total == 0
    total = torch.where(is_empty, 1.0, total)
    share = weights[..., : k.shape[-2]] / total
    level = (total.log() + highest).masked_fill(is_empty, float("inf"))
    is_poisoned = (seen & key_poison.isnan()).any(-1) | (seen.any(-1) & row_poison.isnan())
    return (share @ v).masked_fill(is_poisoned[..., None], float("nan")), level[..., 0]


def _nothing(q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return zeros (b, g, n, e) through which gradients, all 0, reach every input, and the level of no keys."""
    row = q[..., :0].sum(-1, keepdim=True) + k[:0].sum() + v[:0].sum()
    row = row if sink_logits is None else row + sink_logits[:0].sum()
    level = row[..., 0] + float("inf") if sink_logits is None else row[..., 0] + sink_logits[..., None]
    return row.expand(*q.shape[:3], v.shape[-1]), level
