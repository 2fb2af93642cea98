"""The kernels of sparse attention as operators of torch, with derivatives, and with shapes for recorded programs.

    sparse(q, k, v, ...)             -> out, l = the logarithm of the sum of weights, and poison
    sparse_backward(grad, dl, ...)   -> the gradients of q, k, v, and of the learned sinks a

with da = -sum_i exp(a - l_i) (do_i.out_i - dl_i). The output is finite; rows whose poison is NaN are not. l is +inf in
rows that see nothing. The backward pass computes the weights again.

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
from subquad.native.loader import kernels

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor bounds, Tensor? keep, Tensor? layout, int query_block, "
    "int key_block, int key_heads, int reach, int sinks_count, bool is_causal, float scale, float? softcap"
)
TENSORS, PATTERN = slice(0, 7), slice(4, 13)  # tensors, and the fields of `Pattern`, among the arguments
torch.library.define("subquad::sparse", f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    "subquad::sparse_backward",
    f"(Tensor grad, Tensor? level_grad, Tensor output, Tensor level, Tensor poison, {ARGUMENTS}, bool of_queries, "
    "bool of_keys) -> (Tensor, Tensor, Tensor, Tensor)",
)


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `forward_shapes` describes."""
    q, k, v, sinks = arguments[:4]
    pattern, (scale, softcap) = Pattern(*arguments[PATTERN]), arguments[PATTERN.stop :]
    return computed(q, k, v, pattern, scale, softcap, sinks)[0]


def computed(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], bool]:
    """Return the results, and whether a row is poisoned; arguments as for `native_call`."""
    results = forward_shapes(q, k, v)
    if results[0].numel() == 0:
        return results, False
    call, _alive = native_call(q, k, v, pattern, scale, softcap, sinks, results)
    code = kernels().sparse(ctypes.byref(call))
    check_result(code)
    return results, code == POISONED


def forward_shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return an empty output (b, g, n, e), and two empty tensors (b, g, n)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    output = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=wide)
    return output, output.new_empty(q.shape[:3]), output.new_empty(q.shape[:3])


def backward(
    grad: Tensor, level_grad: Tensor | None, output: Tensor, level: Tensor, poison: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Compute what `backward_shapes` describes."""
    *arguments, of_queries, of_keys = rest
    q, k, v, sinks = arguments[:4]
    found = backward_shapes(grad, level_grad, output, level, poison, *rest)
    delta, grad = torch.empty_like(level), grad.to(output.dtype)
    level_grad = None if level_grad is None else level_grad.to(output.dtype).contiguous()
    pattern, (scale, softcap) = Pattern(*arguments[PATTERN]), arguments[PATTERN.stop :]
    call, _alive = native_call(q, k, v, pattern, scale, softcap, sinks, (output, level, delta))
    own_q, own_k, own_v = found[0] if of_queries else None, *(x if of_keys else None for x in found[1:3])
    call.output_grad, call.level_grad, call.delta = strided(grad), address(level_grad), delta.data_ptr()
    call.q_grad, call.k_grad, call.v_grad = address(own_q), address(own_k), address(own_v)
    check_result(kernels().sparse_backward(ctypes.byref(call)))
    if bool(poison.sum() != 0):  # Numbers that were replaced because they are not finite have gradient 0.
        for x, own in ((q, own_q), (k, own_k), (v, own_v)):
            if own is not None:
                own.masked_fill_(~x.isfinite(), 0.0)
    if sinks is not None:
        found[3].copy_(-((sinks[..., None] - level).exp() * delta).sum(-1))
    return found


def backward_shapes(
    grad: Tensor, level_grad: Tensor | None, output: Tensor, level: Tensor, poison: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return empty gradients of q, k, v and sinks; without numbers where they are not wanted."""
    *arguments, of_queries, of_keys = rest
    wanted = zip(arguments[:4], (of_queries, of_keys, of_keys, True), strict=True)
    return tuple(output.new_empty((0,) if x is None or not is_wanted else x.shape) for x, is_wanted in wanted)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[TENSORS], *output)
    ctx.numbers = inputs[TENSORS.stop :]
    ctx.set_materialize_grads(False)  # Few calls use the level further.


def differentiate(ctx: Any, grad: Tensor | None, level_grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    """Differentiate output and level: poison has no derivative."""
    nothing = (None,) * (len(ctx.numbers) + 3)  # The tensors of a pattern have no derivative.
    if grad is None and level_grad is None:
        return (None,) * 4 + nothing
    *tensors, output, level, poison = ctx.saved_tensors
    grad = output.new_zeros(()).expand(output.shape) if grad is None else grad
    if torch.is_grad_enabled() or is_batched(grad, level_grad):  # This is differentiated again, or for many gradients.
        return *_gradients_by_torch(tensors, ctx.numbers, grad, level_grad), *nothing
    of_queries, of_keys = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    found = torch.ops.subquad.sparse_backward(
        grad, level_grad, output, level, poison, *tensors, *ctx.numbers, of_queries, of_keys
    )
    given = zip(found, tensors[:4], (of_queries, of_keys, of_keys, True), strict=True)
    return *(own.to(x.dtype) if x is not None and wanted else None for own, x, wanted in given), *nothing


def _gradients_by_torch(
    tensors: list[Any], numbers: tuple[Any, ...], grad: Tensor, level_grad: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of queries, keys, values and sinks by torch's operations, which can be differentiated."""
    given = [x for x in tensors[:4] if x is not None]
    pattern, (scale, softcap) = Pattern(*tensors[4:], *numbers[:-2]), numbers[-2:]
    with torch.enable_grad():
        own = [x if x.requires_grad else x.detach().requires_grad_() for x in given]
        wide = [widen(x) for x in own]
        again, level = attend_by_torch(wide[0] * scale, wide[1], wide[2], pattern, softcap, (*wide, None)[3])
    results, grads = ([again], [grad]) if level_grad is None else ([again, level], [grad, level_grad])
    found = torch.autograd.grad(results, own, grads, create_graph=torch.is_grad_enabled())
    return (*found, None)[:4]


torch.library.impl("subquad::sparse", "CPU", forward)
torch.library.impl("subquad::sparse_backward", "CPU", backward)
torch.library.register_fake("subquad::sparse", forward_shapes)
torch.library.register_fake("subquad::sparse_backward", backward_shapes)
torch.library.register_autograd("subquad::sparse", differentiate, setup_context=save)
