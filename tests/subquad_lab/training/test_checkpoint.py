"""Checkpoints: every damage is noticed, nothing is lost, nothing in them is executed."""

import json
import os
import pickle
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from subquad_lab import RunError
from subquad_lab.system.checksums import SUMS, Damaged
from subquad_lab.training import checkpoint
from subquad_lab.training.checkpoint import TENSORS, Checkpoint

SMALL = Checkpoint({"w": torch.tensor([1.5, -2.0]), "empty": torch.zeros(0)}, {"step": 7, "rate": 0.1})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "all", 1, SMALL)
    return tmp_path / "all" / "00000001"


def seal(path: Path) -> None:
    """Checksums that fit, as whoever made the files would write them."""
    contents = {name: (path / name).read_bytes() for name in (TENSORS, checkpoint.STATE)}
    (path / SUMS).write_bytes(checkpoint._sums(contents))


def test_what_is_saved_is_loaded_to_the_bit(tmp_path):
    values = torch.tensor([float("nan"), -0.0, 1e-45, float("inf")])
    given = Checkpoint({"x": values, "b": values.bfloat16()}, {"x": 0.1 + 0.2, "list": [1, None, "text"]})
    checkpoint.save(tmp_path, 1, given)
    found = checkpoint.load(tmp_path / "00000001")
    assert found.state == given.state
    assert found.tensors.keys() == given.tensors.keys()
    for name, tensor in given.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        bits = torch.int32 if tensor.dtype == torch.float32 else torch.int16
        assert torch.equal(found.tensors[name].view(bits), tensor.view(bits))


def test_checksums_are_those_of_sha256sum(saved):
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=saved, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_flipped_bit_is_noticed(saved):
    """10,000 of them, in all files."""
    draw = random.Random(0)
    files = {path: path.read_bytes() for path in saved.iterdir()}
    assert len(files) == 3
    for _ in range(10_000):
        path = draw.choice(sorted(files))
        bit = draw.randrange(8 * len(files[path]))
        with path.open("r+b", buffering=0) as file:  # In place: a file that is written anew waits for the disk.
            byte = files[path][bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            with pytest.raises(Damaged, match=str(saved)):
                checkpoint.load(saved)
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)
    assert checkpoint.load(saved).state == SMALL.state


def test_every_truncation_is_noticed(saved):
    for path in saved.iterdir():
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(Damaged):
                checkpoint.load(saved)
        path.unlink()
        with pytest.raises(Damaged, match=f"{path.name}: No such file"):
            checkpoint.load(saved)
        path.write_bytes(content)


def test_a_damaged_one_is_told_and_the_one_before_it_is_used(tmp_path, capsys):
    for number in (1, 2):
        checkpoint.save(tmp_path, number, Checkpoint({}, {"number": number}))
    (tmp_path / "00000002" / TENSORS).write_bytes(b"")
    assert checkpoint.newest(tmp_path).state == {"number": 1}
    assert "00000002" in capsys.readouterr().err
    (tmp_path / "00000001" / TENSORS).write_bytes(b"")
    with pytest.raises(Damaged, match="expected at least one intact checkpoint, got 2 damaged"):
        checkpoint.newest(tmp_path)
    assert checkpoint.newest(tmp_path / "no") is None


def test_the_last_two_stay_and_those_that_are_named(tmp_path):
    for number in range(1, 8):
        checkpoint.save(tmp_path, number, SMALL, keep={2, 0})
        assert checkpoint.next_number(tmp_path) == number + 1
    assert checkpoint.numbers(tmp_path) == [2, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000006", "00000007"]


WRITER = """
import sys, torch
from pathlib import Path
from subquad_lab.training import checkpoint
from subquad_lab.training.checkpoint import Checkpoint
folder, number = Path(sys.argv[1]), 1
while True:
    number = checkpoint.next_number(folder)
    checkpoint.save(folder, number, Checkpoint({"x": torch.full((20_000,), float(number))}, {"number": number}))
    print(number, flush=True)
"""


def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path):
    """`kill -9` at random moments: the last one that was announced is there, or a later one."""
    draw = random.Random(0)
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            announced = [int(writer.stdout.readline()) for _ in range(draw.randrange(1, 30))][-1]
            writer.kill()
        found = checkpoint.newest(tmp_path)
        assert found.state["number"] >= announced
        assert torch.equal(found.tensors["x"], torch.full((20_000,), float(found.state["number"])))


def limited(size: int) -> None:
    """No file of this process may be larger: the nearest to a full disk that needs no rights."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_full_disk_is_told_and_loses_nothing(tmp_path):
    checkpoint.save(tmp_path, 1, SMALL)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        limited(1000)
        with pytest.raises(RunError, match=r"cannot write a checkpoint into .*: File too large; earlier ones are kept"):
            checkpoint.save(tmp_path, 2, Checkpoint({"x": torch.zeros(10_000)}, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.newest(tmp_path).state == SMALL.state
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


class Hostile:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize("file", [TENSORS, checkpoint.STATE])
def test_a_pickle_inside_is_not_executed(saved, file, monkeypatch):
    monkeypatch.chdir(saved)
    (saved / file).write_bytes(pickle.dumps(Hostile()))
    seal(saved)
    with pytest.raises(Damaged):
        checkpoint.load(saved)
    assert not (saved / "executed").exists()


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}},
    ],
)
def test_shapes_that_lie_are_refused(saved, header):
    text = json.dumps(header).encode()
    (saved / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0\0\0")
    seal(saved)
    with pytest.raises(Damaged):
        checkpoint.load(saved)


def test_a_header_of_any_length_is_refused(saved):
    (saved / TENSORS).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    seal(saved)
    with pytest.raises(Damaged):
        checkpoint.load(saved)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"1e999x", b"\xff"])
def test_state_that_is_no_object_is_refused(saved, content):
    (saved / checkpoint.STATE).write_bytes(content)
    seal(saved)
    with pytest.raises(Damaged):
        checkpoint.load(saved)


def test_names_of_tensors_are_no_paths(tmp_path):
    checkpoint.save(tmp_path / "all", 1, Checkpoint({"../../outside": torch.zeros(1)}, {}))
    assert checkpoint.load(tmp_path / "all" / "00000001").tensors.keys() == {"../../outside"}
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", [TENSORS, checkpoint.STATE, SUMS])
def test_a_pipe_in_a_checkpoint_is_damage_and_not_waited_for(name, saved):
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(Damaged, match=f"{name}: expected a regular file, got a named pipe"):
        checkpoint.load(saved)
    if name != TENSORS:
        with pytest.raises(Damaged, match=r"expected an intact state.json, got 1 damaged checkpoints"):
            checkpoint.newest_state(saved.parent)


def test_names_that_no_checkpoint_has_are_left_alone(saved):
    folder = saved.parent
    for name in ("5", "\u0663", "000000002", "notes"):
        (folder / name).mkdir()
    for number in (2, 3, 4):
        checkpoint.save(folder, number, SMALL)
    assert checkpoint.numbers(folder) == [3, 4]
    assert {path.name for path in folder.iterdir()} == {"5", "\u0663", "000000002", "notes", "00000003", "00000004"}
