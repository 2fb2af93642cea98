"""Graphs with node features and classes, split into training, validation and test nodes.

    embedded    Zachary's karate club, from torch_geometric
    a folder    Planetoid files ind.NAME.{x,tx,allx,y,ty,ally,graph,test.index} in the folder, raw/ or */raw/; if there
                are several graphs, pass ind.NAME.x itself
    NAME.npz    a converted Planetoid graph

Planetoid files are Python 2 pickles. They are read as data without executing them (see `pickles`), and converted once
to an npz file in the cache folder.
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
from subquad_lab.system.cache import GRAPHS
from subquad_lab.system.files import locked, write_whole
from subquad_lab.system.memory import room
from subquad_lab.system.regular_file import read_regular

FILES = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
VALIDATION_NODES = 500  # of Planetoid
ARRAYS = ("features", "edges", "classes", "train", "valid", "test")
MAX_CLASSES = 255
CLUB_TEST_NODES = 20  # of the 34 nodes of the karate club; 4 are for training


@dataclass(frozen=True)
class Graph:
    """A graph of n nodes, with every edge in both directions and no self-loops."""

    name: str
    checksum: str  # SHA-256 of the fields below
    features: Tensor  # (n, f)
    edges: Tensor  # (2, e): from, to
    classes: Tensor  # (n); -1 if unknown
    train: Tensor  # node indices
    valid: Tensor
    test: Tensor

    @property
    def nodes(self) -> int:
        return len(self.features)


def load_graph(data: str | None = None) -> Graph:
    """Load the embedded graph, or one from a file or folder."""
    if data is None:
        return _graph("karate club", _karate_club(), "torch_geometric")
    path = Path(data)
    if path.is_file() and path.suffix == ".npz":
        return _graph(path.stem, read_npz(path, list(ARRAYS)), path)
    if not path.exists():
        raise UsageError(f"--data: no such file or folder: {path}")
    files = _files(path)
    name = files["x"].name.split(".")[1]
    contents = {what: _read(file) for what, file in files.items()}
    digest = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents.values())).hexdigest()
    converted = cache_folder() / GRAPHS / f"{name}-{digest[:16]}.npz"
    with suppress(UsageError):  # It does not exist yet, or is damaged.
        return _graph(name, read_npz(converted, list(ARRAYS)), converted)
    arrays = planetoid(contents, files)
    graph = _graph(name, arrays, files["graph"])  # validated before it is cached
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=True, **arrays)
    with suppress(OSError):  # Without a cache, the graph is converted each time.
        converted.parent.mkdir(parents=True, exist_ok=True)
        with locked(converted.parent, wait=True):  # `subquad cache --clear` waits for it.
            write_whole(converted, buffer.getvalue())
    return graph


def _karate_club() -> dict[str, np.ndarray]:
    """Return the karate club with torch_geometric's four training nodes; the others are split at random, once."""
    from torch_geometric.datasets import KarateClub

    club = KarateClub()[0]
    others = torch.nonzero(~club.train_mask)[:, 0]
    others = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))]
    arrays = {
        "features": club.x, "edges": club.edge_index, "classes": club.y, "train": torch.nonzero(club.train_mask)[:, 0],
        "valid": others[CLUB_TEST_NODES:].sort().values, "test": others[:CLUB_TEST_NODES].sort().values,
    }  # fmt: skip
    return {name: array.numpy() for name, array in arrays.items()}


# --- Planetoid ----------------------------------------------------------------------------------------------------


def _files(path: Path) -> dict[str, Path]:
    """Return all files that belong to ind.NAME.x, given that file or its folder."""
    places = [path, path / "raw", *(inner for inner in sorted(path.glob("*/raw")) if inner.is_dir())]
    found = [path] if path.is_file() else [file for place in places for file in sorted(place.glob("ind.*.x"))]
    if len(found) > 1:
        raise UsageError(f"--data: {path} has several graphs; choose one of {', '.join(map(str, found))}")
    if not found or not re.fullmatch(r"ind\.[^.]+\.x", found[0].name):
        raise UsageError(
            f"--data: {path}: expected an npz file, ind.NAME.x, or a folder with ind.NAME.x in it, in raw/ or in */raw/"
        )
    begin = found[0].name.removesuffix("x")
    files = {what: found[0].with_name(begin + what) for what in FILES}
    for file in files.values():
        if not file.is_file():
            raise UsageError(f"--data: {file.parent} has no {file.name}")
    return files


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, room())
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror}") from error


def planetoid(contents: dict[str, bytes], files: dict[str, Path]) -> dict[str, np.ndarray]:
    """Convert Planetoid files to arrays: first the nodes of allx, then the test nodes in the order of test.index.

    Test nodes that the index omits have no edges and appear in no file (Citeseer has 15); their features are 0 and
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
    if len(matrices["x"]) + VALIDATION_NODES > before:
        raise UsageError(
            f"--data: {files['allx']}: expected at least {len(matrices['x']) + VALIDATION_NODES} rows, got {before}"
        )
    nodes = max(listed) + 1
    if nodes > 2 * (before + len(listed)):
        count = before + len(listed)
        raise UsageError(f"--data: {files['test.index']}: expected about {count} nodes, got node {nodes - 1}")
    features = np.zeros((nodes, matrices["allx"].shape[1]), np.float32)
    classes = np.full(nodes, -1, np.int64)
    features[:before], classes[:before] = matrices["allx"], chosen["ally"]
    features[listed], classes[listed] = matrices["tx"], chosen["ty"]
    edges = _edges(held["graph"], nodes, files["graph"], len(contents["graph"]))
    train = np.arange(len(matrices["x"]))
    return {
        "features": features, "edges": edges, "classes": classes, "train": train,
        "valid": np.arange(len(train), len(train) + VALIDATION_NODES), "test": np.sort(np.array(listed)),
    }  # fmt: skip


def _numbers(content: bytes, path: Path) -> list[int]:
    try:
        return [int(line) for line in content.decode("ascii").split()]
    except ValueError as error:
        raise UsageError(f"--data: {path}: expected an integer on each line: {error}") from error


def _features(found: Any, path: Path) -> np.ndarray:
    """Return a pickled sparse matrix as a dense one."""
    from scipy.sparse import csr_matrix

    if not isinstance(found, PickledMatrix):
        raise UsageError(f"--data: {path}: expected a sparse matrix, got {named(found)}")
    try:
        rows, columns = (int(size) for size in found.state["_shape"])
        if 16 * rows * columns > room():
            raise UsageError(f"--data: {path}: {rows:,} x {columns:,} features do not fit into memory")
        parts = tuple(found.state[name].values() for name in ("data", "indices", "indptr"))
        matrix = csr_matrix(parts, shape=(rows, columns))
        matrix.check_format(full_check=True)
        dense: np.ndarray = matrix.toarray().astype(np.float32)
        return dense
    except UsageError:
        raise
    except Exception as error:  # For malformed parts, scipy can raise anything.
        raise UsageError(f"--data: {path}: malformed sparse matrix: {type(error).__name__}: {error}") from error


def _classes(found: Any, path: Path) -> np.ndarray:
    """Return the classes of one-hot rows; a row of zeros is unknown (-1)."""
    if not isinstance(found, PickledArray):
        raise UsageError(f"--data: {path}: expected an array, got {named(found)}")
    try:
        table = found.values()
    except Exception as error:  # For malformed parts, numpy can raise anything.
        raise UsageError(f"--data: {path}: malformed array: {error}") from error
    if table.ndim != 2 or not table.shape[1] or not np.isin(table, (0, 1)).all() or (table.sum(1) > 1).any():
        raise UsageError(f"--data: {path}: expected one-hot rows, got an array of shape {table.shape}")
    return np.where(table.any(1), table.argmax(1), -1)


def _edges(found: Any, nodes: int, path: Path, size: int) -> np.ndarray:
    """Return each edge once in both directions, without self-loops; `size` is the file size in bytes."""
    if not isinstance(found, dict) or not all(isinstance(near, list) for near in found.values()):
        raise UsageError(f"--data: {path}: expected a list of neighbors for each node, got {named(found)}")
    if sum(map(len, found.values())) > size:  # An entry takes at least a byte, unless lists are shared between nodes.
        raise UsageError(f"--data: {path}: expected a separate list of neighbors for each node")
    pairs = [(node, other) for node, near in found.items() for other in near]
    if not all(type(end) is int and 0 <= end < nodes for pair in pairs for end in pair):
        raise UsageError(f"--data: {path}: expected node numbers in [0, {nodes})")
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    ends = ends[ends[:, 0] != ends[:, 1]]
    return np.unique(np.concatenate([ends, ends[:, ::-1]]), axis=0).T.copy()


# --- Validation ---------------------------------------------------------------------------------------------------


def _graph(name: str, arrays: dict[str, np.ndarray], where: object) -> Graph:
    kinds = {"features": ("fiub", 2), "edges": ("iu", 2), "classes": ("iu", 1), "train": ("iu", 1), "valid": ("iu", 1),
             "test": ("iu", 1)}  # fmt: skip
    for what, (kind, dimensions) in kinds.items():
        array = arrays[what]
        if array.dtype.kind not in kind or array.ndim != dimensions or (not array.size and what != "edges"):
            raise UsageError(f"--data: {where}: {what}: expected {'numbers' if 'f' in kind else 'integers'} in "
                             f"{dimensions} dimensions, got {array.dtype} {array.shape}")  # fmt: skip
    nodes = len(arrays["features"])
    if len(arrays["edges"]) != 2 or len(arrays["classes"]) != nodes:
        raise UsageError(f"--data: {where}: expected (2, edges) and a class for each of {nodes} nodes, got "
                         f"{arrays['edges'].shape} and {arrays['classes'].shape}")  # fmt: skip
    for what in ("edges", "train", "valid", "test"):
        if arrays[what].size and not 0 <= arrays[what].min() <= arrays[what].max() < nodes:
            raise UsageError(f"--data: {where}: {what}: expected node numbers in [0, {nodes})")
    for what in ("train", "valid", "test"):
        if arrays["classes"][arrays[what]].min() < 0:
            raise UsageError(f"--data: {where}: {what}: expected nodes with known classes only")
    known = arrays["classes"][arrays["train"]]
    if known.max() > MAX_CLASSES or arrays["classes"].max() > known.max():
        raise UsageError(f"--data: {where}: classes: expected at most {MAX_CLASSES}, and only classes of training "
                         "nodes, "
                         f"got {arrays['classes'].max()}")  # fmt: skip
    parts = np.concatenate([arrays[what] for what in ("train", "valid", "test")])
    if len(np.unique(parts)) != len(parts):
        raise UsageError(f"--data: {where}: train, valid, test: expected each node at most once, in one part")
    ends = arrays["edges"].T
    if len(np.unique(ends, axis=0)) != len(ends) or (ends[:, 0] == ends[:, 1]).any() or not np.array_equal(
        np.unique(ends, axis=0), np.unique(ends[:, ::-1], axis=0)):  # fmt: skip
        raise UsageError(f"--data: {where}: edges: expected each edge once in both directions, without self-loops")
    tensors = {what: torch.from_numpy(np.ascontiguousarray(arrays[what])) for what in ARRAYS}
    tensors = {what: tensor.float() if what == "features" else tensor.long() for what, tensor in tensors.items()}
    if not tensors["features"].isfinite().all():
        raise UsageError(f"--data: {where}: features: expected finite numbers")
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.numpy().data)
    return Graph(name, digest.hexdigest(), **tensors)
