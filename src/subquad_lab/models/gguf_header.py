"""The header of a GGUF file, checked before another library parses it.

    "GGUF"  version  tensors: n  values: m  |  m times key, type, value  |  n times name, sizes, type, offset  |  data

Counts and lengths are 64 bits wide, and a parser that believes them can loop or allocate without end. Here every one
is compared with what is left of the file, and every tensor with its place in the data.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from subquad_lab.system.regular_file import open_regular

VERSIONS = (2, 3)
UINT32, STRING, ARRAY = 4, 8, 9
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Elements and bytes of a block, by the number of the type.
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
MAX_SIZES = 4  # dimensions of a tensor
MAX_NAME_BYTES = 1 << 16
DEFAULT_ALIGNMENT = 32


@dataclass
class _Cursor:
    """A place in the file; it cannot move beyond the end."""

    content: mmap.mmap
    at: int = 0

    def skip(self, count: int) -> int:
        """Move on by `count` bytes and return where they begin."""
        if count > len(self.content) - self.at:
            raise ValueError(f"expected {count:,} bytes at byte {self.at:,}, got {len(self.content) - self.at:,}")
        self.at += count
        return self.at - count

    def number(self, kind: str) -> int:
        """Read an unsigned integer, "I" or "Q"."""
        (found,) = struct.unpack_from(f"<{kind}", self.content, self.skip(struct.calcsize(kind)))
        return int(found)

    def text(self, max_bytes: int = MAX_NAME_BYTES) -> str:
        """Read a length and a text of UTF-8."""
        length = self.number("Q")
        if length > max_bytes:
            raise ValueError(f"expected a name of at most {max_bytes:,} bytes at byte {self.at:,}, got {length:,}")
        begin = self.skip(length)
        return self.content[begin : begin + length].decode()


def check_gguf(path: Path) -> int:
    """Return the number of tensors; raise ValueError if the header does not fit the file, or OSError."""
    with open_regular(path) as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _walk(_Cursor(content, 4))


def _walk(cursor: _Cursor) -> int:
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ValueError(f"expected version {' or '.join(map(str, VERSIONS))}, got {version}")
    tensors, values = cursor.number("Q"), cursor.number("Q")
    left = len(cursor.content)
    if 12 * values + 24 * tensors > left:  # the fewest bytes that a value and a tensor take
        raise ValueError(f"{tensors:,} tensors and {values:,} values do not fit into {left:,} bytes")
    alignment, keys = DEFAULT_ALIGNMENT, set()
    for _ in range(values):
        key, kind = cursor.text(), cursor.number("I")
        if not key or key in keys:
            raise ValueError(f"duplicate key {key[:80]!r}" if key else "a key is empty")
        keys.add(key)
        if key == "general.alignment" and kind == UINT32:
            alignment = cursor.number("I")
        else:
            _skip_value(cursor, kind)
    if not 1 <= alignment <= 1 << 16:
        raise ValueError(f"expected an alignment of 1 to 65,536, got {alignment}")
    places = sorted(_tensor(cursor) for _ in range(tensors))
    begin = -(-cursor.at // alignment) * alignment
    before = 0
    for offset, size, name in places:
        if offset < before or begin + offset + size > len(cursor.content):
            raise ValueError(f"tensor {name[:80]!r}: its {size:,} bytes at {offset:,} are outside the data or overlap")
        before = offset + size
    return tensors


def _skip_value(cursor: _Cursor, kind: int) -> None:
    if kind in SCALAR_BYTES:
        cursor.skip(SCALAR_BYTES[kind])
    elif kind == STRING:
        cursor.text(len(cursor.content))
    elif kind == ARRAY:
        of, count = cursor.number("I"), cursor.number("Q")
        if of == STRING:
            if 8 * count > len(cursor.content):
                raise ValueError(f"{count:,} texts do not fit into {len(cursor.content):,} bytes")
            for _ in range(count):
                cursor.skip(cursor.number("Q"))
        elif of in SCALAR_BYTES:
            cursor.skip(count * SCALAR_BYTES[of])
        else:
            raise ValueError(f"expected a list of numbers or texts, got type {of}")
    else:
        raise ValueError(f"expected a type from 0 to 12 at byte {cursor.at:,}, got {kind}")


def _tensor(cursor: _Cursor) -> tuple[int, int, str]:
    """Read where a tensor is: its offset, size in bytes and name."""
    name, dimensions = cursor.text(), cursor.number("I")
    if not 0 <= dimensions <= MAX_SIZES:
        raise ValueError(f"tensor {name[:80]!r}: expected at most {MAX_SIZES} sizes, got {dimensions}")
    sizes = [cursor.number("Q") for _ in range(dimensions)]
    kind, offset = cursor.number("I"), cursor.number("Q")
    if kind not in BLOCKS:
        raise ValueError(f"tensor {name[:80]!r}: type {kind} is not known")
    elements, size = BLOCKS[kind]
    if prod(sizes) % elements:
        raise ValueError(f"tensor {name[:80]!r}: expected a multiple of {elements} elements, got {sizes}")
    return offset, prod(sizes) // elements * size, name
