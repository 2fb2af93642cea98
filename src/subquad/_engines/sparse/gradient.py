"""Sparse attention in the native kernels, with gradients. The backward pass computes the weights again.

    forward    out, and l = the logarithm of the sum of weights
    backward   native/src/sparse_backward.h; the learned sinks: da = -sum_i exp(a - l_i) (do_i.out_i)

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad._engines.finite import widen
from subquad._engines.sparse.by_torch import attend_by_torch
from subquad._engines.sparse.native_call import native_call
from subquad._engines.sparse.pattern import Pattern
from subquad._torch_internals import is_batched
from subquad.native.calls import POISONED, address, check_result, strided
from subquad.native.loader import FOUND


def attend_natively(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return (b, g, n, e), wide; arguments as for `native_call`."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
        result: Tensor = _Differentiable.apply(q, k, v, sinks, pattern, scale, softcap)  # type: ignore[no-untyped-call]
        return result
    return _forward(q, k, v, sinks, pattern, scale, softcap)[0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pattern: Pattern, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the output with poison, the log-sum-exp, and the finite output if that is another."""
    wide = torch.promote_types(q.dtype, torch.float32)
    output = q.new_empty(*q.shape[:3], v.shape[-1], dtype=wide)
    level, poison = q.new_empty(2, *q.shape[:3], dtype=wide).unbind()
    call, _alive = native_call(q, k, v, pattern, scale, softcap, sinks, (output, level, poison))
    assert FOUND.library is not None
    code = FOUND.library.sparse(ctypes.byref(call))
    check_result(code)
    if code != POISONED:
        return output, level, None
    return output.masked_fill(poison.isnan()[..., None], float("nan")), level, output


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pattern: Pattern, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        output, level, finite = _forward(q, k, v, sinks, pattern, scale, softcap)
        ctx.pattern, ctx.scale, ctx.softcap = pattern._replace(keep=None, layout=None), scale, softcap
        ctx.save_for_backward(q, k, v, sinks, output if finite is None else finite, level, pattern.keep, pattern.layout)
        ctx.poisoned = output.isnan().any(-1) if finite is not None else None
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, output, level, keep, layout = ctx.saved_tensors
        pattern = ctx.pattern._replace(keep=keep, layout=layout)
        if torch.is_grad_enabled() or is_batched(grad):  # This is differentiated again, or for many gradients.
            return (*_gradients_by_torch(ctx, pattern, grad), None, None, None)
        wide, needs = output.dtype, ctx.needs_input_grad
        grad = grad if grad.dtype == wide else grad.to(wide)
        if ctx.poisoned is not None:  # A row that is NaN passes nothing on.
            grad = grad.masked_fill(ctx.poisoned[..., None], 0.0)
        delta = torch.empty_like(level)
        own_q = torch.empty(q.shape, dtype=wide) if needs[0] else None
        own_k, own_v = (torch.empty(x.shape, dtype=wide) if needs[1] or needs[2] else None for x in (k, v))
        call, _alive = native_call(q, k, v, pattern, ctx.scale, ctx.softcap, sinks, (output, level, delta))
        call.output_grad, call.delta = strided(grad), delta.data_ptr()
        call.q_grad, call.k_grad, call.v_grad = address(own_q), address(own_k), address(own_v)
        assert FOUND.library is not None
        check_result(FOUND.library.sparse_backward(ctypes.byref(call)))
        found = [_of(x, own, ctx.poisoned is not None) for x, own in ((q, own_q), (k, own_k), (v, own_v))]
        sink_grad = None
        if sinks is not None and needs[3]:
            sink_grad = -((sinks[..., None] - level).exp() * delta).sum(-1)
        return *found, sink_grad, None, None, None


def _of(x: Tensor, grad: Tensor | None, is_poisoned: bool) -> Tensor | None:
    """Return the gradient in the dtype of x, and 0 for numbers that were replaced because they are not finite."""
    if grad is None:
        return None
    grad = torch.where(x.isfinite(), grad, 0.0) if is_poisoned else grad
    return grad if grad.dtype == x.dtype else grad.to(x.dtype)


def _gradients_by_torch(ctx: Any, pattern: Pattern, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of queries, keys, values and sinks by torch's operations, which can be differentiated."""
    q, k, v, sinks = ctx.saved_tensors[:4]
    given = [x for x in (q, k, v, sinks) if x is not None]
    with torch.enable_grad():
        own = [x if x.requires_grad else x.detach().requires_grad_() for x in given]
        wide = [widen(x) for x in own]
        again = attend_by_torch(wide[0] * ctx.scale, wide[1], wide[2], pattern, ctx.softcap, (*wide, None)[3])
    found = torch.autograd.grad(again, own, grad, create_graph=torch.is_grad_enabled())
    return (*found, None)[:4]
