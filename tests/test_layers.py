"""The order of the layers of library and lab, and the size of their parts, read from the syntax trees.

Each rule has a second test that plants a fault and sees it reported.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import layers  # noqa: E402

SOURCE = ROOT / "src"
LIBRARY, LAB = SOURCE / "subquad", SOURCE / "subquad_lab"
METHODS = {
    "Exact", "Taylor", "RandomFeatures", "Linear", "Separable", "Multipole", "Auto", "UserMap", "Window", "BlockSparse",
    "SparseMethod", "Hybrid",
}  # fmt: skip
# Lines of code, without blank lines, comments and docstrings.
CORE = ("methods", "_calls", "_engines", "native", "attention.py", "_torch_internals.py")
MAX_CODE_LINES = {CORE: 5780, ("planning",): 2800, ("distributed",): 1320, ("integrations",): 1560}
MAX_FUNCTION_LINES, MAX_POSITIONAL = 60, 8
MAX_ISINSTANCE_LINES, MAX_LEVELS = 36, {"subquad": 9, "subquad_lab": 10}
# Functions whose arguments are in the order of torch or of flash_attn.
OTHERS_SIGNATURES = {
    "attention", "MultiheadAttention.__init__", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
}  # fmt: skip


both = pytest.mark.parametrize("package", layers.PACKAGES)


@both
def test_layers_import_only_earlier_ones_and_never_inside_a_function(package) -> None:
    imports = layers.imports_of(SOURCE, package)
    assert len(imports) > 100 and layers.faults_of(imports) == []


@both
def test_there_is_no_cycle(package) -> None:
    modules = layers.modules_of(SOURCE, package)
    levels = layers.levels_of(layers.imports_of(SOURCE, package), modules)  # raises if there is a cycle
    assert levels.keys() == modules.keys() and min(levels.values()) == 1


@both
def test_the_graph_of_packages_has_few_levels(package) -> None:
    assert max(layers.package_levels(layers.imports_of(SOURCE, package), package).values()) <= MAX_LEVELS[package]


def test_the_lab_imports_only_public_names_of_the_library() -> None:
    assert layers.private_imports(SOURCE) == []


def test_only_the_command_line_of_the_lab_defers_imports() -> None:
    deferred = {i.importer for package in layers.PACKAGES for i in layers.imports_of(SOURCE, package) if i.is_deferred}
    assert deferred == {"subquad_lab.cli"}


def test_the_kernels_import_nothing_of_ours() -> None:
    outside = {i for i in layers.imports_of(SOURCE) if i.importer.startswith("subquad.native")}
    assert {i.imported for i in outside if not i.imported.startswith("subquad.native")} == set()


def planted(tmp_path: Path, files: dict[str, str], package: str = "subquad") -> Path:
    for name, text in files.items():
        path = tmp_path / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from subquad.planning import plan\n", "a later layer"),
        ("def f():\n    from subquad.native import x\n", "inside a function"),
        ("def f():\n    import subquad.native\n", "inside a function"),
        ("if 1:\n    import subquad.planning.plan\n", "a later layer"),
    ],
)
def test_a_planted_import_is_reported(tmp_path, text, fault) -> None:
    files = {"methods/taylor.py": text, "planning/plan.py": "", "planning/__init__.py": "", "native/__init__.py": ""}
    found = layers.faults_of(layers.imports_of(planted(tmp_path, files)))
    assert len(found) == 1 and fault in found[0] and "subquad.methods.taylor" in found[0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from subquad_lab.commands import plan\n", "a later layer"),
        ("def f():\n    from subquad_lab import UsageError\n", "inside a function"),
    ],
)
def test_a_planted_import_of_the_lab_is_reported(tmp_path, text, fault) -> None:
    files = {"training/loop.py": text, "commands/plan.py": "", "__init__.py": "", "cli.py": text}
    found = layers.faults_of(layers.imports_of(planted(tmp_path, files, "subquad_lab"), "subquad_lab"))
    assert len(found) == 1 and fault in found[0] and "subquad_lab.training.loop" in found[0]


@pytest.mark.parametrize(
    ("text", "is_private"),
    [
        ("import subquad\nfrom subquad import plan\n", False),
        ("from subquad.planning import Shape\n", False),
        ("from subquad.planning import other\n", True),
        ("from subquad.planning.shape import Shape\n", True),
        ("from subquad._calls import Call\n", True),
        ("import subquad._calls\n", True),
    ],
)
def test_a_planted_private_import_is_reported(tmp_path, text, is_private) -> None:
    files = {"__init__.py": '__all__ = ["plan"]\n', "planning/__init__.py": '__all__ = ["Shape"]\nother = 1\n',
             "planning/shape.py": "Shape = 1\n", "_calls/__init__.py": '__all__ = ["Call"]\n'}  # fmt: skip
    planted(tmp_path, files)
    found = layers.private_imports(planted(tmp_path, {"bench.py": text}, "subquad_lab"))
    assert [line.startswith("subquad_lab.bench, line") for line in found] == [True] * is_private


def test_a_module_in_no_layer_is_reported() -> None:
    with pytest.raises(ValueError, match=r"subquad_lab\.helpers: in no layer"):
        layers.layer_of("subquad_lab.helpers")


def test_a_planted_cycle_is_reported(tmp_path) -> None:
    files = {"methods/a.py": "import subquad.methods.b\n", "methods/b.py": "def f():\n    import subquad.methods.a\n"}
    root = planted(tmp_path, files)
    with pytest.raises(ValueError, match=r"cycle: subquad\.methods\.a -> subquad\.methods\.b -> subquad\.methods\.a"):
        layers.levels_of(layers.imports_of(root), layers.modules_of(root))


# --- Sizes ------------------------------------------------------------------------------------------------------------


def code_lines(text: str) -> int:
    """Return how many lines hold code: not blank, not a comment, not a docstring."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            documentation |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = (t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in skipped)
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - documentation)


def files_of(parts: tuple[str, ...]) -> list[Path]:
    paths = (LIBRARY / part for part in parts)
    return [file for path in paths for file in ([path] if path.suffix else sorted(path.rglob("*.py")))]


@pytest.mark.parametrize("parts", MAX_CODE_LINES, ids=lambda parts: parts[0])
def test_parts_keep_to_their_size(parts) -> None:
    files = files_of(parts)
    assert files and all(file.exists() for file in files)
    assert sum(code_lines(file.read_text()) for file in files) <= MAX_CODE_LINES[parts]


def test_lines_of_code_are_counted() -> None:
    assert (
        code_lines(
            '"""Doc.\n\nMore.\n"""\n\n# comment\nx = [\n    1,\n]  # here\n\ndef f():\n    "doc"\n    return x\n'
        )
        == 5
    )


def functions_in(text: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions with their qualified names; overloads left out."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef) and not any("overload" in ast.dump(d) for d in child.decorator_list):
                yield name, child
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            yield from visit(child, f"{name}." if named else prefix)

    return visit(ast.parse(text), "")


def long_functions(text: str) -> list[str]:
    found = []
    for name, node in functions_in(text):
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        if node.end_lineno - body[0].lineno + 1 > MAX_FUNCTION_LINES:
            found.append(name)
    return found


def wide_functions(text: str) -> list[str]:
    """Return functions with many positional parameters, `self` not counted."""
    counts = {name: len([a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")])
              for name, node in functions_in(text)}  # fmt: skip
    return [name for name, count in counts.items() if count > MAX_POSITIONAL and name not in OTHERS_SIGNATURES]


def test_functions_are_short_and_narrow() -> None:
    for file in sorted([*LIBRARY.rglob("*.py"), *LAB.rglob("*.py")]):
        assert (file.name, long_functions(file.read_text())) == (file.name, [])
        assert (file.name, wide_functions(file.read_text())) == (file.name, [])


def test_a_long_and_a_wide_function_are_reported() -> None:
    assert long_functions("def f():\n" + "    x = 1\n" * 61) == ["f"]
    assert long_functions("def f():\n" + "    x = 1\n" * 60) == []
    assert wide_functions("class A:\n    def f(self, a, b, c, d, e, f, g, h, i): pass\n") == ["A.f"]
    assert wide_functions("def f(a, b, c, d, e, f, g, h, *, i): pass\n") == []


def method_checks(text: str) -> list[int]:
    """Return the lines with isinstance(..., <a method class>)."""
    lines = set()
    for node in ast.walk(ast.parse(text)):
        is_check = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance"
        if is_check and {x.id for x in ast.walk(node.args[1]) if isinstance(x, ast.Name)} & METHODS:
            lines.add(node.lineno)
    return sorted(lines)


def test_methods_answer_for_themselves() -> None:
    found = [f"{file.relative_to(LIBRARY)}:{line}" for file in sorted(LIBRARY.rglob("*.py"))
             for line in method_checks(file.read_text())]  # fmt: skip
    assert len(found) <= MAX_ISINSTANCE_LINES, found


def test_a_check_of_a_class_is_counted() -> None:
    text = "isinstance(x, Taylor | Exact)\nisinstance(x, int)\nisinstance(\n  y, (Linear, str))\n"
    assert method_checks(text) == [1, 3]
