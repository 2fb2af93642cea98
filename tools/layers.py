"""Print the import graphs of the library and of the lab, level by level: `python tools/layers.py [FOLDER]`.

A module is on the level after the highest one that it imports; level 1 imports nothing of its own package. Packages are
the layers of the design, in this order; `tests/test_layers.py` checks that each imports only earlier ones, and that the
lab imports only public names of the library.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1] / "src"
# Each layer may import only itself and earlier ones. The name of a package means only its `__init__.py`.
LAYERS = [
    "subquad._torch_internals", "subquad.native", "subquad.methods", "subquad._calls", "subquad._engines",
    "subquad.planning", "subquad.attention", "subquad.nn", "subquad.distributed", "subquad.integrations",
    "subquad.testing", "subquad", "subquad_lab", "subquad_lab.system", "subquad_lab.options", "subquad_lab.figures",
    "subquad_lab.data", "subquad_lab.models", "subquad_lab.training", "subquad_lab.experiments", "subquad_lab.theory",
    "subquad_lab.report", "subquad_lab.commands", "subquad_lab.cli", "subquad_lab.__main__",
]  # fmt: skip
PACKAGES = ("subquad", "subquad_lab")
MAY_DEFER = {"subquad_lab.cli"}  # so that `subquad --help` does not wait for torch


class Import(NamedTuple):
    importer: str
    imported: str
    line: int
    is_deferred: bool  # inside a function


def modules_of(root: Path, package: str = "subquad") -> dict[str, Path]:
    """Return the files of all modules by their dotted names."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(root: Path, package: str = "subquad") -> list[Import]:
    """Return all imports of our own modules, also those inside functions and under TYPE_CHECKING."""
    modules = modules_of(root, package)
    return [found for name, path in modules.items() for found in _imports_in(name, path, modules)]


def _imports_in(importer: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    def visit(node: ast.AST, is_deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = is_deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                joined = [f"{child.module}.{alias.name}" for alias in child.names]
                names = [name if name in modules else child.module for name in joined]
            elif isinstance(child, ast.ImportFrom):
                raise ValueError(f"{path}:{child.lineno}: a relative import; expected an absolute one")
            for name in dict.fromkeys(names):
                if name in modules and name != importer:
                    yield Import(importer, name, child.lineno, is_deferred)
            yield from visit(child, inside)

    return visit(ast.parse(path.read_text()), False)


def levels_of(imports: list[Import], modules: dict[str, Path]) -> dict[str, int]:
    """Return the level of each module; raise ValueError naming a cycle if there is one."""
    below: dict[str, set[str]] = {name: set() for name in modules}
    for found in imports:
        below[found.importer].add(found.imported)
    levels: dict[str, int] = {}

    def level(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            raise ValueError(f"cycle: {' -> '.join((*path[path.index(name) :], name))}")
        if name not in levels:
            levels[name] = 1 + max((level(other, (*path, name)) for other in sorted(below[name])), default=0)
        return levels[name]

    for name in modules:
        level(name, ())
    return levels


def layer_of(module: str) -> int:
    """Return the index of a module's layer in LAYERS."""
    for i, layer in enumerate(LAYERS):
        if module == layer or (layer not in PACKAGES and module.startswith(f"{layer}.")):
            return i
    raise ValueError(f"{module}: in no layer; expected its package in LAYERS of tools/layers.py")


def package_levels(imports: list[Import], package: str = "subquad") -> dict[str, int]:
    """Return the level of each layer of a package in the graph of layers."""
    edges = {(layer_of(found.importer), layer_of(found.imported)) for found in imports}
    found: dict[int, int] = {}
    for i, layer in enumerate(LAYERS):
        if layer.partition(".")[0] == package:
            found[i] = 1 + max((found[b] for a, b in edges if a == i and b < i), default=0)
    return {LAYERS[i]: level for i, level in found.items()}


def faults_of(imports: list[Import]) -> list[str]:
    """Return every import that the rules forbid."""
    found = []
    for item in imports:
        where = f"{item.importer}, line {item.line}, imports {item.imported}"
        if item.is_deferred and item.importer not in MAY_DEFER:
            found.append(f"{where} inside a function")
        if layer_of(item.imported) > layer_of(item.importer):
            found.append(f"{where}, a later layer")
    return found


def private_imports(root: Path) -> list[str]:
    """Return every import of a non-public library name in the lab.

    A name is public if no part of its module's name begins with an underscore, and the module's `__all__` lists it.
    """
    library = modules_of(root, "subquad")
    public = {name: _exported(path) for name, path in library.items() if "._" not in name}
    found = []
    for name, path in modules_of(root, "subquad_lab").items():
        for node in ast.walk(ast.parse(path.read_text())):
            taken: list[tuple[str, str | None]] = []
            if isinstance(node, ast.Import):
                taken = [(alias.name, None) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                taken = [(node.module, alias.name) for alias in node.names]
            for module, what in taken:
                is_ours = module.partition(".")[0] == "subquad"
                if is_ours and not (public.get(module) and (what is None or what in public[module])):
                    found.append(f"{name}, line {node.lineno}, imports {module}" + (f": {what}" if what else ""))
    return found


def _exported(path: Path) -> set[str]:
    """Return the names in a module's `__all__`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return set(ast.literal_eval(node.value))
    return set()


def _print_layer(layer: str, imports: list[Import], levels: dict[str, int]) -> None:
    """Print the modules of a layer, each with its imports from the same layer."""
    names = [name for name in levels if LAYERS[layer_of(name)] == layer]
    print(f"  {layer}" + (f": {len(names)} modules" if len(names) > 1 else ""))
    for name in sorted(names, key=lambda name: (levels[name], name)) if len(names) > 1 else ():
        used = sorted({i.imported for i in imports if i.importer == name and i.imported in names})
        short = [other.removeprefix(f"{layer}.") for other in used]
        print(f"    {name.removeprefix(f'{layer}.')}" + (f" <- {', '.join(short)}" if short else ""))


def report(root: Path, package: str) -> int:
    """Print the levels of a package, and return the number of violations."""
    imports, modules = imports_of(root, package), modules_of(root, package)
    inside, of_layers = levels_of(imports, modules), package_levels(imports, package)
    for level in range(1, max(of_layers.values()) + 1):
        print(f"level {level}")
        for layer in (name for name, found in of_layers.items() if found == level):
            _print_layer(layer, imports, inside)
    faults = faults_of(imports) + (private_imports(root) if package == "subquad_lab" else [])
    print(f"{package}: {len(modules)} modules, {len(imports)} imports, {max(of_layers.values())} levels of packages, "
          f"{max(inside.values())} levels of modules, no cycle, {len(faults)} violations")  # fmt: skip
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return len(faults)


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    try:
        return int(sum(report(root, package) for package in PACKAGES) > 0)
    except ValueError as error:  # a cycle, or a module in no layer
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
