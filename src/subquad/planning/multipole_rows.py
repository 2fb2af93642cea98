"""Some rows of Multipole, without the others: the keys are sorted once, and only the picked queries meet them.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, p picked rows.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.call import Call
from subquad._engines.finite import widen
from subquad._engines.multipole.memory import appended
from subquad._engines.multipole.native_call import is_served, meet_natively
from subquad.methods.multipole import Multipole
from subquad.native.calls import padded


def is_rowwise(call: Call) -> bool:
    """Return whether the kernels serve rows of the call alone: one sequence, no key hidden, all numbers finite."""
    q, k, v = (widen(x) for x in call.folded())
    is_plain = call.keep() is None and call.segments is None and not call.is_empty
    return is_plain and is_served(q, k, v) and bool(torch.stack([x.sum() for x in (q, k, v)]).isfinite().all())


def multipole_rows(method: Multipole, call: Call, places: Tensor) -> Tensor:
    """Return (b, g, p, e), float64: the rows at `places` (b, g, p)."""
    q, k, v = (widen(x) for x in call.folded())
    width = v.shape[-1]
    memory = appended(method, None, k, F.pad(v, (0, padded(width) - width)), None, None, use_kernels=True)
    output = torch.empty(*places.shape, width, dtype=torch.float64)
    for g in range(places.shape[1]):  # Each query head has its own places, and the kernel one count of keys for a row.
        own, order = places[:, g].sort(-1)
        rows = q[:, g].gather(1, own[..., None].expand(-1, -1, q.shape[-1])) * call.logit_scale
        sees = (own + 1).clamp(max=k.shape[1]) if call.is_causal else torch.full_like(own, k.shape[1])
        found = meet_natively(method, rows[:, None], memory, sees)[:, 0, :, :width]
        output[:, g].scatter_(1, order[..., None].expand_as(found), found.double())
    return output
