"""Safe reading of Python 2 pickles that hold arrays, sparse matrices and dictionaries.

A pickle is a program that names the functions to call. Here only the few names that these files need are allowed, and
each is replaced by an inert class that stores its arguments. All other names raise an error.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from subquad_lab import UsageError

KINDS = ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "b1")  # allowed array types


class _Kind:
    """Replacement for numpy.dtype: a code such as f4, and the byte order."""

    code: Any = None
    order: Any = "="

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype:
        if self.code not in KINDS or self.order not in ("<", ">", "|", "="):
            raise ValueError(f"unsupported array type {self.code!r}")
        made: np.dtype = np.dtype(self.order + self.code)
        return made


class PickledArray:
    """Replacement for numpy.ndarray and its constructor."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def values(self) -> np.ndarray:
        """Return the array; raise if its parts are inconsistent."""
        _, shape, kind, is_fortran, content = self.state
        if not isinstance(kind, _Kind) or not isinstance(content, str):
            raise ValueError("expected an array of numbers")
        flat = np.frombuffer(content.encode("latin1"), kind.dtype())
        return flat.reshape(shape, order="F" if is_fortran else "C")


class PickledMatrix:
    """Replacement for scipy's sparse matrix."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _List:
    """Replacement for the default type of a defaultdict."""


class _Dictionary(dict[Any, Any]):
    """Replacement for collections.defaultdict."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


STAND_INS: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,
    ("numpy", "ndarray"): PickledArray,
    ("numpy", "dtype"): _Kind,
    ("scipy.sparse.csr", "csr_matrix"): PickledMatrix,
    ("collections", "defaultdict"): _Dictionary,
    ("__builtin__", "list"): _List,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise pickle.UnpicklingError(f"{f'{module}.{name}'!r} is not allowed")
        kind = STAND_INS[module, name]
        return type(kind.__name__, (kind,), {})  # A fresh subclass, because a pickle can set attributes of a class.


def unpickle(content: bytes, path: Path) -> Any:
    """Return the data of a pickle without executing anything."""
    try:
        for code, value, _ in pickletools.genops(content):
            if code.name in ("PUT", "LONG_BINPUT") and int(value or 0) > len(content):  # would exhaust memory
                raise pickle.UnpicklingError(f"memo index {value} is too large")
        return _Reader(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # A malformed pickle can raise anything.
        raise UsageError(f"--data: {path}: not a Planetoid pickle: {error or type(error).__name__}") from error


def named(found: Any) -> str:
    """Return the type of a value, for error messages."""
    return type(found).__name__.removeprefix("Pickled").lower()
