"""The compiled kernels, as a plain C library: found, opened, and called with pointers, sizes and strides.

There is no other link between them and torch, so one binary serves every version of it.
"""

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

WHOLE = 16  # numbers in a row of whole vectors, whatever the instruction set
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # SubquadType of call.h
TAYLOR, POSITIVE, HYPERBOLIC, ELU, RELU, IDENTITY, LOGGED, SEPARABLE = range(8)  # SubquadMap of call.h


class Strided(Structure):
    """SubquadTensor of call.h."""

    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("type", "batch", "group", "token", "element"))]


NUMBERS = (
    "map", "degree", "wide", "threads", "causal", "normalized", "chunk", "batch", "group", "queries", "keys",
    "query_width", "key_width", "values", "features",
)  # fmt: skip
POINTERS = (
    "keep", "table", "turned", "before", "before_poison", "before_scale", "after", "after_poison", "after_scale",
    "output", "normalizer", "poison",
)  # fmt: skip


class Call(Structure):
    """SubquadCall of call.h."""

    _fields_ = [
        *((name, c_int64) for name in NUMBERS),
        ("query_scale", c_double), ("key_scale", c_double),
        *((name, Strided) for name in ("q", "k", "v")),
        *((name, c_void_p) for name in POINTERS),
        ("output_grad", Strided),
        *((name, c_void_p) for name in ("q_grad", "k_grad", "v_grad")),
    ]  # fmt: skip


def strided(tensor: Tensor) -> Strided:
    """(b, g, length, width), or without the g."""
    batch, *group, token, element = tensor.stride()
    return Strided(tensor.data_ptr(), TYPES[tensor.dtype], batch, group[0] if group else 0, token, element)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Library(NamedTuple):
    """The functions of call.h."""

    forward: Callable[[Any], int]
    backward: Callable[[Any], int]
    step: Callable[[Any], int]
    multipole: Callable[[Any], int]
    multipole_size: int  # of the call that it takes
    instructions: str


class Found(NamedTuple):
    library: Library | None
    reason: str  # why the library is, or is not, used


def find() -> Found:
    wanted = os.environ.get("SUBQUAD_NATIVE", "")
    if wanted == "0":
        return Found(None, "turned off by SUBQUAD_NATIVE=0")
    files = [Path(wanted)] if wanted not in ("", "1") else sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not files:
        return Found(None, "not compiled: no C++ compiler was found when subquad was installed")
    try:
        return Found(opened(files[0]), f"{files[0].name}")
    except (OSError, AttributeError, RuntimeError) as error:
        return Found(None, f"{files[0].name} cannot be used: {error}")


def opened(file: Path) -> Library:
    library = ctypes.CDLL(str(file))
    library.subquad_call_size.restype, library.subquad_instructions.restype = c_int64, c_char_p
    if library.subquad_call_size() != ctypes.sizeof(Call):
        raise RuntimeError("it was compiled from other sources than these; install subquad again")
    functions = [library.subquad_forward, library.subquad_backward, library.subquad_step]
    for function in functions:
        function.argtypes, function.restype = [POINTER(Call)], c_int
    library.subquad_multipole.argtypes, library.subquad_multipole.restype = [c_void_p], c_int
    library.subquad_use_team.argtypes, library.subquad_use_team.restype = [c_void_p], None
    library.subquad_use_team(team_of_torch())
    forward, backward, step = functions
    library.subquad_multipole_size.restype = c_int64
    size = library.subquad_multipole_size()
    return Library(forward, backward, step, library.subquad_multipole, size, library.subquad_instructions().decode())


def team_of_torch() -> int | None:
    """The function that starts a team of torch's OpenMP threads, where torch was built with GNU's and shows it."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (OSError, AttributeError, TypeError):
        return None


FOUND = find()  # At the import, so that torch.compile meets a constant.
AVAILABLE = FOUND.library is not None
