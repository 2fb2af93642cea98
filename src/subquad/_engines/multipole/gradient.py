"""Multipole with gradients in the native kernels. The order of keys and the choice of blocks are constants.

    forward   out, and for the backward pass: the logarithm of the sum of weights, the blocks that were read
    backward  native/src/multipole_backward.h for keys and units; here units pass their gradients on to their keys:
              center mu = mean(k), value u = mean(v), r^2 = mean |k - mu|^2 / d

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, u units, t keys of a
unit, p parts of a head.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._engines.multipole.meet import meet
from subquad._engines.multipole.memory import Memory, appended, rows_of, whole
from subquad._engines.multipole.native_call import native_call, top_of
from subquad._engines.multipole.records import Blocks, Roots, unpacked, unpacked_roots
from subquad._torch_internals import is_batched
from subquad.methods import multipole as settings
from subquad.methods.multipole import BLOCKS_PER_SEGMENT as FAN
from subquad.methods.multipole import Multipole
from subquad.native.calls import PADDING, MultipoleGradient, check_result
from subquad.native.loader import kernels

PARTS = 2  # of a head: sums that different threads may make, always the same number


def differentiable(method: Multipole, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Return (b, g, n, e): queries that see the first `sees` (b, n) of finite keys (b, m, d) and values (b, m, e)."""
    result: Tensor = _Differentiable.apply(method, q, k, v, sees)  # type: ignore[no-untyped-call]
    return result


def by_torch(method: Multipole, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Return the same with torch's operations, which can be differentiated again."""
    return meet(method, q, appended(method, None, k, v, None, k.new_zeros(k.shape[:2]), use_kernels=False), sees)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, method: Multipole, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
        own_q, sees = q.contiguous(), sees.contiguous()
        memory = whole(method, k, v)
        lead = q.shape[:3]
        output, level = q.new_empty(*lead, v.shape[-1]), q.new_empty(lead)
        chosen, opened = (
            torch.full((*lead, count), -1, dtype=torch.int32)
            for count in (top_of(method, memory), settings.OPENED_SEGMENTS)
        )
        table = memory.table()
        call = native_call(method, own_q, memory, sees, table, output)
        call.level, call.chosen, call.opened_segments = level.data_ptr(), chosen.data_ptr(), opened.data_ptr()
        check_result(kernels().multipole(ctypes.byref(call)))
        ctx.method, ctx.length = method, memory.length
        ctx.save_for_backward(q, k, v, sees, output, level, chosen, opened, *_tensors(memory))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, sees, output, *rest = ctx.saved_tensors
        if torch.is_grad_enabled() or is_batched(grad):  # This is differentiated again, or for many gradients.
            with torch.enable_grad():
                q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
                again = by_torch(ctx.method, q, k, v, sees)
            is_recorded = torch.is_grad_enabled()
            return None, *torch.autograd.grad(again, (q, k, v), grad, create_graph=is_recorded), None
        memory = _memory(ctx.length, rest[3:])
        found = _gradients(ctx.method, memory, q.contiguous(), sees, output, tuple(rest[:3]), grad.contiguous())
        return None, *found, None


def _tensors(memory: Memory) -> tuple[Tensor | None, ...]:
    """Return the tensors of a memory, so that autograd can hold and free them."""
    m, page = memory, memory.pages[0] if memory.pages else None
    return m.filled, m.poison, m.base, m.sink_keys, m.sink_values, m.raw_keys, m.raw_values, m.roots, m.order, page


def _memory(length: int, tensors: Sequence[Tensor]) -> Memory:
    """Return the memory with these tensors."""
    filled, poison, base, sink_keys, sink_values, raw_keys, raw_values, roots, order, page = tensors
    pages = () if page is None else (page,)
    return Memory(
        length, filled, poison, base, sink_keys, sink_values, raw_keys, raw_values, roots, pages, order
    )  # fmt: skip


def _gradients(
    method: Multipole, memory: Memory, q: Tensor, sees: Tensor, output: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    level, chosen, opened = saved
    record, table, count = memory.record(method), memory.table(), memory.segments
    blocks = unpacked(torch.cat(memory.pages or (q.new_zeros(len(q), 0, record.size),), 1), record)
    roots = unpacked_roots(memory.roots, memory.roots.shape[1] * FAN, record.d, record.e)
    given = _turned(memory, blocks, roots)
    sums = _zeros(q, given, memory.raw_values.shape[-1])
    q_grad = torch.empty_like(q)
    call = native_call(method, q, memory, sees, table, output)
    call.level, call.chosen, call.opened_segments = level.data_ptr(), chosen.data_ptr(), opened.data_ptr()
    gradient = MultipoleGradient(call, count, PARTS, grad.data_ptr(), *(x.data_ptr() for x in (*given, q_grad, *sums)))
    check_result(kernels().multipole_backward(ctypes.byref(gradient)))
    totals = [x.sum(1) for x in sums]
    return q_grad, *_to_keys(method, memory, blocks, roots, totals)


def _turned(memory: Memory, blocks: Blocks, roots: Roots) -> list[Tensor]:
    """Return keys as padded rows, and values as panels (e, 16), of sinks, raw keys, blocks, centers and roots."""

    def rows(x: Tensor) -> Tensor:
        return F.pad(x, (0, -x.shape[-1] % PADDING)).contiguous()

    def panels(values: Tensor) -> Tensor:
        turned: Tensor = values.unflatten(-2, (-1, PADDING)).mT
        return turned.contiguous()

    own_values = F.pad(blocks.values, (0, 0, 0, PADDING - blocks.values.shape[2]))
    return [
        rows(rows_of(memory.sink_keys)), panels(memory.sink_values), rows(rows_of(memory.raw_keys)),
        panels(memory.raw_values), rows(blocks.keys.flatten(1, 2)), own_values.mT.contiguous(), rows(blocks.centers),
        panels(blocks.means), rows(roots.centers), panels(roots.means),
    ]  # fmt: skip


def _zeros(q: Tensor, given: list[Tensor], e: int) -> list[Tensor]:
    """Return the sums of gradients, (b, p, ...): of keys and values, and for units of squared radii."""
    sums = []
    for i, keys in enumerate(given[::2]):
        b, count, row = keys.shape
        sums += [q.new_zeros(b, PARTS, count, row), q.new_zeros(b, PARTS, count, e)]
        if i >= 3:  # units
            sums.append(q.new_zeros(b, PARTS, count))
    return sums


def _to_keys(
    method: Multipole, memory: Memory, blocks: Blocks, roots: Roots, totals: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of all keys (b, m, d) and values (b, m, e), in their own order."""
    sink_k, sink_v, raw_k, raw_v, own_k, own_v, center, mean, square, root, root_mean, root_square = totals
    d, sinks, count = blocks.keys.shape[-1], method.sinks, memory.segments
    keys = blocks.keys.flatten(1, 2)  # (b, u t, d)
    own_k = own_k[..., :d]
    for size, units, own_center, own_mean, own_square in (
        (method.block, blocks.centers, center, mean, square),
        (method.segment, roots.centers[:, :count], root[:, :count], root_mean[:, :count], root_square[:, :count]),
    ):
        offsets = keys.unflatten(1, (-1, size)) - units[:, :, None] if count else keys[:, :, None]
        spread = 2 / (size * d) * own_square[..., None, None] * offsets
        own_k = own_k + (own_center[:, :, None, :d] / size + spread).flatten(1, 2)
        own_v = own_v + (own_mean / size).repeat_interleave(size, 1)
    if memory.order is not None:
        start = torch.arange(count)[:, None] * method.segment
        token = (memory.order.long() + start).flatten(1)[..., None]
        raw_k = raw_k[..., :d].scatter_add(1, token.expand(-1, -1, d), own_k)
        raw_v = raw_v.scatter_add(1, token.expand(-1, -1, raw_v.shape[-1]), own_v)
    length = memory.length
    k = torch.cat([sink_k[:, :sinks, :d], raw_k[..., :d]], 1)[:, :length]
    v = torch.cat([sink_v[:, :sinks], raw_v], 1)[:, :length]
    return k, v
