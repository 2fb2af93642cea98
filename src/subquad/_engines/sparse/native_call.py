"""Sparse attention in the native kernels: which calls they serve, and how they are called."""

import torch
from torch import Tensor

from subquad import native
from subquad._engines.sparse.pattern import Pattern
from subquad._torch_internals import in_onnx_export, is_transformed
from subquad.native.calls import TYPES, SparseCall, address, strided


def is_served(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the kernels serve a call with these tensors."""
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    return (
        native.available()
        and all(x.device.type == "cpu" and x.dtype in TYPES for x in given)
        and q.dtype == k.dtype == v.dtype
        and all(x.shape[0] > 0 for x in given)
        and all(size > 0 for size in (*q.shape[1:], k.shape[1], v.shape[2]))
        and not in_onnx_export()
        and not is_transformed(*given)
    )


def native_call(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, softcap: float | None, sinks: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor],
) -> tuple[SparseCall, tuple[object, ...]]:  # fmt: skip
    """Return the arguments of a kernel, and the tensors that must live as long as it.

    Args:
        q: (b, g, n, d), of any type and strides.
        k: (b, m, d).
        v: (b, m, e).
        pattern: The pairs that are seen.
        scale: Factor of the logits.
        softcap: Soft-capping of the logits, or None.
        sinks: (b, g), wide, or None; the same for all batches.
        results: Output (b, g, n, e), log-sum-exp (b, g, n) and poison (b, g, n), wide.
    """
    b, g, n, d = q.shape
    bounds = pattern.bounds.contiguous()
    keep = pattern.keep
    if keep is not None and keep.stride(-1) != 1:
        keep = keep.contiguous()
    layout = None if pattern.layout is None else pattern.layout.contiguous()
    key_heads = pattern.key_heads
    own_sinks = None if sinks is None else sinks[:key_heads].contiguous()
    heads, rows, columns = (1, 1, 1) if layout is None else layout.shape
    call = SparseCall(
        q.dtype == torch.float64, torch.get_num_threads(), b, key_heads, g, n, k.shape[1], d, v.shape[2],
        0 if keep is None else keep.stride(0), 4 * n if len(bounds) > 1 else 0, heads, rows, columns,
        pattern.query_block, pattern.key_block, scale, softcap or 0.0, strided(q), strided(k), strided(v),
        address(keep), address(bounds), address(layout),
        address(own_sinks), *(x.data_ptr() for x in results),
    )  # fmt: skip
    return call, (bounds, keep, layout, own_sinks)
