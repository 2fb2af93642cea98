"""Multipole in the native kernels: which calls they serve, and how they are called."""

import ctypes

import torch
from torch import Tensor

from subquad import native
from subquad._engines.multipole.memory import Memory
from subquad._torch_internals import is_transformed
from subquad.methods import multipole as settings
from subquad.methods.multipole import Multipole
from subquad.native.calls import MultipoleCall, check_result
from subquad.native.loader import kernels


def is_served(*tensors: Tensor) -> bool:
    """Return whether the kernels serve a call with these wide tensors, without gradients."""
    dtype = tensors[0].dtype
    return (
        native.available()
        and dtype in (torch.float32, torch.float64)
        and all(x.device.type == "cpu" and x.dtype == dtype for x in tensors)
        and all(x.shape[0] > 0 and x.shape[-1] > 0 for x in tensors)  # There may be no query, or no new key.
        and not torch.compiler.is_compiling()
        and not is_transformed(*tensors)
    )


def meet_natively(method: Multipole, q: Tensor, memory: Memory, sees: Tensor, scale: float = 1.0) -> Tensor:
    """Return (b, g, n, e), as `meet` does of queries times `scale`."""
    q = q if q.stride(-1) == 1 or q.shape[-1] == 1 else q.contiguous()
    sees, table = sees.contiguous(), memory.table()
    b, g, n, _ = q.shape
    if memory.length == 0 or n == 0:
        return q.new_zeros(b, g, n, memory.raw_values.shape[-1])
    # The heads of a token side by side, as the projection after attention reads them.
    output = q.new_empty(n, b, g, memory.raw_values.shape[-1]).permute(1, 2, 0, 3)
    call = native_call(method, q, memory, sees, table, output, scale)
    check_result(kernels().multipole(ctypes.byref(call)))
    return output


def top_of(method: Multipole, memory: Memory) -> int:
    """Return how many blocks a query can read at most."""
    return min(method.top, memory.segments * settings.BLOCKS_PER_SEGMENT)


def native_call(
    method: Multipole, q: Tensor, memory: Memory, sees: Tensor, table: Tensor, output: Tensor, scale: float = 1.0
) -> MultipoleCall:
    """Return the arguments of a kernel: queries (b, g, n, d) that see `sees` (b, n) keys, and where the output goes."""
    b, g, n, d = q.shape
    assert (q.stride(-1) == 1 or d == 1) and output.stride(-1) == 1
    top, looks = top_of(method, memory), min(method.looks, memory.segments * settings.BLOCKS_PER_SEGMENT)
    return MultipoleCall(
        q.dtype == torch.float64, torch.get_num_threads(), b, g, n, d, output.shape[-1], method.block, method.sinks,
        method.window, top, looks, settings.OPENED_SEGMENTS, settings.GROUPED_FROM_SEGMENTS,
        memory.raw_keys.shape[1], memory.roots.shape[1], *q.stride()[:3], *output.stride()[:3],
        scale, settings.MAX_VARIANCE, q.data_ptr(),
        memory.sink_keys.data_ptr(), memory.sink_values.data_ptr(), memory.raw_keys.data_ptr(),
        memory.raw_values.data_ptr(), memory.base.data_ptr(), sees.data_ptr(), table.data_ptr(),
        memory.roots.data_ptr(), output.data_ptr(),
    )  # fmt: skip
