"""Pickles of Python 2 that hold arrays, sparse matrices and dictionaries, read as data.

A pickle is a program: it names what it wants to call. Here it can name the few things that such files need, and gets
stand-ins of our own in their place, which keep what they are given and do nothing. All else is refused.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from subquad_lab import UsageError

KINDS = ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "b1")  # of numbers in an array


class _Kind:
    """Stands in for numpy.dtype: a code such as f4, and the order of its bytes."""

    code: Any = None
    order: Any = "="

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype:
        if self.code not in KINDS or self.order not in ("<", ">", "|", "="):
            raise ValueError(f"numbers of the kind {self.code!r}")
        made: np.dtype = np.dtype(self.order + self.code)
        return made


class PickledArray:
    """Stands in for numpy.ndarray, and for what makes one."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def values(self) -> np.ndarray:
        """The array, if its parts fit together; ValueError and the like if not."""
        _, shape, kind, is_fortran, content = self.state
        if not isinstance(kind, _Kind) or not isinstance(content, str):
            raise ValueError("an array of something else than numbers")
        flat = np.frombuffer(content.encode("latin1"), kind.dtype())
        return flat.reshape(shape, order="F" if is_fortran else "C")


class PickledMatrix:
    """Stands in for scipy's sparse matrix."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _List:
    """Stands in for the type that a defaultdict makes its values of."""


class _Dictionary(dict[Any, Any]):
    """Stands in for collections.defaultdict."""

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
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!r}, which no graph needs: refused")
        kind = STAND_INS[module, name]
        return type(kind.__name__, (kind,), {})  # A pickle can set attributes of what it named: of this one alone.


def unpickle(content: bytes, path: Path) -> Any:
    """The data of a pickle; nothing in it is executed."""
    try:
        for code, value, _ in pickletools.genops(content):
            if code.name in ("PUT", "LONG_BINPUT") and int(value or 0) > len(content):  # It would fill the memory.
                raise pickle.UnpicklingError(f"it numbers its parts up to {value}")
        return _Reader(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # A pickle can fail in any way that Python knows.
        raise UsageError(f"--data: {path}: is no pickle of a graph: {error or type(error).__name__}") from error


def named(found: Any) -> str:
    """What was found, in a word for an error."""
    return type(found).__name__.removeprefix("Pickled").lower()
