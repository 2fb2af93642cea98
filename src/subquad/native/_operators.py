"""The kernels as operators of torch, with derivatives, and with shapes for torch.compile.

    forward(q, k, v, ...)            -> output, normaliser, poison, and the sums of all keys, where they are wanted
    backward(grad, output, ...)      -> the gradients of q, k and v

Axes as in _forms.py: q (b, g, n, d), k (b, m, d), v (b, m, e). Sums are (b, e + 1, r) here: a feature stands beside
the next. The output is finite; its poison, 0 or NaN, belongs on top of it.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.native._library import FOUND, HYPERBOLIC, LOGGED, POSITIVE, Call, pointer, strided

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? table, Tensor? turned, Tensor? before, Tensor? before_poison, "
    "Tensor? before_scale, int map, int degree, int features, float query_scale, float key_scale, bool causal, "
    "bool normalized, int chunk"
)
TENSORS, NUMBERS = 9, 8  # among the arguments
SCALED = (POSITIVE, HYPERBOLIC, LOGGED)  # maps whose keys have a log-scale
torch.library.define("subquad::forward", f"({ARGUMENTS}, bool want_sums) -> Tensor[]")
torch.library.define("subquad::backward", f"(Tensor grad, Tensor output, Tensor normalizer, {ARGUMENTS}) -> Tensor[]")


def filled(tensors: tuple[Any, ...], numbers: tuple[Any, ...], **more: Any) -> Call:
    """The call, but for what it writes to."""
    q, k, v, *rest = tensors
    map, degree, features, query_scale, key_scale, causal, normalized, chunk = numbers
    keep, table, turned, before, before_poison, before_scale = (None if x is None else x.contiguous() for x in rest)
    b, g, n, d = q.shape
    call = Call(
        map=map, degree=degree, wide=q.dtype == torch.float64, threads=torch.get_num_threads(), causal=causal,
        normalized=normalized, chunk=chunk, batch=b, group=g, queries=n, keys=k.shape[1], query_width=d,
        key_width=k.shape[2], values=v.shape[2], features=features, query_scale=query_scale, key_scale=key_scale,
        q=strided(q), k=strided(k), v=strided(v), keep=pointer(keep), table=pointer(table), turned=pointer(turned),
        before=pointer(before), before_poison=pointer(before_poison), before_scale=pointer(before_scale), **more,
    )  # fmt: skip
    call.owners = (keep, table, turned, before, before_poison, before_scale)  # copies live as long as the call
    return call


def run(name: str, call: Call) -> None:
    library = FOUND.library
    assert library is not None  # Nobody comes here without it.
    if getattr(library, name)(ctypes.byref(call)):
        raise MemoryError("subquad: not enough memory for the buffers of the native kernels")


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def forward(*arguments: Any) -> list[Tensor]:
    made = forward_shapes(*arguments)
    names = ("output", "normalizer", "poison", "after", "after_poison", "after_scale")
    written = {name: x.data_ptr() for name, x in zip(names, made, strict=False) if x.numel()}
    run("forward", filled(arguments[:TENSORS], arguments[TENSORS:-1], **written))
    return made


def forward_shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    map, _, features, *_, want_sums = others[TENSORS - 3 :]
    b, g, n, e = *q.shape[:3], v.shape[2]
    sums = [(b, e + 1, features), (b,), (b, 1 if map in SCALED else 0)] if want_sums else []
    return [q.new_empty(shape, dtype=wide(q.dtype)) for shape in [(b, g, n, e), (b, g, n), (b, g, n), *sums]]


def backward(grad: Tensor, output: Tensor, normalizer: Tensor, *arguments: Any) -> list[Tensor]:
    made = backward_shapes(grad, output, normalizer, *arguments)
    written = {name: x.data_ptr() for name, x in zip(("q_grad", "k_grad", "v_grad"), made, strict=True)}
    read = {"output": output.data_ptr(), "normalizer": normalizer.data_ptr(), "output_grad": strided(grad)}
    run("backward", filled(arguments[:TENSORS], arguments[TENSORS:], **read, **written))
    return made


def backward_shapes(grad: Tensor, output: Tensor, normalizer: Tensor, *arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape, dtype=wide(x.dtype)) for x in arguments[:3]]


def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output[:2])
    ctx.numbers = inputs[TENSORS:-1]


def _batched(grad: Tensor) -> bool:
    """Whether it stands for many gradients, in either of the two ways that torch has."""
    return bool(torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad))


def differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Of the output alone: normaliser and poison are not for others, and calls that want sums have no derivative."""
    *tensors, output, normalizer = ctx.saved_tensors
    nothing = (None,) * (TENSORS - 3 + NUMBERS + 1)
    if grads[0] is None:
        return None, None, None, *nothing
    if torch.is_grad_enabled() or _batched(grads[0]):  # Somebody differentiates this again,
        # or asks for many gradients at once.
        from subquad._kernel import Sums
        from subquad.native._twin import gradients

        q, k, v, keep, table, _, before, poison, scale = tensors
        sums = None if before is None else Sums(before.mT, poison, scale)
        with torch.enable_grad():
            return *gradients(grads[0], q, k, v, keep, table, sums, *ctx.numbers[:-1]), *nothing
    found = torch.ops.subquad.backward(grads[0], output, normalizer, *tensors, *ctx.numbers)
    return *(x.to(to.dtype) for x, to in zip(found, tensors, strict=False)), *nothing


torch.library.impl("subquad::forward", "CPU", forward)
torch.library.impl("subquad::backward", "CPU", backward)
torch.library.register_fake("subquad::forward", forward_shapes)
torch.library.register_fake("subquad::backward", backward_shapes)
torch.library.register_autograd("subquad::forward", differentiate, setup_context=save)
