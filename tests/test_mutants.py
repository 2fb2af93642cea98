"""The tool that breaks the library: its breaks are small, repeatable and only where a result can depend on them."""

import ast
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("methods", "_calls", "_engines")
FILES = [
    ROOT / "src/subquad/attention.py",
    *sorted(x for name in FOLDERS for x in (ROOT / "src/subquad" / name).rglob("*.py")),
]
spec = spec_from_file_location("mutations", ROOT / "tools/mutations.py")
mutations = module_from_spec(spec)
spec.loader.exec_module(mutations)
find_places, make_mutants, mutate = mutations.find_places, mutations.make_mutants, mutations.mutate


def changes(source: str, folder: Path) -> set[str]:
    """Every mutant of a source, as text."""
    (path := folder / "source.py").write_text(source + "\n")
    places = find_places(path.read_bytes())
    return {mutate(path, place, new).source.decode().rstrip() for place in places for new in place.choices}


def statements(tree: ast.Module) -> list[list[str]]:
    """Of each statement what it says itself, without the statements inside it."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
    return [[ast.dump(part) for part in ast.iter_child_nodes(x) if not isinstance(part, ast.stmt)] for x in found]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b"}),
        ("a == b == c", {"a != b == c", "a == b != c"}),
        ("a is not None", {"a is None"}),
        ("a not in b", {"a in b"}),
        ("(a  # not + but\n + b)", {"(a  # not + but\n - b)"}),
        ("a += b", {"a -= b"}),
        ("(a) * (b // c)", {"(a) / (b // c)", "(a) * (b % c)"}),
        ("a and b and c", {"a or b and c", "a and b or c"}),
        ("x[0]", {"x[1]"}),
        ("x[-1]", {"x[0]", "x[-2]"}),
        ("x = 1.0", {"x = 2.0", "x = 0.0"}),
        ("x[:n]", {"x[:n + 1]"}),
        ("f(True)", {"f(False)"}),
        ("f(x, mask=mask)", {"f(x, mask=None)"}),
        ("a if not b else -c", {"a if b else -c", "a if not b else c"}),
        ("if a.b:\n    pass", {"if not (a.b):\n    pass"}),
        ("if a is b:\n    pass", {"if a is not b:\n    pass"}),
        ("min(a, x.amax())", {"max(a, x.amax())", "min(a, x.amin())"}),
        ("sqrt((a).exp().b)", {"((a).exp().b)", "sqrt((a).b)"}),
    ],
)
def test_what_becomes_of_an_expression(source, expected, tmp_path):
    assert changes(source, tmp_path) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""1 < 2"""',
        'x = "a" "b"',
        "x: Literal[1] | None",
        "def f(x: Literal[1] | None) -> Literal[True]:\n    '1 + 1'",
        "@cache(maxsize=64)\ndef f(): pass",
        "@dataclass(frozen=True)\nclass C: pass",
        "@overload\ndef f(x=1): ...",
        "assert a is not None, 1 + 1",
        'raise ValueError(f"{a + 1}" + "b")',
        'y = f"{a + 1}"',
        'warnings.warn("a" + b, stacklevel=3)',
        "FEW_TOKENS = 64",
        "def traits(self):\n    return 1 + 2",
        'hint = "a" if b else "c"',
        "zip(a, b, strict=True)",
    ],
)
def test_what_is_never_changed(source, tmp_path):
    assert changes(source, tmp_path) == set()


def test_the_seed_decides():
    first = make_mutants(FILES, 200, seed=0)
    assert len(first) == 200
    assert first == make_mutants(FILES, 200, seed=0)
    assert first != make_mutants(FILES, 200, seed=1)


def test_files_have_their_share_and_no_place_is_taken_twice(tmp_path):
    small, large = tmp_path / "small.py", tmp_path / "large.py"
    small.write_text("a < b\n" * 10)
    large.write_text("a < b\n" * 30)
    mutants = make_mutants([small, large], 20, seed=0)
    assert [mutant.path for mutant in mutants] == [small] * 5 + [large] * 15
    assert len({(mutant.path, mutant.line) for mutant in mutants}) == 20
    assert len(make_mutants([small, large], 1000, seed=0)) == 40


def test_mutants_of_the_library_differ_in_one_statement():
    originals = {path: statements(ast.parse(path.read_bytes())) for path in FILES}
    for mutant in make_mutants(FILES, 60, seed=2):
        pairs = zip(originals[mutant.path], statements(ast.parse(mutant.source)), strict=True)
        assert sum(a != b for a, b in pairs) == 1, mutant[:4]
        assert mutant.before in " ".join(mutant.path.read_text().split()), mutant[:4]
        assert mutant.after != mutant.before, mutant[:4]


def test_text_of_the_library_stays():
    for path in FILES:
        source = path.read_bytes()
        places = find_places(source)
        starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
        for node in ast.walk(ast.parse(source)):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arg):
                start, end = (
                    starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset,
                )
                inside = [place for place in places if start <= place.start < end]
                assert not inside, (path.name, node.lineno, inside)


VERDICTS = """
import json, sys
from pathlib import Path
import pytest
from mutants import run
from mutations import Mutant

seconds, *sources = sys.argv[1:]
mutants = [Mutant(Path("subquad/deep/core.py").resolve(), 1, "", "", source.encode()) for source in sources]
stages = [(["test_quick.py"], float(seconds)), (["test_slow.py"], float(seconds))]
print(json.dumps({mutant.source.decode(): code for mutant, code in run(mutants, stages, jobs=2)}))
"""


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (60, {"twice = lambda x: x * 2": 0, "twice = lambda x: x - 2": 1, "twice = lambda x: x + 2": 2}),
        (0.5, {"while True: pass": -signal.SIGALRM}),
    ],
    ids=["tests", "time"],
)
def test_verdicts(seconds, expected, tmp_path):
    """On a library of one function, in a process that never loads torch."""
    (tmp_path / "subquad/deep").mkdir(parents=True)
    (tmp_path / "subquad/__init__.py").touch()
    (tmp_path / "subquad/deep/__init__.py").touch()
    (tmp_path / "subquad/deep/core.py").write_text("raise ImportError('not the mutant')")
    for name, number in (("quick", 2), ("slow", 3)):
        test = f"from subquad.deep.core import twice\n\ndef test():\n    assert twice({number}) == {2 * number}"
        (tmp_path / f"test_{name}.py").write_text(test)
    found = subprocess.run(
        [sys.executable, "-c", VERDICTS, str(seconds), *expected],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tools")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == expected


NAMES = """
import json
from mutants import CORE, LIBRARY, SPARED_FILES, label_of, module_of
named = [(name, label_of(LIBRARY / name), module_of(LIBRARY / name)) for name in CORE]
print(json.dumps([named, sorted(SPARED_FILES)]))
"""


def test_every_file_of_the_core_is_planted_by_its_full_name():
    found = subprocess.run(
        [sys.executable, "-c", NAMES], cwd=ROOT / "tools", capture_output=True, text=True, check=True
    ).stdout
    named, spared = json.loads(found)
    names, labels, modules = zip(*named, strict=True)
    assert sorted(ROOT / "src/subquad" / name for name in (*names, *spared)) == sorted(FILES)
    assert labels == names and len(set(modules)) == len(modules)
    assert {"subquad.attention", "subquad._engines", "subquad._engines.features.engine"} <= set(modules)
    for name, module in zip(names, modules, strict=True):
        spec = find_spec(module)
        assert spec is not None and Path(spec.origin) == ROOT / "src/subquad" / name
