"""The compiled kernels as a plain C library: found, opened and checked.

ctypes is the only link between them and torch, so one binary serves every version of it.
"""

import ctypes
import os
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from subquad.native.calls import INTERFACE


class Library(NamedTuple):
    """The functions of call.h, each of which takes the address of its call."""

    forward: Callable[[Any], int]
    backward: Callable[[Any], int]
    step: Callable[[Any], int]
    multipole: Callable[[Any], int]
    multipole_step: Callable[[Any], int]
    multipole_backward: Callable[[Any], int]
    segments: Callable[[Any], int]
    sparse: Callable[[Any], int]
    sparse_backward: Callable[[Any], int]
    instructions: str


class Found(NamedTuple):
    library: Library | None
    reason: str  # why the library is, or is not, used


def find() -> Found:
    """Look for the compiled kernels, as the environment variable SUBQUAD_NATIVE asks."""
    wanted = os.environ.get("SUBQUAD_NATIVE", "")
    if wanted == "0":
        return Found(None, "turned off by SUBQUAD_NATIVE=0")
    files = [Path(wanted)] if wanted not in ("", "1") else sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not files:
        return Found(None, "not compiled: no C++ compiler was found when subquad was installed")
    try:
        return Found(open_library(files[0]), files[0].name)
    except (OSError, AttributeError, RuntimeError) as error:
        return Found(None, f"{files[0].name} cannot be used: {error}")


def open_library(file: Path) -> Library:
    """Load the library, and check that it agrees with `calls.py` on every constant and structure."""
    library = ctypes.CDLL(str(file))
    library.subquad_interface.restype = library.subquad_instructions.restype = c_char_p
    if library.subquad_interface().decode() != INTERFACE:
        raise RuntimeError("built from a different version of the sources; reinstall subquad")
    functions = (
        library.subquad_forward,
        library.subquad_backward,
        library.subquad_step,
        library.subquad_multipole,
        library.subquad_multipole_step,
        library.subquad_multipole_backward,
        library.subquad_segments,
        library.subquad_sparse,
        library.subquad_sparse_backward,
    )
    for function in functions:
        function.argtypes, function.restype = [c_void_p], c_int
    library.subquad_use_team.argtypes, library.subquad_use_team.restype = [c_void_p], None
    library.subquad_use_team(torch_team())
    return Library(*functions, library.subquad_instructions().decode())


def torch_team() -> int | None:
    """Return the address of the function that starts torch's OpenMP threads, if torch was built with GNU's OpenMP."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (OSError, AttributeError, TypeError):
        return None


FOUND = find()  # on import, so that torch.compile sees a constant


def kernels() -> Library:
    """Return the compiled kernels for a call that they serve.

    Raises:
        RuntimeError: There are none here: the call comes from a program that was recorded where there were.
    """
    if FOUND.library is None:
        raise RuntimeError(
            "subquad: this program was recorded with the native kernels, which are not available here: "
            f"{FOUND.reason}; record it on this machine, or reinstall subquad with a C++ compiler"
        )
    return FOUND.library
