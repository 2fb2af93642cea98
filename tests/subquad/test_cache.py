"""The calibration in the user's cache folder: made once, and never trusted blindly."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest
import torch

from subquad import plan
from subquad.planning import calibration as module
from subquad.planning import calibration_file as cache
from subquad.planning.calibration import grid
from subquad.planning.calibration_file import calibration

CPU = torch.device("cpu")


def test_it_is_made_once_with_progress(fresh) -> None:
    steps = []
    first = calibration(progress=lambda done, total: steps.append((done, total)))
    assert steps == [(i, len(fresh)) for i in range(len(fresh) + 1)]
    count = len(fresh)
    assert calibration() == first
    assert len(fresh) == count


def file() -> Path:
    return cache.file_of(cache.machine(CPU, torch.float32))


def rebuilt(fresh, caplog) -> str:
    """Calibrate where a damaged file is, and return the one line that says so."""
    count = len(fresh)
    assert cache.cached(CPU) is None and not caplog.records
    calibration()
    assert len(fresh) > count and len(caplog.records) == 1 and cache.cached(CPU) is not None
    line = caplog.records[0].getMessage()
    assert line.startswith(f"{file()}: ") and line.endswith("; this machine is calibrated again") and "\n" not in line
    return line


DAMAGES = {
    "": "it is not a calibration",
    "[" * 50_000: "it is not a calibration",
    "{": "it is not a calibration",
    "[]": "it is not a calibration",
    "null": "it is not a calibration",
    '{"machine": ': "it is not a calibration",
    "\ud800": "it is not a calibration",
    " " * 70_000: "it has 70,000 bytes, more than the 65,536 of any calibration",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_cache_is_made_again_with_a_warning(fresh, caplog, damage) -> None:
    first = calibration()
    file().write_bytes(damage.encode(errors="surrogatepass"))
    assert DAMAGES[damage] in rebuilt(fresh, caplog)
    assert calibration() == first


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "/dev/null", "folder"])
def test_what_is_not_a_regular_file_is_replaced_without_waiting(fresh, caplog, tmp_path, kind) -> None:
    """Directly, or behind a symbolic link; a link is replaced, and not what it leads to."""
    target = Path(kind) if kind.startswith("/") else tmp_path / kind
    if kind == "fifo":
        os.mkfifo(target)
    elif kind == "folder":
        target.mkdir()
    file().parent.mkdir()
    file().symlink_to(target)
    begin = time.monotonic()
    assert "it is not a regular file" in rebuilt(fresh, caplog)
    assert time.monotonic() - begin < 5
    assert file().is_file() and not file().is_symlink() and target.exists() and not target.is_file()


def test_a_named_pipe_itself_is_replaced(fresh, caplog) -> None:
    file().parent.mkdir()
    os.mkfifo(file())
    assert "it is not a regular file" in rebuilt(fresh, caplog) and file().is_file()


def change(path: Path, how, is_signed: bool = True) -> None:
    """Change the content, with the checksum of the changed content or with the old one."""
    content = json.loads(path.read_text())
    checksum = content.pop("sha256")
    how(content)
    path.write_text(json.dumps({**content, "sha256": cache._checksum(content) if is_signed else checksum}))


def first_row(content) -> list[float]:
    return next(iter(content["coefficients"].values()))


@pytest.mark.parametrize("number", [1e308, 1e3, -1.0, float("nan"), float("inf"), "1", True, None, 1, [], 10**400])
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_coefficient_that_cannot_be_is_never_used(fresh, caplog, number, is_signed) -> None:
    """The largest of its row, so that the others cannot make up for it."""
    first = calibration()
    set_largest = lambda content: (row := first_row(content)).__setitem__(row.index(max(row)), number)
    change(file(), set_largest, is_signed)
    line = rebuilt(fresh, caplog)
    assert ("checksum" in line) != is_signed
    assert calibration() == first


@pytest.mark.parametrize("how", [
    lambda content: content["coefficients"].popitem(),
    lambda content: content["coefficients"].update(extra=[1.0]),
    lambda content: first_row(content).append(1.0),
    lambda content: first_row(content).__setitem__(slice(None), [0.0] * 18),
    lambda content: first_row(content).__setitem__(slice(None), [1e-300] * 18),
    lambda content: content.update(note=5),
    lambda content: content.update(retries=10**6),
    lambda content: content.update(retries=True),
    lambda content: content.pop("note"),
])  # fmt: skip
def test_a_calibration_that_does_not_fit_is_made_again(fresh, caplog, how) -> None:
    first = calibration()
    change(file(), how)
    rebuilt(fresh, caplog)
    assert calibration() == first


def test_every_digit_is_under_the_checksum(fresh, caplog) -> None:
    calibration()
    text = file().read_text()
    digit = next(i for i in range(text.index("coefficients"), len(text)) if text[i] in "23456789")
    file().write_text(f"{text[:digit]}1{text[digit + 1 :]}")
    assert "its checksum is wrong" in rebuilt(fresh, caplog)


@pytest.mark.parametrize("part", [{"torch": "0.0"}, {"version": -1}, {"device": "cpu: another one"}])
def test_a_calibration_of_another_machine_is_not_used_and_not_called_damaged(fresh, caplog, part) -> None:
    first = calibration()
    change(file(), lambda content: content["machine"].update(part))
    assert cache.cached(CPU) is None
    assert calibration() == first and not caplog.records


def test_threads_and_dtypes_have_their_own(fresh, one_thread) -> None:
    calibration()
    count = len(fresh)
    calibration(dtype=torch.float64)
    assert len(fresh) == 2 * count
    assert len(list(cache.cache_folder().iterdir())) == 2
    torch.set_num_threads(2)
    assert cache.cached(CPU) is None


def test_a_cache_that_cannot_be_written_is_said_before_the_work(fresh, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PermissionError, match=r"cache: cannot write .*file.*; set SUBQUAD_CACHE"):
        calibration()
    assert not fresh


def test_a_folder_in_the_way_is_said(fresh) -> None:
    cache.file_of(cache.machine(CPU, torch.float32)).mkdir(parents=True)
    with pytest.raises(PermissionError, match="cache: cannot write the calibration"):
        calibration()


def test_where_there_is_no_home_nothing_is_cached(monkeypatch) -> None:
    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache, "cache_folder", homeless)
    assert cache.cached(CPU) is None
    with pytest.raises(PermissionError, match="set SUBQUAD_CACHE"):
        calibration()


def test_an_interrupted_calibration_leaves_nothing(fresh, monkeypatch) -> None:
    def interrupted(*_) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "measured_seconds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibration()
    assert not list(cache.cache_folder().iterdir())


FAKE = """
import sys, time
from subquad.planning import calibration as module
from subquad.planning.calibration_file import calibration
from subquad.planning.reference import reference_seconds

def measured(method, form, shape, *_):
    with open(sys.argv[1], "a") as file:
        file.write("x")
    time.sleep(float(sys.argv[2]))
    return reference_seconds(method, form, shape)

module.measured_seconds, module.TURNS = measured, 1
calibration()
"""


def started(journal: Path, seconds: float) -> subprocess.Popen:
    """Start a process that calibrates, with calls that take this long and leave a mark in the journal."""
    return subprocess.Popen([sys.executable, "-c", FAKE, str(journal), str(seconds)], stderr=subprocess.DEVNULL)


def test_four_processes_calibrate_once(fresh, tmp_path) -> None:
    """One measures; the others wait for it, and then read what it has left."""
    journal = tmp_path / "journal"
    processes = [started(journal, 0.003) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0, 0, 0, 0]
    assert len(journal.read_text()) == len(list(grid()))
    assert len(list(cache.cache_folder().iterdir())) == 1


def test_a_process_that_was_killed_holds_nobody_up(fresh, tmp_path) -> None:
    journal = tmp_path / "journal"
    process = started(journal, 10.0)
    while not journal.exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.kill()
    process.wait()
    (left,) = cache.cache_folder().iterdir()
    assert left.name.startswith(".calibration-")
    os.utime(left, (0, 0))
    other = cache.cache_folder() / ".calibration-other"  # of a process that measures now, where there are no locks
    other.touch()
    begin = time.monotonic()
    calibration()
    assert fresh and time.monotonic() - begin < 5
    assert not left.exists()
    assert [path.suffix for path in cache.cache_folder().iterdir() if path != other] == [".json"]
    assert other.exists()


def test_a_process_that_was_stopped_is_not_waited_for_forever(fresh, monkeypatch, caplog) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(cache, "MAX_WAIT_SECONDS", 0.4)
    monkeypatch.setattr(cache, "QUIET_WAIT_SECONDS", 0.2)
    cache.cache_folder().mkdir()
    held = os.open(cache.cache_folder(), os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        calibration()
    finally:
        os.close(held)
    assert fresh
    assert [r.getMessage() for r in caplog.records] == [
        "waiting for another process that calibrates this machine (at most 0 s); it holds the lock of "
        f"{cache.cache_folder()}",
        f"the other process still holds the lock of {cache.cache_folder()}; continuing without it",
    ]


def test_a_short_wait_is_not_worth_a_word(fresh, caplog) -> None:
    fcntl = pytest.importorskip("fcntl")
    cache.cache_folder().mkdir()
    held = os.open(cache.cache_folder(), os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    Timer(0.3, os.close, [held]).start()
    calibration()
    assert fresh and not caplog.records


@pytest.mark.parametrize("function", ["fdopen", "fsync", "replace"])
def test_a_full_disk_leaves_no_file(fresh, monkeypatch, function) -> None:
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.os, function, full)
    with pytest.raises(PermissionError, match=r"No space left on device.*; set SUBQUAD_CACHE"):
        calibration()
    assert not list(cache.cache_folder().iterdir())
    assert bool(fresh) == (function != "fdopen"), "a disk that is full is found before the work"


def test_an_error_of_the_progress_callback_is_not_of_the_cache(fresh) -> None:
    def closed(done: int, total: int) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        calibration(progress=closed)
    assert not list(cache.cache_folder().iterdir())


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "meta", 1.5])
def test_a_device_that_is_not_there_is_named(device) -> None:
    with pytest.raises(ValueError, match=r"device: expected one that torch can use here, got"):
        plan(query_length=10, head_dim=4, device=device)


def test_the_cache_is_where_users_expect_it(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("SUBQUAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "subquad"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "subquad"
