"""Forget the intermediate results of a function, and compute them again in the backward.

    y = body(x)        keeps x alone; the backward runs body again, with history, and differentiates that

So the memory of a long sequence is that of its inputs and outputs, and of the states between its parts. The backward is
made of differentiable operations, so it can be differentiated again, and composes with torch.func.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subquad._kernel import Kernel

Body = Callable[..., tuple[Tensor, ...]]


def recomputed(
    kernel: Kernel, body: Body, inputs: tuple[Tensor | None, ...], constants: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """body(kernel, *inputs, *constants), differentiable in the inputs. The body may close over no tensor."""
    if torch.compiler.is_compiling():  # The compiler decides by itself what to keep and what to compute again.
        return body(kernel, *inputs, *constants)

    def with_table(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return body(replace(kernel, table=tensors[-1]), *tensors[:-1])

    tensors = (*inputs, *constants, kernel.table)
    result: tuple[Tensor, ...] = _Recomputed.apply(with_table, len(inputs), *tensors)  # type: ignore[no-untyped-call]
    return result


class _Recomputed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(body: Body, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return body(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.body, ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        given = [i for i in range(ctx.count) if tensors[i] is not None]

        def again(*inputs: Tensor) -> tuple[Tensor, ...]:
            arguments = list(tensors)
            for i, tensor in zip(given, inputs, strict=True):
                arguments[i] = tensor
            result: tuple[Tensor, ...] = ctx.body(*arguments)
            return result

        with torch.autocast(grads[0].device.type, enabled=False):
            found = torch.func.vjp(again, *(tensors[i] for i in given))[1](grads)
        result: list[Tensor | None] = [None] * (2 + len(tensors))
        for i, grad in zip(given, found, strict=True):
            result[2 + i] = grad
        return tuple(result)
