"""Graphs whose nodes have features and classes: which nodes are for training, and where it all came from.

    embedded    Zachary's karate club, which comes with torch_geometric
    a folder    Planetoid's files ind.NAME.{x,tx,allx,y,ty,ally,graph,test.index}, there or in raw/ or */raw/; or
                ind.NAME.x itself, where there are several
    NAME.npz    what such a folder was converted to

Planetoid's files are pickles of Python 2, which are read as data alone, see `pickles`, and converted once, to an npz
file in the cache folder.
"""

import hashlib
import io
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad.planning import cache_folder
from subquad_lab import UsageError
from subquad_lab.data.npz import read_npz
from subquad_lab.data.pickles import PickledArray, PickledMatrix, named, unpickle
from subquad_lab.system.files import write_whole
from subquad_lab.system.memory import room

FILES = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
VALID = 500  # nodes of Planetoid's validation part
ARRAYS = ("features", "edges", "classes", "train", "valid", "test")
MOST_CLASSES = 255
CLUB_TEST = 20  # of the 34 members of the karate club; 4 are for training


@dataclass(frozen=True)
class Graph:
    """n nodes; edges lead both ways and never from a node to itself."""

    name: str
    checksum: str  # SHA-256 of all that follows
    features: Tensor  # (n, f)
    edges: Tensor  # (2, e): from, to
    classes: Tensor  # (n); -1: unknown
    train: Tensor  # numbers of nodes
    valid: Tensor
    test: Tensor

    @property
    def nodes(self) -> int:
        return len(self.features)


def load_graph(data: str | None = None) -> Graph:
    """The embedded graph, or what a file or folder holds."""
    if data is None:
        return _graph("karate club", _karate_club(), "torch_geometric")
    path = Path(data)
    if path.is_file() and path.suffix == ".npz":
        return _graph(path.stem, read_npz(path, list(ARRAYS)), path)
    if not path.exists():
        raise UsageError(f"--data: there is no file or folder {path}")
    files = _files(path)
    name = files["x"].name.split(".")[1]
    contents = {what: _read(file) for what, file in files.items()}
    digest = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents.values())).hexdigest()
    converted = cache_folder() / "graphs" / f"{name}-{digest[:16]}.npz"
    with suppress(UsageError):  # It is not there yet, or is damaged.
        return _graph(name, read_npz(converted, list(ARRAYS)), converted)
    arrays = planetoid(contents, files)
    graph = _graph(name, arrays, files["graph"])  # All is checked before it is written.
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=True, **arrays)
    with suppress(OSError):  # Without a cache it is converted each time.
        converted.parent.mkdir(parents=True, exist_ok=True)
        write_whole(converted, buffer.getvalue())
    return graph


def _karate_club() -> dict[str, np.ndarray]:
    """The four members whom torch_geometric has chosen are for training; of the others the order is drawn once."""
    from torch_geometric.datasets import KarateClub

    club = KarateClub()[0]
    others = torch.nonzero(~club.train_mask)[:, 0]
    others = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))]
    arrays = {
        "features": club.x, "edges": club.edge_index, "classes": club.y, "train": torch.nonzero(club.train_mask)[:, 0],
        "valid": others[CLUB_TEST:].sort().values, "test": others[:CLUB_TEST].sort().values,
    }  # fmt: skip
    return {name: array.numpy() for name, array in arrays.items()}


# --- Planetoid ----------------------------------------------------------------------------------------------------


def _files(path: Path) -> dict[str, Path]:
    """All that belong to ind.NAME.x: that file, or the one that a folder has."""
    places = [path, path / "raw", *(inner for inner in sorted(path.glob("*/raw")) if inner.is_dir())]
    found = [path] if path.is_file() else [file for place in places for file in sorted(place.glob("ind.*.x"))]
    if len(found) > 1:
        raise UsageError(f"--data: {path} has several graphs; expected one of {', '.join(map(str, found))}")
    if not found or not re.fullmatch(r"ind\.[^.]+\.x", found[0].name):
        raise UsageError(
            f"--data: {path}: expected an npz file, ind.NAME.x, or a folder with it, in its raw/ or in */raw/"
        )
    begin = found[0].name.removesuffix("x")
    files = {what: found[0].with_name(begin + what) for what in FILES}
    for file in files.values():
        if not file.is_file():
            raise UsageError(f"--data: {file.parent} has no {file.name}")
    return files


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror}") from error


def planetoid(contents: dict[str, bytes], files: dict[str, Path]) -> dict[str, np.ndarray]:
    """Nodes in order: those of allx, then the test nodes, which are listed in another order than they are stored.

    Test nodes that the list leaves out have no edges and are in no file (Citeseer has 15): their features are 0, and
    their class is unknown.
    """
    held = {what: unpickle(contents[what], files[what]) for what in FILES[:-1]}
    matrices = {what: _features(held[what], files[what]) for what in ("x", "tx", "allx")}
    chosen = {what: _classes(held[what], files[what]) for what in ("y", "ty", "ally")}
    listed = _numbers(contents["test.index"], files["test.index"])
    before = len(matrices["allx"])
    for what, of in (("x", "y"), ("tx", "ty"), ("allx", "ally")):
        if len(matrices[what]) != len(chosen[of]):
            raise UsageError(f"--data: {files[of]}: expected {len(matrices[what])} rows as in {files[what].name}, "
                             f"got {len(chosen[of])}")  # fmt: skip
        if matrices[what].shape[1] != matrices["allx"].shape[1]:
            raise UsageError(f"--data: {files[what]}: expected {matrices['allx'].shape[1]} features, got "
                             f"{matrices[what].shape[1]}")  # fmt: skip
    if len(listed) != len(matrices["tx"]) or len(set(listed)) != len(listed) or min(listed, default=-1) < before:
        raise UsageError(f"--data: {files['test.index']}: expected {len(matrices['tx'])} different numbers >= {before}")
    for part, whole, found in (("x", "allx", matrices), ("y", "ally", chosen)):
        if not np.array_equal(found[part], found[whole][: len(found[part])]):
            raise UsageError(f"--data: {files[part]}: expected the first rows of {files[whole].name}")
    if len(matrices["x"]) + VALID > before:
        raise UsageError(
            f"--data: {files['allx']}: expected at least {len(matrices['x']) + VALID} rows, got {before}"
        )
    nodes = max(listed) + 1
    if nodes > 2 * (before + len(listed)):
        count = before + len(listed)
        raise UsageError(f"--data: {files['test.index']}: node {nodes - 1} is far above the {count} listed")
    features = np.zeros((nodes, matrices["allx"].shape[1]), np.float32)
    classes = np.full(nodes, -1, np.int64)
    features[:before], classes[:before] = matrices["allx"], chosen["ally"]
    features[listed], classes[listed] = matrices["tx"], chosen["ty"]
    edges = _edges(held["graph"], nodes, files["graph"], len(contents["graph"]))
    train = np.arange(len(matrices["x"]))
    return {
        "features": features, "edges": edges, "classes": classes, "train": train,
        "valid": np.arange(len(train), len(train) + VALID), "test": np.sort(np.array(listed)),
    }  # fmt: skip


def _numbers(content: bytes, path: Path) -> list[int]:
    try:
        return [int(line) for line in content.decode("ascii").split()]
    except ValueError as error:
        raise UsageError(f"--data: {path}: expected an integer on each line: {error}") from error


def _features(found: Any, path: Path) -> np.ndarray:
    """A sparse matrix, made whole."""
    from scipy.sparse import csr_matrix

    if not isinstance(found, PickledMatrix):
        raise UsageError(f"--data: {path}: expected a sparse matrix, got {named(found)}")
    try:
        rows, columns = (int(size) for size in found.state["_shape"])
        if 16 * rows * columns > room():
            raise UsageError(f"--data: {path}: this machine has no room for {rows:,} x {columns:,} features")
        parts = tuple(found.state[name].values() for name in ("data", "indices", "indptr"))
        matrix = csr_matrix(parts, shape=(rows, columns))
        matrix.check_format(full_check=True)
        dense: np.ndarray = matrix.toarray().astype(np.float32)
        return dense
    except UsageError:
        raise
    except Exception as error:  # Its parts can be anything, and scipy then fails in any way.
        raise UsageError(f"--data: {path}: is no whole sparse matrix: {type(error).__name__}: {error}") from error


def _classes(found: Any, path: Path) -> np.ndarray:
    """Rows with a 1 in the place of the class; a row of zeros is unknown."""
    if not isinstance(found, PickledArray):
        raise UsageError(f"--data: {path}: expected an array, got {named(found)}")
    try:
        table = found.values()
    except Exception as error:  # Its parts can be anything.
        raise UsageError(f"--data: {path}: is no whole array: {error}") from error
    if table.ndim != 2 or not table.shape[1] or not np.isin(table, (0, 1)).all() or (table.sum(1) > 1).any():
        raise UsageError(f"--data: {path}: expected rows of zeros with at most one 1, got an array {table.shape}")
    return np.where(table.any(1), table.argmax(1), -1)


def _edges(found: Any, nodes: int, path: Path, size: int) -> np.ndarray:
    """Both ways, each once, none from a node to itself; `size` is that of the file in bytes."""
    if not isinstance(found, dict) or not all(isinstance(near, list) for near in found.values()):
        raise UsageError(f"--data: {path}: expected the neighbors of each node, got {named(found)}")
    if sum(map(len, found.values())) > size:  # Each takes a byte at least, unless one list is used again and again.
        raise UsageError(f"--data: {path}: expected the neighbors of each node in a list of its own")
    pairs = [(node, other) for node, near in found.items() for other in near]
    if not all(type(end) is int and 0 <= end < nodes for pair in pairs for end in pair):
        raise UsageError(f"--data: {path}: expected numbers of nodes from 0 to below {nodes}")
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    ends = ends[ends[:, 0] != ends[:, 1]]
    return np.unique(np.concatenate([ends, ends[:, ::-1]]), axis=0).T.copy()


# --- What it must be ----------------------------------------------------------------------------------------------


def _graph(name: str, arrays: dict[str, np.ndarray], where: object) -> Graph:
    kinds = {"features": ("fiub", 2), "edges": ("iu", 2), "classes": ("iu", 1), "train": ("iu", 1), "valid": ("iu", 1),
             "test": ("iu", 1)}  # fmt: skip
    for what, (kind, dimensions) in kinds.items():
        array = arrays[what]
        if array.dtype.kind not in kind or array.ndim != dimensions or (not array.size and what != "edges"):
            raise UsageError(f"--data: {where}: {what}: expected {'numbers' if 'f' in kind else 'whole numbers'} in "
                             f"{dimensions} dimensions, got {array.dtype} {array.shape}")  # fmt: skip
    nodes = len(arrays["features"])
    if len(arrays["edges"]) != 2 or len(arrays["classes"]) != nodes:
        raise UsageError(f"--data: {where}: expected (2, edges) and a class for each of {nodes} nodes, got "
                         f"{arrays['edges'].shape} and {arrays['classes'].shape}")  # fmt: skip
    for what in ("edges", "train", "valid", "test"):
        if arrays[what].size and not 0 <= arrays[what].min() <= arrays[what].max() < nodes:
            raise UsageError(f"--data: {where}: {what}: expected numbers of nodes from 0 to below {nodes}")
    for what in ("train", "valid", "test"):
        if arrays["classes"][arrays[what]].min() < 0:
            raise UsageError(f"--data: {where}: {what}: expected nodes whose class is known")
    known = arrays["classes"][arrays["train"]]
    if known.max() > MOST_CLASSES or arrays["classes"].max() > known.max():
        raise UsageError(f"--data: {where}: classes: expected at most {MOST_CLASSES}, and none that no training node "
                         f"has; found {arrays['classes'].max()}")  # fmt: skip
    parts = np.concatenate([arrays[what] for what in ("train", "valid", "test")])
    if len(np.unique(parts)) != len(parts):
        raise UsageError(f"--data: {where}: train, valid, test: expected each node in one part, once")
    ends = arrays["edges"].T
    if len(np.unique(ends, axis=0)) != len(ends) or (ends[:, 0] == ends[:, 1]).any() or not np.array_equal(
        np.unique(ends, axis=0), np.unique(ends[:, ::-1], axis=0)):  # fmt: skip
        raise UsageError(f"--data: {where}: edges: expected both ways, each once, and none from a node to itself")
    tensors = {what: torch.from_numpy(np.ascontiguousarray(arrays[what])) for what in ARRAYS}
    tensors = {what: tensor.float() if what == "features" else tensor.long() for what, tensor in tensors.items()}
    if not tensors["features"].isfinite().all():
        raise UsageError(f"--data: {where}: features: expected finite numbers")
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.numpy().data)
    return Graph(name, digest.hexdigest(), **tensors)
