"""npz files that lie or explode: refused by one line that names the file, before memory is used."""

import io
import os
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from subquad_lab import UsageError
from subquad_lab.data import npz
from subquad_lab.data.npz import read_npz


def array(shape: object = (3,), descr: object = "<f8", content: bytes = bytes(24), version: int = 1) -> bytes:
    """A .npy file with a header of one's own choice."""
    head = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(head).to_bytes(2 if version == 1 else 4, "little") + head + content


def archive(path: Path, method: int = zipfile.ZIP_DEFLATED, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as made:
        for name, content in entries.items():
            made.writestr(f"{name}.npy", content)
    return path


def read(path: Path) -> np.ndarray:
    return read_npz(path, ["a"])["a"]


def test_what_numpy_writes_is_read(tmp_path):
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", a=np.arange(6.0).reshape(2, 3), b=np.zeros(0))
        assert read(tmp_path / "x.npz").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read(archive(tmp_path / "y.npz", a=array())).shape == (3,)


LIES = {
    "a shape that is too large": array((10**12,)),
    "a shape that overflows": array((2**62, 2**62)),
    "a negative shape": array((-3,)),
    "a shape that is too small": array((2,)),
    "a shape that is not one": array("abc"),
    "true for a size": array((True, 3)),
    "objects": array(descr="|O"),
    "objects in a field": array(descr=[("f", "|O")]),
    "a huge item": array((), descr="|V2000000000"),
    "a type that is not one": array(descr="hello"),
    "code for a header": b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').abort()".ljust(31) + b"\n",
    "a header that is too long": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{",
    "a header that is nested": b"\x93NUMPY\x02\x00\x10\x27\x00\x00" + b"[" * 10_000,
    "a version that is not known": array(version=9),
    "no header": b"",
    "no numbers": array(content=b""),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie, tmp_path):
    begin = time.monotonic()
    with pytest.raises(UsageError, match=r"x\.npz is not a valid \.npz file of numbers: .") as refused:
        read(archive(tmp_path / "x.npz", a=LIES[lie]))
    assert len(str(refused.value)) < 700 and time.monotonic() - begin < 1


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    file = archive(tmp_path / "x.npz", a=array((10**7,), "|u1", bytes(10**7)), b=array((10**7,), "|u1", bytes(10**7)))
    assert file.stat().st_size < 50_000
    monkeypatch.setattr(npz, "room", lambda: 15 * 10**6)
    with pytest.raises(UsageError, match=r"x.npz: expected at most 15,000,000 bytes on this machine, got 20,000,\d+"):
        read(file)


def test_a_directory_that_lies_about_a_size_does_not_unpack_more(tmp_path):
    file = archive(tmp_path / "x.npz", a=array((10**6,), "|u1", bytes(10**6)))
    whole = file.read_bytes()
    true, false = len(array((10**6,), "|u1", bytes(10**6))).to_bytes(4, "little"), (200).to_bytes(4, "little")
    assert whole.count(true) == 2
    file.write_bytes(whole.replace(true, false))
    with pytest.raises(UsageError, match=r"x\.npz is not a valid"):
        read(file)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_compressions_are_refused(method, tmp_path):
    with pytest.raises(UsageError, match="expected no compression or deflate, got method 1"):
        read(archive(tmp_path / "x.npz", method, a=array()))


def test_very_many_entries_are_refused(tmp_path):
    with pytest.raises(UsageError, match="expected at most 1,000 arrays, got 1,002"):
        read(archive(tmp_path / "x.npz", a=array(), **{f"b{i}": b"" for i in range(1001)}))


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a\x1b]0;x\x07", "a" * 60_000])
def test_names_that_are_paths_or_control_characters_do_nothing(name, tmp_path):
    with pytest.raises(UsageError, match="has no array 'a'") as refused:
        read(archive(tmp_path / "x.npz", **{name: array()}))
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) < 400
    assert os.listdir(tmp_path) == ["x.npz"]


def test_every_cut_of_an_archive_is_refused(tmp_path):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, a=np.arange(20.0))
    whole = buffer.getvalue()
    for end in range(0, len(whole) - 1, 7):
        (tmp_path / "x.npz").write_bytes(whole[:end])
        with pytest.raises(UsageError, match=r"x\.npz is not a valid"):
            read(tmp_path / "x.npz")


def test_an_archive_that_is_not_a_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(UsageError, match=r"cannot read .*x\.npz: expected a regular file, got a named pipe"):
        read(tmp_path / "x.npz")
