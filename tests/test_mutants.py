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


def load_tool(name):
    spec = spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutations, executed_lines = load_tool("mutations"), load_tool("executed_lines")
find_places, make_mutants, mutate = mutations.find_places, mutations.make_mutants, mutations.mutate


def run_python(folder, code, *arguments):
    """Run code in another process that finds the tools and the modules of a folder; pytest loads no plugins there."""
    path = os.pathsep.join([str(folder), str(ROOT / "tools")])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )


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
import mutants, pytest
from mutations import Mutant

core, *tests = (Path(name).resolve() for name in ("subquad/deep/core.py", "test_slow.py", "test_quick.py", "test_3.py"))
recorded = mutants.record(tests, [core])
mutants.TIMEOUT_FACTOR, mutants.TIMEOUT_SECONDS = 0, 1.5
changes = [json.loads(argument) for argument in sys.argv[1:]]
made = [Mutant(core, line, old, new, core.read_text().replace(old, new).encode()) for line, old, new in changes]
codes = {f"{mutant.line}: {mutant.after}": code for mutant, code in mutants.run(made[:-1], recorded, jobs=2)}
mutants.HANG_SECONDS = 1
codes |= {f"{mutant.line}: {mutant.after}": code for mutant, code in mutants.run(made[-1:], recorded, jobs=2)}
print(json.dumps([{each.tests.name: sorted(each.lines[str(core)]) for each in recorded}, codes]))
"""
LIBRARY = """def twice(x):
    return x * 2


def thrice(x):
    return x * 3


def unused(x):
    return x * 4
"""
TEST = """
from time import process_time
from subquad.deep.core import {name}

def test():
    assert {name}({x}) == {expected}
    begin = process_time()
    while process_time() < begin + {seconds}: pass
"""


def test_verdicts(tmp_path):
    """On a library of three functions, in a process that never loads torch."""
    (tmp_path / "subquad/deep").mkdir(parents=True)
    (tmp_path / "subquad/__init__.py").touch()
    (tmp_path / "subquad/deep/__init__.py").touch()
    (tmp_path / "subquad/deep/core.py").write_text(LIBRARY)
    for name, *values in (("slow", "twice", 3, 6, 0.4), ("quick", "twice", 2, 4, 0), ("3", "thrice", 5, 15, 0.2)):
        test = TEST.format(**dict(zip(("name", "x", "expected", "seconds"), values, strict=True)))
        (tmp_path / f"test_{name}.py").write_text(test)
    expected = [
        ((2, "x * 2", "2 * x"), 0),
        ((2, "x * 2", "x - 2"), 1),  # in the quick test
        ((2, "x * 2", "x + 2"), 1),  # in the slow test
        ((6, "x * 2", "x - 2"), 0),  # Only the third test executes this line, and it does not execute the change.
        ((10, "x * 4", "x * 5"), None),
        ((2, "x * 2", "any(iter(int, 1))"), -signal.SIGPROF),
        ((2, "x * 2", "__import__('time').sleep(2) or x * 2"), 0),  # Waiting does not count as processor time.
        ((2, "x * 2", "__import__('time').sleep(60)"), -signal.SIGALRM),
    ]
    found = run_python(tmp_path, VERDICTS, *(json.dumps(change) for change, _ in expected))
    recorded, codes = json.loads(found.stdout.splitlines()[-1])
    definitions = {1, 5, 9}  # which an import executes
    lines = {"test_quick.py": {2}, "test_3.py": {6}, "test_slow.py": {2}}  # the quickest first
    assert [(name, set(numbers)) for name, numbers in recorded.items()] == [
        (name, definitions | numbers) for name, numbers in lines.items()
    ]
    assert codes == {f"{line}: {new}": code for (line, _, new), code in expected}


def test_failing_tests_are_named_before_any_mutation(tmp_path):
    (tmp_path / "test_wrong.py").write_text("def test():\n    assert False")
    code = "from pathlib import Path; import mutants; print(mutants.record([Path('test_wrong.py')], []))"
    found = run_python(tmp_path, code)
    assert found.stdout == "[]\n"
    assert found.stderr.startswith("Fails without any mutation") and "python -m pytest test_wrong.py" in found.stderr


EXECUTED = """
import sys, threading
from pathlib import Path
import torch
from executed_lines import record_lines

path = Path("sample.py").resolve()
lines = record_lines([path])
import sample
sample.called(torch.ones(1))
threading.Thread(target=sample.in_thread).start()
torch.compile(sample.compiled, backend="eager", fullgraph=True)(torch.ones(1))
print(*sorted(lines[str(path)]))
"""
SAMPLE = """
def called(x):
    if x > 2:
        return x
    return -x

def in_thread():
    return 1

def compiled(x):
    return inlined(x)

def inlined(x):
    return x + 1

def unused():
    return 2
"""


def test_executed_lines_include_threads_and_compiled_functions(tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE)
    found = run_python(tmp_path, EXECUTED)
    executed = {int(number) for number in found.stdout.split()}
    source = SAMPLE.splitlines()
    expected = {"    if x > 2:", "    return -x", "    return 1", "    return inlined(x)", "    return x + 1"}
    assert {source[number - 1] for number in executed if source[number - 1].startswith(" ")} == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [(1, {1, 2}), (2, {1, 2}), (3, {3, 6}), (4, {4, 5}), (5, {4, 5}), (6, {3, 6}), (7, {7})],
)
def test_lines_of_a_statement(line, expected):
    source = b"def f(a,\n      b=1):\n    if (a\n        ):x = (1,\n            2)\n    else:\n        x = 3\n"
    assert executed_lines.statement_lines(source, line) == expected


NAMES = """
import json
from mutants import CORE, LIBRARY, SPARED_FILES, label_of, module_of
named = [(name, label_of(LIBRARY / name), module_of(LIBRARY / name)) for name in CORE]
print(json.dumps([named, sorted(SPARED_FILES)]))
"""


def test_every_file_of_the_core_is_planted_by_its_full_name():
    named, spared = json.loads(run_python(ROOT / "tools", NAMES).stdout)
    names, labels, modules = zip(*named, strict=True)
    assert sorted(ROOT / "src/subquad" / name for name in (*names, *spared)) == sorted(FILES)
    assert labels == names and len(set(modules)) == len(modules)
    assert {"subquad.attention", "subquad._engines", "subquad._engines.features.engine"} <= set(modules)
    for name, module in zip(names, modules, strict=True):
        spec = find_spec(module)
        assert spec is not None and Path(spec.origin) == ROOT / "src/subquad" / name
