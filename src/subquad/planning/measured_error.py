"""The error of a method, and the range of the logits, measured on sampled rows.

relative error = |out - exact| / |exact|     Frobenius norms over all rows, estimated from the sampled ones
"""

from collections.abc import Callable
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from subquad._calls.call import Call, check_tensors
from subquad._engines import engine_of
from subquad.methods import MethodLike, resolve
from subquad.methods.checks import check_whole
from subquad.methods.error_estimate import NO_ERROR, ErrorEstimate
from subquad.planning.rows import exact_rows, logit_ends, method_rows, pick_rows, risks, sampled_call, undisturbed

SAMPLE_MARGIN = 2.0  # Rows that were not sampled may be this much worse than those that were.
METER_ROWS, METER_PAIRS = 64, 1 << 21  # of `error_meter`: rows of each head, and pairs that they meet in all


def measure_error(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, method: MethodLike, key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None, rows: int = 256, seed: int = 0,
) -> ErrorEstimate:  # fmt: skip
    """Return the error of `method` against exact attention on `rows` rows of each head, at O(rows * keys).

    With as many rows as there are queries it is the error itself.

    Args:
        query, key, value, attn_mask, is_causal, scale, enable_gqa: As for `attention`.
        method: A method or its name.
        key_padding_mask, segment_ids: As for `attention`.
        rows: How many rows of each head to look at.
        seed: Seed for drawing rows.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 1000, 16, generator=torch.Generator().manual_seed(0)).unbind()
        >>> print(measure_error(q / 2, k / 2, v, is_causal=True, method="taylor"))
        0.01 on sampled rows
        >>> print(measure_error(q * 4, k * 4, v, is_causal=True, method="taylor"))
        0.97 on sampled rows
    """
    check_whole("rows", rows, 1)
    check_tensors(query=query, key=key, value=value)
    resolved = resolve(method)
    if engine_of(resolved) == "exact":
        return NO_ERROR
    with undisturbed(query.device):
        call = sampled_call(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            key_padding_mask=key_padding_mask, segment_ids=segment_ids,
        )  # fmt: skip
        if call.is_empty:
            return ErrorEstimate(0.0, "sample")  # No query or no key: zeros either way.
        return error_meter(call, rows, seed)(resolved)


def error_meter(call: Call, rows: int | None = None, seed: int = 0) -> Callable[[Any], ErrorEstimate]:
    """Return a function that measures the error of a method on the call."""
    with torch.no_grad():
        heads = call.layout.rows * call.layout.group
        if rows is None:
            rows = max(8, min(METER_ROWS, METER_PAIRS // (heads * call.layout.keys)))
        picked = pick_rows(call, rows, seed)
        exact = exact_rows(call, picked)
    norm = picked.total(exact.square().sum(-1))[0]

    @torch.no_grad()
    def measured(method: Any) -> ErrorEstimate:
        difference = picked.total((method_rows(method, call, picked) - exact).square().sum(-1))[0]
        return ErrorEstimate(_relative(difference, norm), "sample")

    return measured


def _relative(difference: float, norm: float) -> float:
    """Return the relative error from sums of squares."""
    return sqrt(difference / norm) if norm > 0 else 0.0 if difference == 0 else inf if difference > 0 else difference


def logit_range(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None,
    rows: int | None = None, seed: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """Return the (lowest, highest) scaled logit that a query can have, or has, with a key that it may see.

    Args:
        query, key, attn_mask, is_causal, scale, enable_gqa, key_padding_mask, segment_ids: As for `attention`.
        rows: None for a rigorous range by the norms, |q_i.k_j| <= |q_i| |k_j|, at O(length * width); or how many rows
            of each head to look at, for the sharp range of those rows, at O(rows * keys).
        seed: Seed for drawing rows.

    Example:
        >>> q, k = torch.randn(2, 1, 2, 1000, 16, generator=torch.Generator().manual_seed(0)).unbind()
        >>> [round(end, 1) for end in logit_range(q, k)]
        [-9.9, 9.9]
        >>> [round(end, 1) for end in logit_range(q, k, rows=100)]
        [-6.0, 5.5]
    """
    if rows is not None:
        check_whole("rows", rows, 1)
    check_tensors(query=query, key=key)
    with undisturbed(query.device):
        call = sampled_call(
            query, key, key[..., :0], attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            key_padding_mask=key_padding_mask, segment_ids=segment_ids,
        )  # fmt: skip
        if call.is_empty:
            return 0.0, 0.0
        if rows is None:
            largest = float(risks(call).max())
            return -largest, largest
        return logit_ends(call, pick_rows(call, rows, seed))
