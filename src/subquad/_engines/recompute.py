"""Drop the intermediate results of a function, and compute them again in the backward pass.

    y = body(x)                              `recomputed`: keeps only x
    y_u, s_{u+1} = body(x_u, s_u)            `scanned`: keeps x, and the state s_u before each unit u of the sequence

The backward pass runs a body again, with history, and differentiates that. So the memory of a long sequence is that of
its inputs and outputs, and of the states between its units. The backward pass is made of differentiable operations, so
it can be differentiated again, and composes with torch.func.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

Body = Callable[..., tuple[Tensor, ...]]
Tensors = tuple[Tensor | None, ...]


def recomputed(kernel: Any, body: Body, inputs: Tensors, constants: Tensors) -> tuple[Tensor, ...]:
    """Return body(kernel, *inputs, *constants), differentiable in the inputs. The body may not close over tensors."""
    # The compiler decides itself what to keep and what to recompute; without a derivative nothing is kept.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return body(kernel, *inputs, *constants)

    def with_table(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return body(replace(kernel, table=tensors[-1]), *tensors[:-1])

    tensors = (*inputs, *constants, kernel.table)
    result: tuple[Tensor, ...] = Recomputed.apply(with_table, len(inputs), *tensors)  # type: ignore[no-untyped-call]
    return result


class Recomputed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(body: Body, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return body(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.body, ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        tensors = ctx.saved_tensors
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def along(*moved: Tensor) -> tuple[Tensor, ...]:
            arguments = list(tensors)
            for i, tensor in zip(moving, moved, strict=True):
                arguments[i] = tensor
            return ctx.body(*arguments)  # type: ignore[no-any-return]

        primals, moves = tuple(tensors[i] for i in moving), tuple(tangents[i] for i in moving)
        return torch.func.jvp(along, primals, moves)[1]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        found = _pull_back(ctx.body, tensors[: ctx.count], tensors[ctx.count :], grads)
        return None, None, *found, *(None for _ in tensors[ctx.count :])


def _pull_back(body: Body, inputs: Tensors, constants: Tensors, grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return the gradients of body(*inputs, *constants) for the inputs; None for a missing input."""
    given = [i for i, tensor in enumerate(inputs) if tensor is not None]

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = list(inputs)
        for i, tensor in zip(given, tensors, strict=True):
            arguments[i] = tensor
        return body(*arguments, *constants)

    device = grads[0].device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):  # "meta" has no autocast.
        found = torch.func.vjp(again, *(inputs[i] for i in given))[1](grads)
    result: list[Tensor | None] = [None] * len(inputs)
    for i, grad in zip(given, found, strict=True):
        result[i] = grad
    return tuple(result)


def scanned(
    kernel: Any, body: Body, sizes: Sequence[int], inputs: tuple[Tensor, ...], carry: tuple[Tensor, ...],
    constants: Tensors,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the output and the last carry of body(kernel, *inputs, *carry, *constants) -> (output, *carry).

    Inputs and constants are cut along their length into units of `sizes`; the outputs are joined. Differentiable in
    inputs and carry.
    """
    if torch.compiler.is_compiling():
        outputs = []
        cut = [[None] * len(sizes) if t is None else t.split(list(sizes), _axis(t)) for t in (*inputs, *constants)]
        for unit in zip(*cut, strict=True):
            output, *rest = body(kernel, *unit[: len(inputs)], *carry, *unit[len(inputs) :])
            outputs.append(output)
            carry = tuple(rest)
        return torch.cat(outputs, 2), *carry

    def with_table(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return body(replace(kernel, table=tensors[-1]), *tensors[:-1])

    counts = (len(inputs), len(carry))
    tensors = (*inputs, *carry, *constants, kernel.table)
    result = _Scanned.apply(with_table, tuple(sizes), counts, *tensors)  # type: ignore[no-untyped-call]
    return tuple(result[: 1 + len(carry)])


class _Scanned(torch.autograd.Function):
    """Also returns the carries before each unit, stacked: the backward pass can only use inputs and outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(body: Body, sizes: tuple[int, ...], counts: tuple[int, int], *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, carry, constants = _parted(tensors, counts)
        places = _places(sizes)
        carries: list[tuple[Tensor, ...]] = []

        def outputs() -> Iterable[Tensor]:
            nonlocal carry
            for place in places:
                carries.append(carry)
                output, *rest = body(*_cut(inputs, place), *carry, *_cut(constants[:-1], place), constants[-1])
                carry = tuple(rest)
                yield output

        output = _joined(outputs(), places)
        return output, *carry, *(torch.stack(parts) for parts in zip(*carries, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.body, ctx.sizes, ctx.counts, *tensors = inputs
        ctx.save_for_backward(*tensors, *output[1 + ctx.counts[1] :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        carries = ctx.saved_tensors[-ctx.counts[1] :]
        tensors = ctx.saved_tensors[: -ctx.counts[1]]
        inputs, carry, constants = _parted(tensors, ctx.counts)
        places = _places(ctx.sizes)
        behind = tuple(torch.zeros_like(c) if g is None else g for c, g in zip(carry, grads, strict=False))

        def found() -> Iterable[tuple[Tensor, ...]]:
            nonlocal behind
            for u in reversed(range(len(places))):
                unit = (*_cut(inputs, places[u]), *(c[u] for c in carries))
                fixed = (*_cut(constants[:-1], places[u]), constants[-1])
                if grad is None:
                    cotangent = torch.zeros_like(ctx.body(*unit, *fixed)[0])
                else:
                    cotangent = grad.narrow(2, *places[u])
                result = _pull_back(ctx.body, unit, fixed, (cotangent, *behind))
                of_carries = grads[ctx.counts[1] :]
                behind = tuple(
                    g if more is None else g + more[u]
                    for g, more in zip(result[ctx.counts[0] :], of_carries, strict=True)
                )
                yield result[: ctx.counts[0]]

        of_inputs = _joined_each(found(), places[::-1])
        return None, None, None, *of_inputs, *behind, *(None for _ in constants)


def _parted(tensors: Sequence[Any], counts: tuple[int, int]) -> tuple[Any, Any, Any]:
    first, second = counts[0], sum(counts)
    return tuple(tensors[:first]), tuple(tensors[first:second]), tuple(tensors[second:])


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(sum(sizes[:u]), size) for u, size in enumerate(sizes)]


def _axis(tensor: Tensor) -> int:
    """Return the dimension of the length: (b, g, n, d) of queries and outputs, (b, m, ...) of everything else."""
    return 2 if tensor.dim() == 4 else 1


def _cut(tensors: Sequence[Tensor | None], place: tuple[int, int]) -> Iterable[Tensor | None]:
    return (None if t is None else t.narrow(_axis(t), *place) for t in tensors)


def _joined(parts: Iterable[Tensor], places: list[tuple[int, int]]) -> Tensor:
    return _joined_each(((part,) for part in parts), places)[0]


def _joined_each(rows: Iterable[tuple[Tensor, ...]], places: list[tuple[int, int]]) -> list[Tensor]:
    """Return several tensors from their parts, which come one place after another, in either direction."""
    if torch.is_grad_enabled():  # This is differentiated again.
        columns = zip(
            *(row for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0])), strict=True
        )
        return [torch.cat(parts, _axis(parts[0])) for parts in columns]
    # Written into one block each: many small long-lived blocks among short-lived large ones fragment the heap.
    whole: list[Tensor] = []
    length = sum(size for _, size in places)
    for place, row in zip(places, rows, strict=True):
        whole = whole or [x.new_empty([length if i == _axis(x) else s for i, s in enumerate(x.shape)]) for x in row]
        for target, x in zip(whole, row, strict=True):
            target.narrow(_axis(x), *place).copy_(x)
    return whole
