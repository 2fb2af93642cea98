"""The dense form: every row against every key that it may see, in blocks of rows. O(n m): the oracle.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
s chunks.
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from subquad._calls.view import View
from subquad._engines.features.cutting import cut, until
from subquad._engines.features.kernel import Kernel, ready_keys, ready_queries
from subquad._engines.features.sums import Keys, Tokens
from subquad._engines.recompute import recomputed


def dense(kernel: Kernel, tokens: Tokens, is_causal: bool, block: int) -> Tensor:
    """Compute blocks of `block` rows against all the keys that they may see."""
    q, k, v, keep, segments = tokens

    def rows(first: int, kernel: Kernel, q: Tensor, keys: Tensor, values: Tensor, *rest: Tensor | None
             ) -> tuple[Tensor]:  # fmt: skip
        features, log_scales, poison, keep, segments, row_segments = rest
        seen = Keys(keys, values, cast(Tensor, poison), keep, segments, features, log_scales)
        view = View(is_causal, first, row_segments, segments)
        return (kernel.meet(ready_queries(kernel, q), seen, view, ()).to(q.dtype),)

    keys = ready_keys(kernel, k, v, keep, segments, mapped=not kernel.from_logits)
    outputs: list[Tensor] = []
    start = 0
    for part, part_segments in zip(q.split(block, 2), cut(segments, block, q.shape[2]), strict=True):
        end = min(k.shape[1], start + part.shape[2]) if is_causal else k.shape[1]
        floats = (until(x, end) for x in (keys.keys, keys.values, keys.features, keys.log_scales))
        constants = (until(x, end) for x in (keys.poison, keys.keep, keys.segments))
        outputs += recomputed(kernel, partial(rows, start), (part, *floats), (*constants, part_segments))
        start += part.shape[2]
    return torch.cat(outputs, 2)
