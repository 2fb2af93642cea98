"""Pictures from files: three layouts, and nothing that is wrong goes unnoticed or is executed."""

import gzip
import os
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from small_runs import write_pictures
from subquad_lab import UsageError
from subquad_lab.data.images import load_images


def test_the_embedded_digits_are_28x28_in_three_parts():
    digits = load_images()
    assert digits.shape == (1, 28, 28)
    assert [len(getattr(digits, part)[1]) for part in ("train", "valid", "test")] == [1079, 359, 359]
    assert digits.classes == [str(i) for i in range(10)]
    for pictures, classes in (digits.train, digits.valid, digits.test):
        assert pictures.dtype == torch.uint8
        assert pictures.max() > 200
        assert classes.unique().tolist() == list(range(10))
    assert load_images().checksum == digits.checksum
    rows = torch.cat([digits.train[0], digits.valid[0], digits.test[0]]).flatten(1)
    assert len(rows.unique(dim=0)) == 1797  # No picture is in two parts.


def test_a_file_in_the_layout_of_medmnist(tmp_path):
    file = write_pictures(tmp_path / "pneumoniamnist.npz", classes=2)
    found = load_images(str(file))
    content = np.load(file)
    assert found.name == "PNEUMONIAMNIST"
    assert found.classes == ["normal", "pneumonia"]
    assert np.array_equal(found.valid[0][:, 0], content["val_images"])
    assert np.array_equal(found.test[1], content["test_labels"][:, 0])


def test_pictures_in_colors(tmp_path):
    colors = {f"{part}_images": np.random.default_rng(0).integers(256, size=(n, 12, 10, 3)).astype(np.uint8)
               for part, n in (("train", 50), ("val", 20), ("test", 21))}  # fmt: skip
    found = load_images(str(write_pictures(tmp_path / "c.npz", **colors)))
    assert found.shape == (3, 12, 10)
    assert np.array_equal(found.train[0].permute(0, 2, 3, 1), colors["train_images"])


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", n) for n in array.shape) + array.tobytes()


def write_mnist(folder: Path, packed: bool = False) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    arrays = {}
    folder.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 12)):
        arrays[f"{part}-images-idx3-ubyte"] = draw.integers(256, size=(count, 9, 10)).astype(np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = (np.arange(count) % 4).astype(np.uint8)
    for name, array in arrays.items():
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return arrays


FULL = idx(np.zeros((40, 9, 10), np.uint8))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", ["", "raw", "FashionMNIST/raw"])
def test_files_in_the_layout_of_mnist(inside, packed, tmp_path):
    arrays = write_mnist(tmp_path / "digits" / inside, packed)
    found = load_images(str(tmp_path / "digits"))
    assert found.name == ("FashionMNIST" if "/" in inside else "digits")
    images = torch.cat([found.train[0], found.valid[0]])[:, 0]
    assert np.array_equal(images, arrays["train-images-idx3-ubyte"])
    assert [len(part[1]) for part in (found.train, found.valid, found.test)] == [36, 4, 12]
    assert np.array_equal(found.test[1], arrays["t10k-labels-idx1-ubyte"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"", "expected the header 00 00 08 and 1 to 3 dimensions, got"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\3" + b"\0" * 20, "expected the header 00 00 08"),
        ("train-images-idx3-ubyte", FULL[:-1], "expected 3,600 bytes for [40, 9, 10], got 3,599"),
        ("train-images-idx3-ubyte", FULL + b"x", "expected 3,600 bytes for [40, 9, 10], got more"),
        ("train-images-idx3-ubyte", b"\0\0\x08\3" + b"\xff" * 12, "bytes on this machine, got"),
        ("train-images-idx3-ubyte", idx(np.zeros((40, 90), np.uint8)), "images: expected (n, height, width)"),
        ("train-labels-idx1-ubyte", idx(np.zeros(39, np.uint8)), "expected one for each of 40 images, got (39,)"),
        ("t10k-labels-idx1-ubyte", idx(np.full(12, 9, np.uint8)), "expected test labels from 0 to 3 as in train"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((12, 9, 9), np.uint8)), "as in train, got (1, 9, 9)"),
        ("t10k-labels-idx1-ubyte", None, "has neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz"),
        ("train-images-idx3-ubyte", None, "expected one folder with train-images-idx3-ubyte in"),
    ],
)  # fmt: skip
def test_wrong_files_of_bytes_are_told(name, content, message, tmp_path):
    write_mnist(tmp_path / "m")
    if content is None:
        (tmp_path / "m" / name).unlink()
    else:
        (tmp_path / "m" / name).write_bytes(content)
    with pytest.raises(UsageError) as told:
        load_images(str(tmp_path / "m"))
    assert message in str(told.value)
    assert str(tmp_path) in str(told.value) or "expected test" in str(told.value)


def test_cut_and_changed_gzip_files_are_told(tmp_path):
    write_mnist(tmp_path / "m", packed=True)
    file = tmp_path / "m" / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    for content in (whole[:-200], whole[:5], b"x" + whole[1:], whole[:40] + bytes([whole[40] ^ 8]) + whole[41:]):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"train-images-idx3-ubyte.gz"):
            load_images(str(tmp_path / "m"))


class Attack:
    """What would be executed if it were unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(val_images=None), "has no array 'val_images'; expected train_images, train_labels, val_images"),
        (dict(train_images=np.zeros((50, 12, 12))), "train_images: expected uint8, got float64"),
        (dict(train_images=np.zeros((50, 12), np.uint8)), "train_images: expected (n, height, width) or (n, height"),
        (dict(train_images=np.zeros((50, 12, 12, 12), np.uint8)), "got (50, 12, 12, 12)"),
        (
            dict(test_images=np.zeros((21, 12, 13), np.uint8)),
            "expected test images of shape (1, 12, 12) as in train, got (1, 12, 13)",
        ),
        (dict(test_images=np.zeros((0, 12, 12), np.uint8)), "test_images: expected (n, height, width)"),
        (
            dict(train_labels=np.zeros((50, 14), np.uint8)),
            "train_labels: expected one for each of 50 images, got (50, 14)",
        ),
        (dict(train_labels=np.zeros((49, 1), np.uint8)), "got (49, 1)"),
        (dict(train_labels=np.zeros((50, 1))), "train_labels: expected integers, got float64"),
        (dict(train_labels=np.full((50, 1), -1)), "train_labels: expected 0 to 255, got -1 to -1"),
        (dict(test_labels=np.full((21, 1), 3)), "expected test labels from 0 to 2 as in train, got 3"),
        (dict(train_labels=np.full((50, 1), 2**62)), "expected 0 to 255, got"),
        (dict(train_images=np.full((50,), "abc")), "train_images: expected uint8"),
    ],
)
def test_arrays_that_do_not_fit_are_named(changes, message, tmp_path):
    file = write_pictures(tmp_path / "x.npz", **changes)
    with pytest.raises(UsageError) as told:
        load_images(str(file))
    assert message in str(told.value)


def test_an_npz_of_objects_is_refused_and_not_executed(tmp_path):
    attack = np.empty(50, object)
    attack[:] = [Attack(tmp_path / "executed") for _ in range(50)]
    file = write_pictures(tmp_path / "x.npz", train_labels=attack)
    with pytest.raises(UsageError, match=r"x.npz is not a valid .* train_labels.npy: Object arrays cannot be loaded"):
        load_images(str(file))
    assert not (tmp_path / "executed").exists()


def test_a_pickle_in_place_of_an_npz_is_refused_and_not_executed(tmp_path):
    import pickle

    (tmp_path / "x.npz").write_bytes(pickle.dumps(Attack(tmp_path / "executed")))
    with pytest.raises(UsageError, match=r"x.npz is not a valid .npz file"):
        load_images(str(tmp_path / "x.npz"))
    assert not (tmp_path / "executed").exists()


def test_every_cut_and_most_changes_of_an_npz_are_told(tmp_path):
    whole = write_pictures(tmp_path / "x.npz").read_bytes()
    before = load_images(str(tmp_path / "x.npz")).checksum
    draw = np.random.default_rng(0)
    for length in [*range(200), *draw.integers(200, len(whole), 200)]:
        (tmp_path / "x.npz").write_bytes(whole[:length])
        with pytest.raises(UsageError):
            load_images(str(tmp_path / "x.npz"))
    for place in draw.integers(0, len(whole), 300):
        (tmp_path / "x.npz").write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << draw.integers(8)]) + whole[place + 1 :]
        )
        with suppress(UsageError):
            assert load_images(str(tmp_path / "x.npz")).checksum == before  # a date, or a flag that nobody reads


def npy(head: bytes, version: bytes = b"\1\0") -> bytes:
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(head)) + head


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no array",
        npy(b"{'descr': ("),
        npy(b"{'descr': (), 'fortran_order': False, 'shape': (1,)}"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (10000000000000000000000000000000,)}"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,)}"),
        npy(b"{{}: 1}"),
        npy(b"{1: 2, 'a': 3}"),
        npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (1,)}", b"\x09\0"),
        npy(b"__import__('os').system('touch executed')"),
    ],
)
def test_members_that_are_no_arrays_are_told(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_pictures(tmp_path / "x.npz", train_images=None)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("train_images.npy", content)
    with pytest.raises(UsageError, match=r"x.npz"):
        load_images(str(file))
    assert not (tmp_path / "executed").exists()


def test_files_of_other_kinds_are_told(tmp_path):
    file = write_pictures(tmp_path / "x.npz")
    whole = file.read_bytes()
    np.save(tmp_path / "one.npy", np.zeros(3))
    file.write_bytes((tmp_path / "one.npy").read_bytes() + whole)  # an array in front of an archive
    with pytest.raises(UsageError, match=r"x.npz is not a valid .npz file of numbers"):
        load_images(str(file))
    (tmp_path / "x.txt").write_bytes(whole)
    with pytest.raises(UsageError, match=r"expected an npz file or a folder with \*-ubyte files"):
        load_images(str(tmp_path / "x.txt"))


def test_a_file_that_says_it_is_larger_than_the_memory_is_refused(tmp_path, monkeypatch):
    file = write_pictures(tmp_path / "x.npz")
    monkeypatch.setattr("subquad_lab.data.npz.room", lambda: 1000)
    with pytest.raises(UsageError, match=r"x.npz: expected at most 1,000 bytes on this machine, got [\d,]+"):
        load_images(str(file))


def test_a_place_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UsageError, match=r"--data: no such file or folder: .*nowhere"):
        load_images(str(tmp_path / "nowhere"))
