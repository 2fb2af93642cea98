"""Safe reading of Python 2 pickles that hold arrays, sparse matrices and dictionaries.

A pickle is a program for a machine with a stack and a memo (what was stored under a number, to be used again). Here a
small interpreter runs it. It knows only the instructions that these files need, and only six names; each name is an
inert class that stores its arguments. Everything else raises an error.

    size(x) = 1 + sum of size(part)      depth(x) = 1 + max of depth(part)      parts that are used twice count twice

Both are limited, so a short pickle cannot describe a value that is huge or deep. A value that is part of another one
cannot change any more: no value contains itself.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from subquad_lab import UsageError

MAX_OPERATIONS = 2_000_000  # several times as many as the largest of these files needs
MAX_SIZE = MAX_OPERATIONS
MAX_DEPTH = 16
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
        if not isinstance(self.code, str) or self.code not in KINDS or self.order not in ("<", ">", "|", "="):
            raise ValueError(f"unsupported array type {shown(self.code)}")
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


@dataclass(slots=True)
class _Value:
    """A value on the stack or in the memo. `is_part` is set once it belongs to another one."""

    value: Any
    size: int = 1
    depth: int = 1
    is_part: bool = False


class _Machine:
    """The stack and the memo, and one method for each kind of instruction."""

    def __init__(self) -> None:
        self.stack: list[_Value | None] = []  # None is a mark.
        self.memo: dict[int, _Value] = {}

    def pop(self) -> _Value:
        top = self.stack.pop() if self.stack else None
        if top is None:
            raise ValueError("a value is missing")
        return top

    def top(self) -> _Value:
        self.stack.append(found := self.pop())
        return found

    def since_mark(self) -> list[_Value]:
        """Take all values after the last mark."""
        taken: list[_Value] = []
        while self.stack:
            value = self.stack.pop()
            if value is None:
                return taken[::-1]
            taken.append(value)
        raise ValueError("a mark is missing")

    def push(self, value: Any, parts: list[_Value] | None = None) -> None:
        self.stack.append(self.contain(_Value(value), parts or []))

    def contain(self, whole: _Value, parts: list[_Value]) -> _Value:
        """Count parts in what they become a part of."""
        for part in parts:
            part.is_part = True
        if whole.is_part:  # also if it is one of the parts
            raise ValueError("a value changes after it became a part of another one")
        whole.size += sum(part.size for part in parts)
        whole.depth = max([whole.depth, *(part.depth + 1 for part in parts)])
        if whole.size > MAX_SIZE or whole.depth > MAX_DEPTH:
            raise ValueError(f"expected at most {MAX_SIZE:,} values in {MAX_DEPTH} levels")
        return whole

    def extend(self, parts: list[_Value]) -> None:
        """Append parts to the list on the stack."""
        whole = self.contain(self.top(), parts)
        if type(whole.value) is not list:
            raise ValueError("expected a list to append to")
        whole.value += [part.value for part in parts]

    def update(self, parts: list[_Value]) -> None:
        """Put keys and values into the dictionary on the stack."""
        whole, keys = self.contain(self.top(), parts), [part.value for part in parts[::2]]
        if not isinstance(whole.value, dict) or len(parts) % 2 or not all(type(key) in (int, str) for key in keys):
            raise ValueError("expected integers or texts as keys, each with a value")
        whole.value.update(zip(keys, (part.value for part in parts[1::2]), strict=True))

    def make(self) -> None:
        """Make an instance of one of the inert classes from a tuple of arguments."""
        arguments, kind = self.pop(), self.pop()
        if kind.value not in STAND_INS.values() or type(arguments.value) is not tuple:
            raise ValueError("expected one of the known names and its arguments")
        self.push(kind.value(*arguments.value), [arguments])

    def build(self) -> None:
        """Set the state of an instance."""
        state = self.pop()
        whole = self.contain(self.top(), [state])
        if not isinstance(whole.value, _Kind | PickledArray | PickledMatrix):
            raise ValueError("expected an array, a type or a matrix, which have a state")
        whole.value.__setstate__(state.value)

    def named(self, argument: str) -> None:
        """Push one of the inert classes."""
        module, _, name = argument.partition(" ")
        if (module, name) not in STAND_INS:
            raise ValueError(f"{shown(f'{module}.{name}')} is not allowed")
        self.push(STAND_INS[module, name])

    def number(self, value: int) -> None:
        if not -(2**63) <= value < 2**63:
            raise ValueError("expected integers of at most 64 bits")
        self.push(value)

    def tuple(self, count: int) -> None:
        parts = [self.pop() for _ in range(count)][::-1]
        self.push(tuple(part.value for part in parts), parts)

    def tuple_since_mark(self) -> None:
        parts = self.since_mark()
        self.push(tuple(part.value for part in parts), parts)

    def store(self, number: int) -> None:
        self.memo[number] = self.top()

    def recall(self, number: int) -> None:
        if number not in self.memo:
            raise ValueError(f"nothing was stored under {number}")
        self.stack.append(self.memo[number])


Instruction = Callable[[_Machine, Any], None]
TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE")
INSTRUCTIONS: dict[str, Instruction] = {
    "PROTO": lambda machine, _: None,
    "MARK": lambda machine, _: machine.stack.append(None),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("FLOAT", "BINFLOAT", *TEXTS), lambda machine, value: machine.push(value)),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"), _Machine.number),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "LIST": lambda machine, _: _filled(machine, [], _Machine.extend),
    "DICT": lambda machine, _: _filled(machine, {}, _Machine.update),
    "TUPLE": lambda machine, _: machine.tuple_since_mark(),
    "TUPLE1": lambda machine, _: machine.tuple(1),
    "TUPLE2": lambda machine, _: machine.tuple(2),
    "TUPLE3": lambda machine, _: machine.tuple(3),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.update([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.update(machine.since_mark()),
    "GLOBAL": _Machine.named,
    "REDUCE": lambda machine, _: machine.make(),
    "NEWOBJ": lambda machine, _: machine.make(),
    "BUILD": lambda machine, _: machine.build(),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.store),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
}


def _filled(machine: _Machine, empty: Any, fill: Callable[[_Machine, list[_Value]], None]) -> None:
    parts = machine.since_mark()
    machine.push(empty)
    fill(machine, parts)


def unpickle(content: bytes, path: Path) -> Any:
    """Return the data of a pickle without executing anything."""
    machine = _Machine()
    try:
        for count, (code, argument, _) in enumerate(pickletools.genops(content)):
            if code.name == "STOP":
                break
            if count == MAX_OPERATIONS:
                raise ValueError(f"expected at most {MAX_OPERATIONS:,} instructions")
            if code.name not in INSTRUCTIONS:
                raise ValueError(f"the instruction {code.name} is not allowed")
            INSTRUCTIONS[code.name](machine, argument)
        found = machine.pop().value
        if machine.stack:
            raise ValueError(f"expected one value, got {len(machine.stack) + 1:,}")
        return found
    except Exception as error:  # For a malformed pickle, pickletools can raise anything.
        raise UsageError(f"--data: {path}: not a Planetoid pickle: {str(error) or type(error).__name__}") from error


def named(found: Any) -> str:
    """Return the type of a value, for error messages."""
    return type(found).__name__.removeprefix("Pickled").lower()


def shown(found: Any) -> str:
    """Return a text in quotes, shortened, or the type of any other value, which may be large."""
    return repr(found[:80]) if isinstance(found, str) else f"of type {named(found)}"
