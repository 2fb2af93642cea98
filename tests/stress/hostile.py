"""Hostile files: valid beginnings with impossible sizes, code instead of data, nesting without end, no files at all.

What a file would execute is the creation of a canary: a file of this name in the current folder.
"""

import io
import json
import os
import pickle
import random
import socket
import struct
import wave
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

CANARY = "canary"
HUGE = 1 << 62


class Runs:
    """A pickle of it runs a command when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {CANARY}",)


def _npz(rng: random.Random, **arrays: object) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=True, **arrays)
    return buffer.getvalue()


def _header(shape: str, dtype: str = "<f8") -> bytes:
    """Return an npy file that has only a header."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _zipped(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def _wav(rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(rng.randbytes(400))
    return buffer.getvalue()


def _patched(content: bytes, place: int, kind: str, value: int) -> bytes:
    return content[:place] + struct.pack(kind, value) + content[place + struct.calcsize(kind) :]


def _tensors(header: object, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _one(dtype: str = "F32", shape: object = (2, 2), offsets: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _gguf(rng: random.Random) -> bytes:
    counts = rng.choice([(1, 0), (HUGE, 1), (0, HUGE), (3, 3)])
    return b"GGUF" + struct.pack("<IQQ", rng.choice((0, 2, 3, 99)), *counts) + rng.randbytes(rng.choice((0, 40, 400)))


def _png(rng: random.Random) -> bytes:
    size = struct.pack(">II", *rng.choice([(0, 0), (1 << 30, 1 << 30), (60_000, 60_000), (3, 3)]))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + size + b"\x08\x02\x00\x00\x00" + rng.randbytes(40)


def _laughs() -> bytes:
    """Return a short YAML file whose value has 3^24 entries."""
    letters = "abcdefghijklmnopqrstuvwxy"
    lines = (f"{new}: &{new} [*{old}, *{old}, *{old}]" for old, new in pairwise(letters))
    return "\n".join(["a: &a [x]", *lines]).encode()


Make = Callable[[random.Random], bytes]
FORMATS: dict[str, list[Make]] = {
    "any": [
        lambda rng: b"",
        lambda rng: rng.randbytes(rng.choice((1, 7, 100, 5000))),
        lambda rng: bytes(rng.choice((1, 100, 100_000))),
        lambda rng: b"the list \x00\xff\xfe of\n" * rng.choice((1, 500)),
        lambda rng: "\ud7ff\u202e\x1b[31m word".encode() * rng.choice((1, 99)),
        lambda rng: b"a" * 2_000_000,
        lambda rng: pickle.dumps(Runs()),
        lambda rng: b"\xef\xbb\xbf" + rng.choice((b"{}", b"a: 1", b"x")),
        lambda rng: b"cos\nsystem\n(S'touch " + CANARY.encode() + b"'\ntR.",
    ],
    "json": [
        lambda rng: b"[" * rng.choice((10, 100_000)),
        lambda rng: rng.choice((b"null", b"[]", b"{}", b"1e999", b'"x"', b"NaN", b'{"a": 1, "a": 2}')),
        lambda rng: json.dumps({rng.choice(("claims", "step", "valid", "")): rng.choice((None, [], 1e308))}).encode(),
        lambda rng: json.dumps([{"number": "x", "title": "<script>", "ok": 3}]).encode(),
        lambda rng: b'{"x": ' + b"9" * 5000 + b"}",
    ],
    "yaml": [
        lambda rng: b'!!python/object/apply:os.system ["touch ' + CANARY.encode() + b'"]',
        lambda rng: b"lr: !!python/object/new:os.system [touch " + CANARY.encode() + b"]",
        lambda rng: _laughs(),
        lambda rng: b"[" * 5000,
        lambda rng: b"? [a]\n: b\n",
        lambda rng: b"lr: .nan\nsteps: 1e400\n",
        lambda rng: b"steps: 1\nsteps: 2\n",
        lambda rng: b"&a : *a",
        lambda rng: b"lr: 2026-13-45\nsteps: 0o99\n",
    ],
    "npz": [
        lambda rng: _npz(rng, **{name: np.array([Runs()], dtype=object) for name in NPZ_NAMES}),
        lambda rng: _zipped("train_images.npy", _header(f"({HUGE},)")),
        lambda rng: _zipped("features.npy", _header(f"({HUGE}, {HUGE})")),
        lambda rng: _zipped("train_images.npy", _header("(-1, 5)")),
        lambda rng: _zipped("../../" + CANARY, b"x"),
        lambda rng: _zipped("train_images.npy", _header("(2, 12, 12)", "O") + pickle.dumps([Runs()])),
        lambda rng: _zipped("features.npy", bytes(50_000_000)),
        lambda rng: _npz(rng, **{name: np.full((3, 2), rng.choice((np.nan, np.inf, -1.0))) for name in NPZ_NAMES}),
        lambda rng: _npz(rng, **{name: np.zeros((0, 12, 12), np.uint8) for name in NPZ_NAMES}),
        lambda rng: _npz(rng, a=np.zeros(3))[: rng.randint(1, 150)],
    ],
    "wav": [
        lambda rng: _patched(_wav(rng), 4, "<I", rng.choice((0, 0xFFFFFFFF))),
        lambda rng: _patched(_wav(rng), 22, "<H", rng.choice((0, 65535))),
        lambda rng: _patched(_wav(rng), 24, "<I", rng.choice((0, 1, 0xFFFFFFFF))),
        lambda rng: _patched(_wav(rng), 34, "<H", rng.choice((0, 1, 65535))),
        lambda rng: _patched(_wav(rng), 40, "<I", rng.choice((0, 0xFFFFFFFF))),
        lambda rng: _wav(rng)[: rng.randint(0, 60)],
        lambda rng: b"RIFF" + rng.randbytes(40),
        lambda rng: b"fLaC" + rng.randbytes(80),
        lambda rng: b"OggS" + rng.randbytes(80),
    ],
    "safetensors": [
        lambda rng: struct.pack("<Q", rng.choice((0, HUGE, 2**64 - 1))) + b"{}",
        lambda rng: _tensors({name: _one(shape=[HUGE, HUGE]) for name in ("query", "key", "value")}),
        lambda rng: _tensors({name: _one(shape=[-1]) for name in ("query", "key", "value")}),
        lambda rng: _tensors({name: _one(offsets=[0, HUGE]) for name in ("query", "key", "value")}),
        lambda rng: _tensors({"query": _one(dtype="X99"), "key": _one(), "value": _one()}),
        lambda rng: _tensors({"query": _one(), "key": _one(offsets=[8, 24]), "value": _one(offsets=[16, 32])}),
        lambda rng: _tensors(b"{" * 10_000),
        lambda rng: _tensors({"query": None}),
        lambda rng: _tensors({"__metadata__": {"a": 1}}),
    ],
    "gguf": [_gguf],
    "png": [_png, lambda rng: b"GIF89a" + rng.randbytes(60), lambda rng: b"\xff\xd8\xff\xe0" + rng.randbytes(200)],
    "pickle": [
        lambda rng: pickle.dumps([Runs()]),
        lambda rng: pickle.dumps({1: [2]}, 2)[: rng.randint(1, 12)],
        lambda rng: b"\x80\x02]q\x00" + b"(h\x00" * 5000 + b"e.",
        lambda rng: b"\x80\x04\x95" + struct.pack("<Q", HUGE) + b"N.",
        lambda rng: b"(" * 100_000 + b".",
        lambda rng: pickle.dumps(np.zeros(3)),
        lambda rng: b"cbuiltins\neval\n(S'open(\"" + CANARY.encode() + b"\",\"w\")'\ntR.",
    ],
    "text": [
        lambda rng: b"\n" * 5000,
        lambda rng: ("x" * rng.randint(1, 9) + " ").encode() * 3000,
        lambda rng: b"id|text\n|" + b"|" * 500,
        lambda rng: b"../../../" + CANARY.encode() + b"|hello\n",
        lambda rng: b"a|" + b"hello " * 5000,
        lambda rng: b"a\x00b|hello\n",
    ],
}  # fmt: skip
NPZ_NAMES = [f"{part}_{what}" for part in ("train", "val", "test") for what in ("images", "labels")]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    """Bind by a short name: the path of a socket has at most 107 characters."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


PLACES: dict[str, Callable[[Path], object]] = {
    "fifo": _fifo,
    "folder": Path.mkdir,
    "socket": _socket,
    "broken link": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: None,
}


def write_hostile(rng: random.Random, path: Path, formats: tuple[str, ...]) -> str:
    """Write a hostile file, or put something else in its place; return what it is."""
    if rng.random() < 0.15:
        kind = rng.choice(list(PLACES))
        PLACES[kind](path)
        return kind
    name = rng.choice(formats) if rng.random() < 0.75 else "any"
    number = rng.randrange(len(FORMATS[name]))
    path.write_bytes(FORMATS[name][number](rng))
    return f"{name} {number}"
