"""The structures of call.h, field by field.

Everything that both languages must agree on is written down here once more, as `INTERFACE`, and compared with the
library's own description when it is loaded.
"""

import ctypes
from ctypes import Structure, c_double, c_int64, c_void_p
from struct import Struct

import torch
from torch import Tensor

PADDING = 16  # numbers in a row of whole vectors, whatever the instruction set
PAIR_BLOCK = 64  # tokens of a block of pairs
FAN = 16  # blocks of a segment of Multipole
ROUNDS = 2  # power iterations for the main direction of its keys
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # SubquadType
# SubquadMap
MAPS = {
    name: i
    for i, name in enumerate(("taylor", "positive", "hyperbolic", "elu", "relu", "identity", "logged", "separable"))
}
# Results other than 0: the second if an output is not finite, the third if a segment has to be finished first.
NO_MEMORY, POISONED, SEGMENT_DUE = 1, 2, 3


class Strided(Structure):
    """SubquadTensor."""

    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("type", "batch", "group", "token", "element"))]


class FeatureCall(Structure):
    """SubquadCall."""

    _fields_ = [
        *((name, c_int64) for name in (
            "map", "degree", "wide", "threads", "causal", "normalized", "chunk", "pairs", "parts", "shared", "batch",
            "group", "queries", "keys", "query_width", "key_width", "values", "features", "heads", "tilted",
        )),
        ("query_scale", c_double), ("key_scale", c_double),
        *((name, Strided) for name in ("q", "k", "v")),
        *((name, c_void_p) for name in (
            "keep", "table", "turned", "before", "before_poison", "before_scale", "coordinates", "after",
            "after_poison", "after_scale", "output", "normalizer", "poison",
        )),
        ("output_grad", Strided),
        *((name, c_void_p) for name in ("q_grad", "k_grad", "v_grad", "after_grad", "before_grad")),
    ]  # fmt: skip


# The same structure, packed from plain numbers: several times faster than setting the fields one by one.
FEATURE_CALL = Struct("20q 2d 18q 13q 11q")


class SegmentsCall(Structure):
    """SubquadSegments."""

    _fields_ = [
        *((name, c_int64) for name in (
            "wide", "threads", "batch", "width", "values", "block", "raw_panels", "root_count", "segments",
        )),
        *((name, c_void_p) for name in ("raw_keys", "raw_values", "base", "first", "last", "table", "roots", "order")),
    ]  # fmt: skip


class MultipoleCall(Structure):
    """SubquadMultipole."""

    _fields_ = [
        *((name, c_int64) for name in (
            "wide", "threads", "batch", "group", "queries", "width", "values", "block", "sinks", "window", "top",
            "looks", "opened", "grouped_from", "raw_panels", "root_count", "query_batch", "query_group", "query_token",
            "output_batch", "output_group", "output_token",
        )),
        ("scale", c_double), ("widest", c_double),
        *((name, c_void_p) for name in (
            "q", "sink_keys", "sink_values", "raw_keys", "raw_values", "base", "sees", "table", "roots", "output",
            "level", "chosen", "opened_segments", "key", "value", "keep", "filled",
        )),
    ]  # fmt: skip


class MultipoleGradient(Structure):
    """SubquadMultipoleGradient."""

    _fields_ = [
        ("call", MultipoleCall), ("segments", c_int64), ("parts", c_int64),
        *((name, c_void_p) for name in (
            "output_grad", "sink_rows", "sink_value_panels", "raw_rows", "raw_value_panels", "block_rows",
            "block_value_panels", "centers", "mean_panels", "root_centers", "root_mean_panels", "q_grad",
            "sink_key_grads", "sink_value_grads", "raw_key_grads", "raw_value_grads", "block_key_grads",
            "block_value_grads", "center_grads", "mean_grads", "square_grads", "root_center_grads",
            "root_mean_grads", "root_square_grads",
        )),
    ]  # fmt: skip


class SparseCall(Structure):
    """SubquadSparse."""

    _fields_ = [
        *((name, c_int64) for name in (
            "wide", "threads", "batch", "key_heads", "group", "queries", "keys", "width", "values", "keep_batch",
            "bounds_batch", "layout_heads", "query_blocks", "key_blocks", "query_block", "key_block",
        )),
        ("scale", c_double), ("softcap", c_double),
        *((name, Strided) for name in ("q", "k", "v")),
        *((name, c_void_p) for name in ("keep", "bounds", "layout", "sinks", "output", "level", "poison")),
        ("output_grad", Strided),
        *((name, c_void_p) for name in ("level_grad", "delta", "q_grad", "k_grad", "v_grad")),
    ]  # fmt: skip


INTERFACE = (
    f"types {' '.join(str(kind).removeprefix('torch.') for kind in TYPES)}; maps {' '.join(MAPS)}; "
    f"results ok no_memory poisoned segment_due; projections with constants; poison counts keys; padding {PADDING}; "
    f"pair block {PAIR_BLOCK}; fan {FAN}; rounds {ROUNDS}; call {ctypes.sizeof(FeatureCall)}; "
    f"multipole {ctypes.sizeof(MultipoleCall)}; "
    f"gradient {ctypes.sizeof(MultipoleGradient)}; segments {ctypes.sizeof(SegmentsCall)}; "
    f"sparse {ctypes.sizeof(SparseCall)}"
)
assert FEATURE_CALL.size == ctypes.sizeof(FeatureCall)


def padded(count: int) -> int:
    """Return `count` rounded up to whole vectors."""
    return -(-count // PADDING) * PADDING


def address(tensor: Tensor | None) -> int:
    """Return where a tensor begins; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def strided(tensor: Tensor) -> tuple[int, ...]:
    """Return the fields of a tensor (b, g, n, d) or (b, m, d) with any strides."""
    strides = tensor.stride()
    group = strides[1] if len(strides) == 4 else 0
    return tensor.data_ptr(), TYPES[tensor.dtype], strides[0], group, strides[-2], strides[-1]


def check_result(code: int) -> None:
    """Raise MemoryError if a kernel could not allocate its buffers."""
    if code == NO_MEMORY:
        raise MemoryError("subquad: not enough memory for the buffers of the native kernels")
