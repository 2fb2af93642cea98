"""Labeled images, split into training, validation and test set.

    embedded    scikit-learn's handwritten digits, 8x8, resized to 28x28
    NAME.npz    MedMNIST format: {train,val,test}_{images,labels}
    a folder    MNIST format: {train,t10k}-{images-idx3,labels-idx1}-ubyte, optionally .gz, in the folder, raw/ or
                NAME/raw/

Nothing is unpickled. Errors name the key, shape, type or range that is wrong.
"""

import gzip
import hashlib
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from subquad_lab import UsageError
from subquad_lab.data.npz import read_npz
from subquad_lab.system.memory import room
from subquad_lab.system.regular_file import open_regular

PARTS = ("train", "valid", "test")
DIGIT_SIDE = 28  # to which the embedded digits are resized
OCT, OCT_MD5 = "OCTMNIST", "c68d92d5b585d8d81f7112f81e2d0842"
PUBLISHED_TEST = (182, 55, 42, 250)  # first images of each class, on which the published OCTMNIST results are based
FASHION = ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]
CLASSES = {
    OCT: ["CNV", "DME", "drusen", "normal"],
    "PNEUMONIAMNIST": ["normal", "pneumonia"],
    "fashion-mnist": FASHION,
    "FashionMNIST": FASHION,
}
Part = tuple[Tensor, Tensor]  # images (n, channels, height, width) of bytes, classes (n)


@dataclass(frozen=True)
class Pictures:
    """A data set in three parts; classes[i] is the name of class i."""

    name: str
    checksum: str  # SHA-256 of all images and classes
    classes: list[str]
    train: Part
    valid: Part
    test: Part

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.train[0].shape
        return channels, height, width


def load_images(data: str | None = None) -> Pictures:
    """Load the embedded digits, or a data set from a file or folder."""
    if data is None:
        return _pictures("scikit-learn's digits", _digits(), "scikit-learn")
    path = Path(data)
    if path.is_file() and path.suffix == ".npz":
        return _medmnist(path)
    if path.is_dir():
        return _mnist(path)
    if path.exists():
        raise UsageError(f"--data: expected an npz file or a folder with *-ubyte files, got {path}")
    raise UsageError(f"--data: no such file or folder: {path}")


# --- Sources ------------------------------------------------------------------------------------------------------


def _digits() -> dict[str, Part]:
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.from_numpy(found.images).float()[:, None] * (255 / 16)
    pictures = (
        F.interpolate(small, (DIGIT_SIDE, DIGIT_SIDE), mode="bilinear", align_corners=False).round().to(torch.uint8)
    )
    whole = pictures, torch.from_numpy(found.target).long()
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    fifth = len(order) // 5
    return {
        part: _at(whole, rows)
        for part, rows in zip(PARTS, order.split([len(order) - 2 * fifth, fifth, fifth]), strict=True)
    }


def _medmnist(path: Path) -> Pictures:
    """Load a MedMNIST npz file."""
    name = path.stem.upper()
    keys = {"train": "train", "valid": "val", "test": "test"}
    arrays = read_npz(path, [f"{key}_{what}" for key in keys.values() for what in ("images", "labels")])
    parts = {part: (arrays[f"{key}_images"], arrays[f"{key}_labels"]) for part, key in keys.items()}
    checked = {part: _checked(f"{path}: {keys[part]}_", *found) for part, found in parts.items()}
    if name == OCT:
        with open_regular(path) as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != OCT_MD5:
            warnings.warn(f"{path}: expected MD5 {OCT_MD5}, got {found}; results may not be comparable to published "
                          "ones",
                          stacklevel=2)  # fmt: skip
            name += ", changed"
    return _pictures(name, checked, path)


def _mnist(folder: Path) -> Pictures:
    """Load MNIST files; the last tenth of the training set becomes the validation set."""
    inner = [path for path in sorted(folder.glob("*/raw")) if path.is_dir()]
    places = [place for place in (folder, folder / "raw", *inner) if any(place.glob("train-images-idx3-ubyte*"))]
    if len(places) != 1:
        found = f"{len(places)}: {', '.join(map(str, places))}" if places else "none"
        raise UsageError(f"--data: expected one folder with train-images-idx3-ubyte in {folder}, got {found}")
    parts = {}
    for part in ("train", "t10k"):
        pictures, classes = (
            read_idx(_one(places[0], f"{part}-{what}-ubyte")) for what in ("images-idx3", "labels-idx1")
        )
        parts[part] = _checked(f"{places[0]}: {part} ", pictures, classes)
    count = len(parts["train"][1])
    name = places[0].parent.name if places[0].name == "raw" else places[0].name
    rows = torch.arange(count).split([count - count // 10, count // 10])
    split = {"train": _at(parts["train"], rows[0]), "valid": _at(parts["train"], rows[1]), "test": parts["t10k"]}
    return _pictures(name, split, places[0])


def _one(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UsageError(f"--data: {folder} has neither {name} nor {name}.gz")


# --- Files --------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of bytes. Header: 0, 0, 8, number of dimensions, then each size in four bytes."""
    try:
        with open_regular(path) as own, gzip.open(own) if path.suffix == ".gz" else own as file:
            head = file.read(4)
            if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 3:
                raise UsageError(
                    f"--data: {path}: expected the header 00 00 08 and 1 to 3 dimensions, got {head.hex(' ')}"
                )
            sizes = [int.from_bytes(file.read(4)) for _ in range(head[3])]
            count = int(np.prod(sizes, dtype=object))
            if count > room():
                raise UsageError(
                    f"--data: {path}: expected at most {room():,} bytes on this machine, got {sizes} in the header"
                )
            content = file.read(count + 1)
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise UsageError(f"--data: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) != count:
        found = "more" if len(content) > count else f"{len(content):,}"
        raise UsageError(f"--data: {path}: expected {count:,} bytes for {sizes}, got {found}")
    return np.frombuffer(bytearray(content), np.uint8).reshape(sizes)  # torch needs a writable buffer


# --- Validation ---------------------------------------------------------------------------------------------------


def _checked(where: str, pictures: np.ndarray, classes: np.ndarray) -> Part:
    """Validate images, grayscale (n, height, width) or color (n, height, width, 3), and one class per image."""
    if pictures.dtype != np.uint8:
        raise UsageError(f"--data: {where}images: expected uint8, got {pictures.dtype}")
    if pictures.ndim == 3:
        pictures = pictures[..., None]
    if pictures.ndim != 4 or pictures.shape[-1] not in (1, 3) or 0 in pictures.shape:
        raise UsageError(
            f"--data: {where}images: expected (n, height, width) or (n, height, width, 3), got {pictures.shape}"
        )
    if classes.dtype.kind not in "iu":
        raise UsageError(f"--data: {where}labels: expected integers, got {classes.dtype}")
    if classes.shape not in ((len(pictures),), (len(pictures), 1)):
        raise UsageError(
            f"--data: {where}labels: expected one for each of {len(pictures):,} images, got {classes.shape}"
        )
    if classes.min() < 0 or classes.max() > 255:
        raise UsageError(f"--data: {where}labels: expected 0 to 255, got {classes.min()} to {classes.max()}")
    numbers = torch.from_numpy(classes.reshape(-1).astype(np.int64))
    return torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))), numbers


def _pictures(name: str, parts: dict[str, Part], where: object) -> Pictures:
    """Validate the parts together: images of one size, and only classes that occur in training."""
    pictures, classes = parts["train"]
    count = max(2, int(classes.max()) + 1)
    names = CLASSES.get(name.partition(",")[0], [])
    for part, (others, own) in parts.items():
        if len(others) == 0:
            raise UsageError(f"--data: {where}: the {part} part is empty")
        if others.shape[1:] != pictures.shape[1:]:
            raise UsageError(f"--data: {where}: expected {part} images of shape {tuple(pictures.shape[1:])} as in "
                             "train, "
                             f"got {tuple(others.shape[1:])}")  # fmt: skip
        if int(own.max()) >= count:
            raise UsageError(f"--data: {where}: expected {part} labels from 0 to {count - 1} as in train, got "
                             f"{int(own.max())}")  # fmt: skip
    digest = hashlib.sha256()
    for part in PARTS:
        for tensor in parts[part]:
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().data)
    return Pictures(name, digest.hexdigest(), names if len(names) == count else [str(i) for i in range(count)], **parts)


def published_test(part: Part) -> Part:
    """Return the test images of the published OCTMNIST results: the first ones of each class."""
    rows = [torch.nonzero(part[1] == i)[:count, 0] for i, count in enumerate(PUBLISHED_TEST)]
    found = tuple(map(len, rows))
    if found != PUBLISHED_TEST:
        raise UsageError(f"published_test: expected {PUBLISHED_TEST} test images per class, got {found}")
    return _at(part, torch.cat(rows).sort().values)


def _at(part: Part, rows: Tensor) -> Part:
    return part[0][rows], part[1][rows]
