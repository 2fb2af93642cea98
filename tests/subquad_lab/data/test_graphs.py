"""Planetoid's files: read as data, joined in the right order, and a pickle that wants more is refused."""

import io
import os
import pickle
import re
import struct
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from subquad_lab import UsageError
from subquad_lab.data import graphs, pickles
from subquad_lab.data.graphs import load_graph
from subquad_lab.data.pickles import unpickle
from subquad_lab.system.cache import cached_files

PLANETOID = os.environ.get("SUBQUAD_DATA")
NODES, BEFORE = 640, 610  # Nodes 612 and 625 are in no file.
LEFT_OUT = (612, 625)


class OfPython2(pickle._Pickler):
    """Writes what Python 2 wrote: its names of things, and bytes as its strings."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012 as its parent has it

    def save_bytes(self, content: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(content)) + content)
        self.memoize(content)

    dispatch[bytes] = save_bytes

    def save_global(self, what, name=None) -> None:
        old = {"numpy._core.multiarray": "numpy.core.multiarray", "scipy.sparse._csr": "scipy.sparse.csr",
               "builtins": "__builtin__"}  # fmt: skip
        module = old.get(what.__module__, what.__module__)
        self.write(f"c{module}\n{name or what.__qualname__}\n".encode())
        self.memoize(what)

    dispatch[type] = save_global
    dispatch[type(len)] = save_global


def pickled(content: object) -> bytes:
    buffer = io.BytesIO()
    OfPython2(buffer, 2).dump(content)
    return buffer.getvalue()


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents() -> dict[str, bytes]:
    """A graph as Planetoid would write it; feature 0 of a node is its number + 1, its class the number modulo 3."""
    draw = np.random.default_rng(0)
    rows = np.zeros((NODES, 6), np.float32)
    rows[:, 0], rows[:, 1 + np.arange(NODES) % 5] = np.arange(NODES) + 1, 1
    classes = np.eye(3, dtype=np.int32)[np.arange(NODES) % 3]
    test = draw.permutation([node for node in range(BEFORE, NODES) if node not in LEFT_OUT])
    near = defaultdict(list)
    for node in range(NODES):
        if node not in LEFT_OUT:
            near[node] += [(node + 1) % BEFORE, (node * 7) % BEFORE, node]  # some twice, some one way, one to itself
    parts = {"x": rows[:60], "allx": rows[:BEFORE], "tx": rows[test]}
    chosen = {"y": classes[:60], "ally": classes[:BEFORE], "ty": classes[test]}
    files = {name: pickled(csr_matrix(part)) for name, part in parts.items()}
    files |= {name: pickled(part) for name, part in chosen.items()} | {"graph": pickled(near)}
    return files | {"test.index": "".join(f"{node}\n" for node in test).encode()}


def write(folder: Path, **changes: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (contents() | {key.replace("_", "."): value for key, value in changes.items()}).items():
        (folder / f"ind.small.{name}").write_bytes(content)
    return folder


# --- What is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "raw", "Small/raw"])
def test_a_graph_is_put_together(inside, tmp_path, cache):
    write(tmp_path / "p" / inside)
    graph = load_graph(str(tmp_path / "p"))
    assert graph.name == "small"
    assert graph.features.shape == (NODES, 6)
    known = [node for node in range(NODES) if node not in LEFT_OUT]
    assert graph.features[known, 0].tolist() == [node + 1 for node in known]
    assert graph.classes[known].tolist() == [node % 3 for node in known]
    for node in LEFT_OUT:  # as in Citeseer
        assert not graph.features[node].any()
        assert graph.classes[node] == -1
        assert not (graph.edges == node).any()
    assert graph.train.tolist() == list(range(60))
    assert graph.valid.tolist() == list(range(60, 560))
    assert graph.test.tolist() == [node for node in range(BEFORE, NODES) if node not in LEFT_OUT]
    pairs = set(map(tuple, graph.edges.T.tolist()))
    assert len(pairs) == graph.edges.shape[1]
    assert all(a != b and (b, a) in pairs for a, b in pairs)
    wanted = {(node, other) for node in known for other in ((node + 1) % BEFORE, node * 7 % BEFORE) if node != other}
    assert pairs == wanted | {(b, a) for a, b in wanted}


def test_it_is_converted_once(tmp_path, cache, monkeypatch):
    folder = write(tmp_path / "p")
    first = load_graph(str(folder))
    (converted,) = cache.glob("graphs/*.npz")
    assert cached_files()["graph"] == [converted]

    def refused(*_):
        raise AssertionError("it was unpickled again")

    monkeypatch.setattr(graphs, "unpickle", refused)
    assert load_graph(str(folder)).checksum == first.checksum
    moved = converted.rename(tmp_path / "small.npz")
    assert load_graph(str(moved)).checksum == first.checksum
    assert load_graph(str(moved)).name == "small"


def test_changed_files_are_converted_anew(tmp_path, cache):
    first = load_graph(str(write(tmp_path / "p")))
    lines = contents()["test.index"].split()
    changed = load_graph(str(write(tmp_path / "p", test_index=b"\n".join(reversed(lines)))))
    assert changed.checksum != first.checksum
    assert len(list(cache.glob("graphs/*.npz"))) == 2


def test_a_damaged_conversion_is_made_again(tmp_path, cache):
    folder = write(tmp_path / "p")
    first = load_graph(str(folder))
    (converted,) = cache.glob("graphs/*.npz")
    whole = converted.read_bytes()
    converted.write_bytes(whole[:-50])
    assert load_graph(str(folder)).checksum == first.checksum
    assert load_graph(str(converted)).checksum == first.checksum


def test_one_of_several_graphs_is_named_by_its_file(tmp_path, cache):
    folder = write(tmp_path / "p")
    for path in list(folder.iterdir()):
        path.with_name(path.name.replace("small", "other")).write_bytes(path.read_bytes())
    with pytest.raises(UsageError, match=r"has several graphs; choose one of .*ind.other.x, .*ind.small.x"):
        load_graph(str(folder))
    assert load_graph(str(folder / "ind.other.x")).name == "other"
    with pytest.raises(UsageError, match=r"ind.small.y: expected an npz file, ind.NAME.x"):
        load_graph(str(folder / "ind.small.y"))


def test_without_a_place_for_the_cache_it_is_read_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "file" / "cache"))
    assert load_graph(str(write(tmp_path / "p"))).nodes == NODES


def test_the_karate_club():
    club = load_graph()
    assert (club.nodes, club.edges.shape[1]) == (34, 156)
    parts = [club.train.tolist(), club.valid.tolist(), club.test.tolist()]
    assert sorted(node for part in parts for node in part) == list(range(34))
    assert sorted(club.classes[club.train].tolist()) == [0, 1, 2, 3]


@pytest.mark.skipif(not PLANETOID, reason="SUBQUAD_DATA names no folder with planetoid/ind.cora.*")
def test_cora_is_as_its_authors_describe_it(cache):
    cora = load_graph(f"{PLANETOID}/planetoid")
    assert (cora.nodes, cora.edges.shape[1] // 2, cora.features.shape[1]) == (2708, 5278, 1433)
    assert (len(cora.train), len(cora.valid), len(cora.test)) == (140, 500, 1000)
    assert cora.classes.bincount().tolist() == [351, 217, 418, 818, 426, 298, 180]


# --- What is refused ----------------------------------------------------------------------------------------------


class Attack:
    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


ATTACKS = {
    "posix.system": lambda mark: Attack(os.system, f"touch {mark}"),
    "builtins.eval": lambda mark: Attack(eval, f"open({str(mark)!r}, 'w')"),
    "io.open": lambda mark: Attack(open, str(mark), "w"),
    "functools.partial": lambda mark: Attack(__import__("functools").partial, os.system, f"touch {mark}"),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("file", ["x", "ally", "graph"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_wants_to_run_something_is_refused(name, file, protocol, tmp_path, cache):
    mark = tmp_path / "executed"
    attack = pickle.dumps(ATTACKS[name](mark), protocol)
    folder = write(tmp_path / "p", **{file: attack})
    with pytest.raises(UsageError) as told:
        load_graph(str(folder))
    assert f"ind.small.{file}: not a Planetoid pickle: " in str(told.value)
    assert "is not allowed" in str(told.value)
    assert not mark.exists()
    assert not cache.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cnumpy\nndarray.__class__\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",  # a name with a dot, in the newer opcode
        b"cnumpy\nload\n.",
        b"cscipy.sparse.csr\nos\n.",
        b"ccopyreg\n_reconstructor\n.",
        b"ccollections\nnamedtuple\n.",
        b"c__builtin__\ngetattr\n.",
        b"\x82\x01.",
        b"Psome id\n.",
        b"",
        b".",
        b"(",
        b"\x80\xff.",
        b"r\xff\xff\xff\x7f.",
    ],
)
def test_other_names_and_broken_pickles_are_refused(code, tmp_path):
    with pytest.raises(UsageError, match=r"f: not a Planetoid pickle: "):
        unpickle(code, Path("f"))


@pytest.mark.parametrize("wrap", [b"t", b"l"])
def test_a_short_pickle_cannot_describe_a_huge_value(wrap):
    """Each value holds the one before it twice: to hash or to print the last would take forever."""
    code = b"(" + wrap + b"p0\n"
    for level in range(60):
        code += b"(g%d\ng%d\n" % (level, level) + wrap + b"p%d\n" % (level + 1)
    for end in (b".", b"(dg60\nNs.", b"cnumpy\ndtype\n(g60\ntR."):
        begin = time.monotonic()
        with pytest.raises(UsageError, match=r"f: not a Planetoid pickle: expected at most 2,000,000 values in 16 lev"):
            unpickle(code + end, Path("f"))
        assert time.monotonic() - begin < 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (b"(" * 20_000 + b"t" * 20_000 + b".", "in 16 levels"),
        (b"(" * 20_000 + b"l" * 20_000 + b".", "in 16 levels"),
        (b")" + b"\x85" * 20_000 + b".", "in 16 levels"),
        (b"]p0\ng0\na.", "a value changes after it became a part"),  # a list in itself
        (b"]p0\n\x85g0\nNa.", "a value changes after it became a part"),
        (b"(d(tNs.", "expected integers or texts as keys"),
        (b"}]Ns.", "expected integers or texts as keys"),
        (b"}(I1\nu.", "each with a value"),
        (b"(" + b"I1\n" * 3 + b".", "expected one value, got 4"),
        (b"a.", "a value is missing"),
        (b"I1\nt.", "a mark is missing"),
        (b"NNa.", "expected a list"),
        (b"N)R.", "expected one of the known names"),
        (b"cnumpy\ndtype\nNR.", "and its arguments"),
        (b"cnumpy\ndtype\n)b.", "which have a state"),
        (b"g7\n.", "nothing was stored under 7"),
        (b"\x8a\xff" + b"\x7f" * 255 + b".", "integers of at most 64 bits"),
        (b"\x8b\x00\x01\x00\x00" + b"\x7f" * 256 + b".", "the instruction LONG4 is not allowed"),
        (b"I" + b"9" * 5000 + b"\n.", ""),
        (b"T\xff\xff\xff\x7fabc.", ""),
        (b"c" + b"x" * 100_000 + b"\nname\n.", "is not allowed"),
        (b"N0" * 1000 + b".", "the instruction POP is not allowed"),
        (b"N" * 50_001 + b".", "expected at most 50,000 instructions"),
    ],
)  # fmt: skip
def test_deep_endless_and_broken_programs_are_refused_in_short_lines(code, message, monkeypatch):
    monkeypatch.setattr(pickles, "MAX_OPERATIONS", 50_000)
    with pytest.raises(UsageError, match=r"f: not a Planetoid pickle: .*" + re.escape(message)) as refused:
        unpickle(code, Path("f"))
    assert len(str(refused.value)) < 400


def test_an_array_of_a_type_that_is_huge_is_refused_without_printing_it(tmp_path, cache):
    """The type is a list of lists, with a thousand of them in the innermost."""
    nested = b"(lp0\n" + b"".join(b"(g%d\ng%d\nlp%d\n" % (i, i, i + 1) for i in range(10))
    kind = unpickle(b"cnumpy\ndtype\n(" + nested + b"tR.", Path("f"))
    with pytest.raises(ValueError, match=r"unsupported array type of type list$"):
        kind.dtype()


def test_a_pickle_cannot_change_what_stands_in():
    """A state for a class sets its attributes: those of a class that is made for this pickle alone."""
    for name in (b"c__builtin__\nlist\n", b"ccollections\ndefaultdict\n", b"cnumpy\ndtype\n"):
        with suppress(UsageError):
            unpickle(name + b"(N(dVhostile\nI5\nstb.", Path("f"))
    for kind in pickles.STAND_INS.values():
        assert not hasattr(kind, "hostile")


def test_names_of_a_pickle_reach_the_terminal_without_their_control_characters():
    with pytest.raises(UsageError) as told:
        unpickle(b"c\x1b]0;pwn\x07os\nsystem\n.", Path("f"))
    assert "\x1b" not in str(told.value)


def test_a_kind_of_numbers_that_was_never_made_is_told(tmp_path, cache):
    """NEWOBJ makes one without its first call."""
    array = pickled(np.eye(3)[np.arange(60) % 3])
    broken = array.replace(b"cnumpy\ndtype\n", b"cnumpy\ndtype\n)\x81(cnumpy\ndtype\n", 1)
    with pytest.raises(UsageError, match=r"ind.small.y"):
        load_graph(str(write(tmp_path / "p", y=broken)))


def test_stand_ins_do_nothing_with_what_they_are_given():
    """Even where a pickle calls them with names of its own."""
    code = b"cnumpy\ndtype\n(Vos\nVsystem\ntR(I3\nV<\ntb."
    kind = unpickle(code, Path("f"))
    with pytest.raises(ValueError, match=r"unsupported array type 'os'"):
        kind.dtype()


@pytest.mark.parametrize("file", ["x", "graph", "ty"])
def test_every_cut_of_a_file_is_told(file, tmp_path, cache):
    whole = contents()[file]
    for length in np.random.default_rng(0).integers(0, len(whole), 100):
        with pytest.raises(UsageError, match=rf"ind.small.{file}"):
            graphs.planetoid(
                contents() | {file: whole[:length]}, {name: Path(f"ind.small.{name}") for name in contents()}
            )


@pytest.mark.parametrize("file", ["x", "graph", "ty", "allx"])
def test_changed_bytes_never_do_more_than_change_numbers(file, tmp_path, cache):
    """Either the file is refused in one line, or a graph comes out that fits together."""
    whole, draw = contents(), np.random.default_rng(1)
    names = {name: Path(f"ind.small.{name}") for name in whole}
    for place in draw.integers(0, len(whole[file]), 60):
        content = bytearray(whole[file])
        content[place] ^= 1 << draw.integers(8)
        try:
            found = graphs._graph("x", graphs.planetoid(whole | {file: bytes(content)}, names), "x")
        except UsageError:
            continue
        assert found.features.isfinite().all()
        assert found.edges.max() < found.nodes


def one_for_all() -> dict[int, list[int]]:
    """A small file from which much would come: every node has the same list."""
    near = list(range(600))
    return dict.fromkeys(range(600), near)


def csr(**changes: object) -> bytes:
    """A sparse matrix whose parts need not fit together."""
    matrix = csr_matrix(np.eye(60, 6, dtype=np.float32))
    for name, value in changes.items():
        setattr(matrix, name, value)
    return pickled(matrix)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("x", pickled(np.zeros((60, 6))), "ind.small.x: expected a sparse matrix, got array"),
        ("y", pickled([1, 2]), "ind.small.y: expected an array, got list"),
        ("y", pickled(np.zeros((60, 3), object)), "ind.small.y: malformed array: expected an array of numbers"),
        ("y", pickled(np.full((60, 3), 0.5)), "ind.small.y: expected one-hot rows"),
        ("y", pickled(np.ones((60, 3))), "ind.small.y: expected one-hot rows"),
        ("y", pickled(np.eye(59, 3)), "ind.small.y: expected 60 rows as in ind.small.x, got 59"),
        ("x", pickled(csr_matrix(np.eye(60, 5))), "ind.small.x: expected 6 features, got 5"),
        ("x", csr(indices=np.full(6, 99, np.int32)), "ind.small.x: malformed sparse matrix"),
        ("x", csr(indptr=np.full(61, 99, np.int32)), "ind.small.x: malformed sparse matrix"),
        ("x", csr(indptr=np.zeros(5, np.int32)), "ind.small.x: malformed sparse matrix"),
        ("x", csr(data=np.full(6, np.nan, np.float32)), "ind.small.x: expected the first rows of ind.small.allx"),
        ("x", csr(_shape=(60, 10**12)), "ind.small.x: 60 x 1,000,000,000,000 features do not fit"),
        ("x", csr(_shape=(60, -1)), "ind.small.x: malformed sparse matrix"),
        ("x", csr(_shape="ab"), "ind.small.x: malformed sparse matrix"),
        ("y", pickled(np.eye(3)[np.arange(1, 61) % 3]), "ind.small.y: expected the first rows of ind.small.ally"),
        ("graph", pickled(one_for_all()), "ind.small.graph: expected a separate list of neighbors for "),
        ("graph", pickled([1]), "ind.small.graph: expected a list of neighbors for each node, got list"),
        ("graph", pickled({0: 1}), "ind.small.graph: expected a list of neighbors for each node, got dict"),
        ("graph", pickled({0: [NODES]}), f"ind.small.graph: expected node numbers in [0, {NODES})"),
        ("graph", pickled({0: ["x"]}), "ind.small.graph: expected node numbers in [0,"),
        ("graph", pickled({-1: [0]}), "ind.small.graph: expected node numbers in [0,"),
        ("test.index", b"1\nx\n", "ind.small.test.index: expected an integer on each line"),
        ("test.index", b"\xff", "ind.small.test.index: expected an integer on each line"),
        ("test.index", b"", "ind.small.test.index: expected 28 different numbers >= 610"),
        ("test.index", b"610\n" * 28, "ind.small.test.index: expected 28 different numbers >= 610"),
        ("test.index", b"".join(b"%d\n" % i for i in range(28)), "expected 28 different numbers >= 610"),
        ("test.index", b"".join(b"%d\n" % (610 + i * 10**8) for i in range(28)), "expected about 638 nodes, got node "),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(file, content, message, tmp_path, cache):
    folder = write(tmp_path / "p", **{file.replace(".", "_"): content})
    with pytest.raises(UsageError) as told:
        load_graph(str(folder))
    assert message in str(told.value)


@pytest.mark.parametrize("file", [*graphs.FILES])
def test_a_missing_file_is_named(file, tmp_path, cache):
    folder = write(tmp_path / "p")
    (folder / f"ind.small.{file}").unlink()
    with pytest.raises(
        UsageError,
        match=rf"has no ind.small.{file}" if file != "x" else r"or a folder with ind.NAME.x",
    ):
        load_graph(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(edges=np.zeros((3, 4), int)), r"expected \(2, edges\) and a class for each of 5 nodes"),
        (dict(edges=np.full((2, 4), 5)), r"edges: expected node numbers in \[0, 5\)"),
        (dict(classes=np.zeros(4, int)), r"expected \(2, edges\) and a class for each of 5 nodes"),
        (dict(classes=np.array([0, 1, -1, 0, 1])), "valid: expected nodes with known classes only"),
        (
            dict(classes=np.array([0, 1, 0, 0, 9])),
            "classes: expected at most 255, and only classes of training nodes, got 9",
        ),
        (dict(train=np.array([], int)), "train: expected integers in 1 dimensions"),
        (dict(test=np.array([0.5])), "test: expected integers in 1 dimensions, got float64"),
        (dict(test=np.array([-1])), r"test: expected node numbers in \[0, 5\)"),
        (dict(train=np.array([0, 1, 3])), "train, valid, test: expected each node at most once, in one part"),
        (dict(test=np.array([3, 3])), "train, valid, test: expected each node at most once, in one part"),
        (dict(edges=np.array([[0], [1]])), "edges: expected each edge once in both directions, without self-loops"),
        (dict(edges=np.array([[0, 1, 0, 1], [1, 0, 1, 0]])), "edges: expected each edge once in both directions"),
        (dict(edges=np.array([[0], [0]])), "edges: expected each edge once in both directions, without self-loops"),
        (dict(features=np.full((5, 2), np.nan)), "features: expected finite numbers"),
        (dict(features=np.full((5, 2), 1e300)), "features: expected finite numbers"),
        (dict(classes=np.array([0, 10**11, 0, 1, 0])), "classes: expected at most 255"),
        (dict(classes=np.array([0, 2**63 + 5, 0, 1, 0], np.uint64)), "classes: expected at most 255"),
        (dict(features=np.zeros(5)), r"features: expected numbers in 2 dimensions, got float64 \(5,\)"),
        (dict(features=np.array([[object()]] * 5)), "is not a valid .npz file of numbers: features.npy: Object arrays"),
    ],
)
def test_an_npz_that_is_no_graph_is_told(changes, message, tmp_path):
    good = dict(features=np.eye(5), edges=np.array([[0, 1], [1, 0]]), classes=np.array([0, 1, 0, 1, 0]),
                train=np.array([0, 1]), valid=np.array([2]), test=np.array([3, 4]))  # fmt: skip
    np.savez(tmp_path / "g.npz", **good)
    assert load_graph(str(tmp_path / "g.npz")).nodes == 5
    np.savez(tmp_path / "g.npz", **good | changes)
    with pytest.raises(UsageError, match=message):
        load_graph(str(tmp_path / "g.npz"))
