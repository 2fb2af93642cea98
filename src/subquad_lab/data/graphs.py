"""Graphs whose nodes have features and classes: which nodes are for training, and where it all came from.

    embedded    Zachary's karate club, which comes with torch_geometric
    a folder    Planetoid's files ind.NAME.{x,tx,allx,y,ty,ally,graph,test.index}, there or in raw/ or */raw/
    NAME.npz    what such a folder was converted to

Planetoid's files are pickles of Python 2, which are read as data alone, see `pickles`, and converted once, to an npz
file in the cache folder.
"""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad._cache import cache_folder
from subquad_lab import UsageError
from subquad_lab.data.arrays import read_npz
from subquad_lab.data.pickles import PickledArray, PickledMatrix, named, unpickle
from subquad_lab.files import write_whole
from subquad_lab.sizes import memory

FILES = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
VALID = 500  # nodes of Planetoid's validation part
ARRAYS = ("features", "edges", "classes", "train", "valid", "test")
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
    if not path.is_dir():
        raise UsageError(f"--data: {path}: expected an npz file, or a folder with ind.NAME.* files")
    files = _files(path)
    name = files["x"].name.split(".")[1]
    contents = {what: _read(file) for what, file in files.items()}
    digest = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents.values())).hexdigest()
    converted = cache_folder() / "graphs" / f"{name}-{digest[:16]}.npz"
    if not converted.is_file():
        arrays = planetoid(contents, files)
        _graph(name, arrays, files["graph"])  # All is checked before it is written.
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        try:
            converted.parent.mkdir(parents=True, exist_ok=True)
            write_whole(converted, buffer.getvalue())
        except OSError:  # Without a cache it is converted each time.
            return _graph(name, arrays, files["graph"])
    return _graph(name, read_npz(converted, list(ARRAYS)), converted)


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


def _files(folder: Path) -> dict[str, Path]:
    places = [folder, folder / "raw", *(path for path in sorted(folder.glob("*/raw")) if path.is_dir())]
    found = [path for place in places for path in sorted(place.glob("ind.*.x"))]
    if len(found) != 1:
        what = ", ".join(map(str, found)) or "none"
        raise UsageError(f"--data: expected one file ind.NAME.x in {folder}, in its raw/ or in */raw/, found {what}")
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
                             f"found {len(chosen[of])}")  # fmt: skip
        if matrices[what].shape[1] != matrices["allx"].shape[1]:
            raise UsageError(f"--data: {files[what]}: expected {matrices['allx'].shape[1]} features, found "
                             f"{matrices[what].shape[1]}")  # fmt: skip
    if len(listed) != len(matrices["tx"]) or len(set(listed)) != len(listed) or min(listed, default=-1) < before:
        raise UsageError(f"--data: {files['test.index']}: expected {len(matrices['tx'])} different numbers >= {before}")
    if len(matrices["x"]) + VALID > before:
        raise UsageError(
            f"--data: {files['allx']}: expected at least {len(matrices['x']) + VALID} rows, found {before}"
        )
    nodes = max(listed) + 1
    if nodes > 2 * (before + len(listed)):
        raise UsageError(
            f"--data: {files['test.index']}: node {nodes - 1} is far above the {before + len(listed)} listed"
        )
    features = np.zeros((nodes, matrices["allx"].shape[1]), np.float32)
    classes = np.full(nodes, -1, np.int64)
    features[:before], classes[:before] = matrices["allx"], chosen["ally"]
    features[listed], classes[listed] = matrices["tx"], chosen["ty"]
    train = np.arange(len(matrices["x"]))
    return {
        "features": features, "edges": _edges(held["graph"], nodes, files["graph"]), "classes": classes,
        "train": train, "valid": np.arange(len(train), len(train) + VALID), "test": np.sort(np.array(listed)),
    }  # fmt: skip


def _numbers(content: bytes, path: Path) -> list[int]:
    try:
        return [int(line) for line in content.decode("ascii").split()]
    except ValueError as error:
        raise UsageError(f"--data: {path}: expected a whole number on each line: {error}") from error


def _features(found: Any, path: Path) -> np.ndarray:
    """A sparse matrix, made whole."""
    from scipy.sparse import csr_matrix

    if not isinstance(found, PickledMatrix):
        raise UsageError(f"--data: {path}: expected a sparse matrix, found {named(found)}")
    try:
        rows, columns = (int(size) for size in found.state["_shape"])
        if 4 * rows * columns > memory():
            raise UsageError(f"--data: {path}: {rows:,} x {columns:,} features are more than this machine's memory")
        parts = tuple(found.state[name].values() for name in ("data", "indices", "indptr"))
        matrix = csr_matrix(parts, shape=(rows, columns))
        matrix.check_format(full_check=True)
        whole = matrix.toarray().astype(np.float32)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(f"--data: {path}: is no whole sparse matrix: {type(error).__name__}: {error}") from error
    if not np.isfinite(whole).all():
        raise UsageError(f"--data: {path}: expected finite features")
    return whole


def _classes(found: Any, path: Path) -> np.ndarray:
    """Rows with a 1 in the place of the class; a row of zeros is unknown."""
    if not isinstance(found, PickledArray):
        raise UsageError(f"--data: {path}: expected an array, found {named(found)}")
    try:
        table = found.values()
    except (ValueError, TypeError) as error:
        raise UsageError(f"--data: {path}: is no whole array: {error}") from error
    if table.ndim != 2 or not table.shape[1] or not np.isin(table, (0, 1)).all() or (table.sum(1) > 1).any():
        raise UsageError(f"--data: {path}: expected rows of zeros with at most one 1, found an array {table.shape}")
    return np.where(table.any(1), table.argmax(1), -1)


def _edges(found: Any, nodes: int, path: Path) -> np.ndarray:
    """Both ways, each once, none from a node to itself."""
    if not isinstance(found, dict) or not all(isinstance(near, list) for near in found.values()):
        raise UsageError(f"--data: {path}: expected the neighbours of each node, found {named(found)}")
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
                             f"{dimensions} dimensions, found {array.dtype} {array.shape}")  # fmt: skip
    nodes = len(arrays["features"])
    if len(arrays["edges"]) != 2 or len(arrays["classes"]) != nodes:
        raise UsageError(f"--data: {where}: expected (2, edges) and a class for each of {nodes} nodes, found "
                         f"{arrays['edges'].shape} and {arrays['classes'].shape}")  # fmt: skip
    for what in ("edges", "train", "valid", "test"):
        if arrays[what].size and not 0 <= arrays[what].min() <= arrays[what].max() < nodes:
            raise UsageError(f"--data: {where}: {what}: expected numbers of nodes from 0 to below {nodes}")
    for what in ("train", "valid", "test"):
        if arrays["classes"][arrays[what]].min() < 0:
            raise UsageError(f"--data: {where}: {what}: expected nodes whose class is known")
    if arrays["classes"].max() > arrays["classes"][arrays["train"]].max():
        raise UsageError(f"--data: {where}: classes reach {arrays['classes'].max()}, which no training node has")
    tensors = {what: torch.from_numpy(np.ascontiguousarray(arrays[what])) for what in ARRAYS}
    tensors = {what: tensor.float() if what == "features" else tensor.long() for what, tensor in tensors.items()}
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(str(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
    return Graph(name, digest.hexdigest(), **tensors)
