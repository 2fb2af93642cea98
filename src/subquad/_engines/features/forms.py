"""One meaning, four ways to compute it with torch's operations.

    dense     every row against every key that it may see, in blocks of rows     O(n m)          dense.py
    linear    phi(Q) (phi(K)^T V): the keys are added up, then read              O((n + m) r e)  linear.py
    chunked   pair by pair inside a chunk, the sums of the chunks before it      O(n r e)        chunked.py
    step      one token: its key joins the sums, its query reads them            O(r e)          Kernel.step

Every part drops its intermediate results and computes them again in the backward pass (`recompute`), so that only
inputs, outputs and one state per unit are kept.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
s chunks.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, cast

import torch
from torch import Tensor

from subquad._calls.sums import Sums
from subquad._engines.features.choose_form import Form, Sizes
from subquad._engines.features.chunked import Found, chunked, segmented, uneven
from subquad._engines.features.dense import dense
from subquad._engines.features.kernel import Kernel
from subquad._engines.features.linear import linear, reading, summed
from subquad._engines.features.sums import Tokens

Beside = tuple[Sums | None, Sums | None]  # sums of the keys before a call, and of those that follow

LARGE_BLOCK_BYTES = 31 << 20  # just below the most that glibc keeps


@lru_cache(maxsize=1)
def keep_large_blocks() -> None:
    """Let glibc keep large blocks in its heap, from the first call on that needs many of them.

    glibc returns a large block to the system when it is freed, and gets it back page by page, until one block of such a
    size has been freed before. This one is never written to, so it costs nothing. docs/log.md has the effect.
    """
    torch.empty(LARGE_BLOCK_BYTES, dtype=torch.uint8, device="cpu")


def run_form(
    form: Form, sizes: Sizes, kernel: Kernel, tokens: Tokens, beside: Beside, is_causal: bool, want_sums: bool
) -> Found:
    """Return the output (b, g, n, e), and the sums of all keys, except those that follow, if wanted."""
    q, k, v, keep, segments = tokens
    before, following = beside
    n, m = q.shape[2], k.shape[1]
    if not torch.compiler.is_compiling():
        keep_large_blocks()
    if q.shape[0] > sizes.batch:
        return _run_in_batches(form, sizes, kernel, tokens, beside, is_causal, want_sums)
    if q.shape[0] * q.shape[1] * n == 0 or (m == 0 and before is None):  # no query, or nothing to see
        sums = before
        if want_sums and q.shape[0] and m:
            sums = summed(kernel, k, v, keep, before, sizes.wave)
        nothing = reduce(torch.add, (x[..., :0].sum() for x in (q, k, v)))  # 0, with gradients
        return nothing.to(q.dtype).expand(*q.shape[:3], v.shape[-1]), sums
    if m == 0:
        assert before is not None
        return reading(kernel, q, before, sizes.wave), before
    if form == "dense":
        return dense(kernel, tokens, is_causal, sizes.rows), None
    if form == "step":
        return kernel.step(tokens, before)
    if not is_causal:
        if segments is not None:
            return segmented(kernel, tokens, before, sizes.chunk, following)
        return linear(kernel, tokens, before, sizes.wave)
    if n == m:
        return chunked(kernel, tokens, before, sizes, want_sums)
    return uneven(kernel, tokens, before, sizes, want_sums)


def _run_in_batches(
    form: Form, sizes: Sizes, kernel: Kernel, tokens: Tokens, beside: Beside, is_causal: bool, want_sums: bool
) -> Found:
    """Run the form for a few batches and heads at a time, so that its intermediate results stay in the cache."""

    def parts(tensor: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * -(-tokens.q.shape[0] // sizes.batch) if tensor is None else tensor.split(sizes.batch)

    count = len(Sums._fields)
    tensors = (*tokens, *(x for sums in beside for x in sums or (None,) * count))
    outputs, found = [], []
    for q, k, v, keep, segments, *rest in zip(*map(parts, tensors), strict=True):
        sides = (rest[:count], rest[count:])
        own = tuple(None if sums is None else Sums(*cast(Any, part)) for sums, part in zip(beside, sides, strict=True))
        part = Tokens(cast(Tensor, q), cast(Tensor, k), cast(Tensor, v), keep, segments)
        output, sums = run_form(form, sizes, kernel, part, cast(Beside, own), is_causal, want_sums)
        outputs.append(output)
        found.append(sums)
    if any(sums is None for sums in found):
        return torch.cat(outputs), None
    joined = [None if parts[0] is None else torch.cat(parts) for parts in zip(*cast(Any, found), strict=True)]
    return torch.cat(outputs), Sums(*cast(Any, joined))
