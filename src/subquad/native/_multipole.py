"""Multipole by the native kernels: which calls they serve, and the call itself."""

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from subquad.native import _library
from subquad.native._fused import transformed
from subquad.native._library import FOUND, WHOLE

LEVELS = 24  # sizes of groups that a call has room for: more than there can be keys for


def padded(count: int) -> int:
    """Room for so many units: whole vectors, and one more that may be read beyond them."""
    return (count + WHOLE - 1) // WHOLE * WHOLE + WHOLE


class Level(Structure):
    """SubquadLevel of call.h."""

    _fields_ = [
        *((name, c_int64) for name in ("size", "rank", "count", "stride")),
        *((name, c_void_p) for name in ("keys", "spread", "values")),
    ]


NUMBERS = (
    "wide", "threads", "batch", "group", "queries", "keys", "width", "values", "block", "sinks", "top", "opened",
    "grouped_from", "least_group", "groups_count", "k_batch", "v_batch",
)  # fmt: skip


class Call(Structure):
    """SubquadMultipole of call.h."""

    _fields_ = [
        *((name, c_int64) for name in NUMBERS),
        *((name, c_void_p) for name in ("q", "k", "v", "sees", "far")),
        ("blocks", Level), ("groups", Level * LEVELS),
        ("output", c_void_p),
    ]  # fmt: skip


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        _library.AVAILABLE
        and FOUND.library is not None
        and FOUND.library.multipole_size == ctypes.sizeof(Call)
        and all(x.device.type == "cpu" and x.dtype == q.dtype for x in (q, k, v))
        and q.dtype in (torch.float32, torch.float64)
        and q.numel() > 0
        and k.numel() > 0
        and v.shape[-1] % WHOLE == 0
        and not torch.compiler.is_compiling()
        and not transformed(q, k, v)
    )


def meet(
    method: Any, q: Tensor, k: Tensor, v: Tensor, levels: Sequence[Any], sees: Tensor, far: Tensor,
    grouping: tuple[int, int, int],
) -> Tensor:  # fmt: skip
    """As _multipole.meet. Heads of k and v may lie apart; their rows are contiguous."""
    b, g, n, d = q.shape
    m, e = v.shape[1:]
    q, sees, far = q.contiguous(), sees.contiguous(), far.contiguous()
    k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (k, v))
    output = q.new_empty(b, g, n, e)
    grouped, least, opened = grouping
    top = min(method.top, max(0, m - method.sinks) // method.block)

    def level(units: Any) -> Level:
        assert all(x.is_contiguous() for x in units[1:])
        count = max(0, m - method.sinks) // (units.size * method.block)
        return Level(units.size, units.rank, count, units.room, *(x.data_ptr() for x in units[1:]))

    call = Call(
        wide=q.dtype == torch.float64, threads=torch.get_num_threads(), batch=b, group=g, queries=n, keys=m, width=d,
        values=e, block=method.block, sinks=method.sinks, top=top, opened=opened, grouped_from=grouped,
        least_group=least, groups_count=len(levels) - 1, k_batch=k.stride(0), v_batch=v.stride(0), q=q.data_ptr(),
        k=k.data_ptr(), v=v.data_ptr(), sees=sees.data_ptr(), far=far.data_ptr(), blocks=level(levels[0]),
        groups=(Level * LEVELS)(*map(level, levels[1:])), output=output.data_ptr(),
    )  # fmt: skip
    library = FOUND.library
    assert library is not None
    if library.multipole(ctypes.byref(call)):
        raise MemoryError("subquad: not enough memory for the buffers of the native kernels")
    return output
