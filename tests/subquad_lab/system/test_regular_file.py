"""Files of others: regular ones only, up to a size, and nothing that could block."""

import os
import socket
import time
from pathlib import Path

import pytest

from subquad_lab.system.regular_file import open_regular, read_regular


def made(kind: str, folder: Path) -> Path:
    """Return a path of this kind."""
    path = folder / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as own:
            os.chdir(folder)  # The name of a socket must be short.
            own.bind(kind)
    elif kind.startswith("link to "):
        path.symlink_to(made(kind.removeprefix("link to "), folder))
    else:
        return Path(kind)
    return path


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("folder", "a folder"), ("fifo", "a named pipe"), ("socket", "a socket"), ("/dev/zero", "a device"),
        ("link to fifo", "a named pipe"), ("link to folder", "a folder"),
    ],
)  # fmt: skip
def test_what_is_not_a_regular_file_is_refused_at_once(kind, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = made(kind, tmp_path)
    begin = time.monotonic()
    with pytest.raises(OSError, match="expected a regular file") as refused:
        read_regular(path, 100)
    assert refused.value.strerror == f"expected a regular file, got {word}" and refused.value.filename == str(path)
    assert time.monotonic() - begin < 1


def test_a_fifo_with_a_writer_is_refused_too_and_nothing_stays_open(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    both = os.open(tmp_path / "fifo", os.O_RDWR)
    for _ in range(3):
        with pytest.raises(OSError, match="a named pipe"):
            open_regular(tmp_path / "fifo")
    os.close(both)
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_sizes(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    assert read_regular(tmp_path / "f", 5) == read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="expected at most 4 bytes, got 5"):
        read_regular(tmp_path / "f", 4)


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="needs /proc")
def test_a_file_that_is_larger_than_it_says_is_noticed():
    assert os.stat("/proc/cpuinfo").st_size == 0
    with pytest.raises(OSError, match="expected at most 10 bytes, got 11"):
        read_regular("/proc/cpuinfo", 10)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_an_impossible_name_is_an_error_of_the_file(name):
    with pytest.raises(OSError, match="not a possible file name"):
        read_regular(name, 10)
