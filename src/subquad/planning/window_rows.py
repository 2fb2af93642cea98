"""Some rows of a window, each from the keys that it sees: O(rows * window).

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, p picked rows,
w keys that a row sees.
"""

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._engines.finite import widen
from subquad._engines.sparse.bounds import Places, bounds_of
from subquad.methods.window import Window

BLOCK_NUMBERS = 1 << 22  # of keys and values that are copied at once


def window_rows(method: Window, call: Call, places: Tensor) -> Tensor:
    """Return (b, g, p, e), float64: the rows at `places` (b, g, p)."""
    lay, keep = call.layout, call.keep()
    bounds = bounds_of(method, Places(lay.queries, lay.keys, 0, call.is_causal, 0, keep, call.segments), lay.device)
    ends = bounds.long().expand(lay.rows, -1, -1)  # (b, 4, n)
    q, k, v = call.folded()
    sinks = method.logits_of_sinks(lay.key_heads * lay.group, torch.promote_types(q.dtype, torch.float32))
    output = torch.empty(*places.shape, lay.value_width, dtype=torch.float64, device=lay.device)
    for head, own in enumerate(places):
        index, seen = _keys_seen(ends[head][:, own], lay.keys)
        if keep is not None:
            seen = seen & keep[head][index]
        sink = None if sinks is None else sinks.unflatten(0, (-1, lay.group))[head % lay.key_heads]
        step = max(1, BLOCK_NUMBERS // max(1, index.shape[-1] * lay.group * (lay.width + lay.value_width)))
        for start in range(0, own.shape[1], step):
            part = slice(start, start + step)
            rows = widen(torch.stack([x[i] for x, i in zip(q[head], own[:, part], strict=True)]))  # (g, p, d)
            keys, values = (widen(x[head][index[:, part]]) for x in (k, v))  # (g, p, w, d or e)
            logits = (keys @ rows[..., None]).squeeze(-1) * call.logit_scale
            weights = _weights(logits, seen[:, part], method.softcap, sink)
            if keep is not None:  # Hidden values may be anything.
                values = torch.where(seen[:, part, :, None], values, 0.0)
            output[head, :, part] = (weights[..., None, :] @ values).squeeze(-2)
    return output


def _keys_seen(ends: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return places of keys (g, p, w) and whether they are in a range of their row, from the bounds (4, g, p)."""
    index, seen = [], []
    for begin, end in ends.unflatten(0, (2, 2)):
        width = int((end - begin).max().clamp(min=0))
        places = begin[..., None] + torch.arange(width, device=ends.device)
        index.append(places)
        seen.append(places < end[..., None])
    return torch.cat(index, -1).clamp(max=keys - 1), torch.cat(seen, -1)


def _weights(logits: Tensor, seen: Tensor, softcap: float | None, sink: Tensor | None) -> Tensor:
    """Return the weights (g, p, w) of scaled logits; sink (g,): the logit of a learned sink."""
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = torch.where(seen, logits, float("-inf"))
    if sink is not None:
        logits = torch.cat([logits, sink[:, None, None].expand(*logits.shape[:2], 1)], -1)
    weights = logits.softmax(-1)[..., : seen.shape[-1]]
    return torch.where(seen.any(-1, keepdim=True), weights, 0.0)  # A row without keys is 0.
