"""The library needs torch alone, and never the lab; each check has a second one that shows it can fail."""

import json
import subprocess
import sys
from pathlib import Path

# Notes every top-level package that a module of the watched package asks for. What is in sys.modules would
# not do: torch loads numpy by itself, so that an `import numpy` of ours would leave no trace there.
WATCH = """
import builtins, json, sys
import torch

package, folder = sys.argv[1:]
sys.path.insert(0, folder)
asked = set()
original = builtins.__import__

def watch(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if level == 0 and importer.partition(".")[0] == package:
        asked.add(name.partition(".")[0])
    return original(name, globals, locals, fromlist, level)

builtins.__import__ = watch
original(package)
allowed = {"torch", package} | set(sys.stdlib_module_names)
lab = {name for name in sys.modules if name.partition(".")[0] == "subquad_lab"}
print(json.dumps(sorted(asked - allowed | lab)))
"""

# Without the collector, which may happen to go through all objects of torch in between.
IMPORT_SECONDS = """
import gc
import time
gc.disable()
start = time.process_time()
import torch
middle = time.process_time()
import subquad
print(middle - start, time.process_time() - middle)
"""

SOURCE = Path(__file__).parents[1] / "src"


def python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def foreign_imports(package: str, folder: Path) -> list[str]:
    return json.loads(python(WATCH, package, str(folder)))


def test_library_imports_only_torch_and_the_standard_library():
    assert foreign_imports("subquad", SOURCE) == []


def test_a_forbidden_import_is_noticed(tmp_path):
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "__init__.py").write_text("import math\nimport torch\nfrom planted import _deep\n")
    (planted / "_deep.py").write_text("import numpy\nfrom subquad_lab import UsageError\n")
    assert foreign_imports("planted", tmp_path) == ["numpy", "subquad_lab"]


def test_library_adds_little_to_the_import_of_torch():
    """At most 0.2 s, or a quarter of torch's time on slow machines; once in three, as other work can make it slower."""
    pairs = [map(float, python(IMPORT_SECONDS).split()) for _ in range(3)]
    assert any(own < max(0.2, 0.25 * of_torch) for of_torch, own in pairs)
