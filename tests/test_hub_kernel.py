"""tools/hub_kernel.py: the kernel computes what the library computes, however it is loaded."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import hub_kernel  # noqa: E402

BY_FOLDER = """
import importlib.util, json, sys
folder = sys.argv[1] + "/build/torch-cpu"
name = json.load(open(folder + "/metadata.json"))["id"]
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
sys.modules[name] = kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""
BY_PACKAGE = """
import os, sys
os.environ |= {"LOCAL_KERNELS": "someone/subquad=" + sys.argv[1], "HF_HUB_OFFLINE": "1"}
import kernels
kernel = kernels.get_kernel("someone/subquad", version=1)
"""
COMPARE = """
import torch
assert "subquad" not in sys.modules
q, k, v = torch.randn(3, 1, 2, 40, 8).requires_grad_().unbind()
outputs = [kernel.attention(q, k, v, is_causal=True, method=method) for method in (kernel.Taylor(2), kernel.Exact())]
flash = kernel.flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
import subquad
for output, method in zip(outputs, ("taylor", "exact")):
    assert (output - subquad.attention(q, k, v, is_causal=True, method=method)).abs().max() < 1e-5
assert (flash.transpose(1, 2) - outputs[1]).abs().max() < 1e-5
print("equal")
"""


@pytest.mark.parametrize("way", ["by folder", "by package"])
def test_the_kernel_computes_what_the_library_computes(way, tmp_path):
    if way == "by package" and not find_spec("kernels"):
        pytest.skip("the kernels package is not installed; pip install kernels")
    hub_kernel.write(tmp_path / "kernel")
    program = (BY_FOLDER if way == "by folder" else BY_PACKAGE) + COMPARE
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "kernel")], capture_output=True, text=True, check=False
    )
    assert found.stdout == "equal\n", found.stderr


def test_the_layout_is_complete_and_imports_nothing_by_its_old_name(tmp_path):
    name = hub_kernel.write(tmp_path)
    metadata = json.loads((tmp_path / "build/torch-cpu/metadata.json").read_text())
    assert metadata["id"] == name and metadata["name"] == "subquad"
    assert 'name = "subquad"' in (tmp_path / "build.toml").read_text()
    built, sources = tmp_path / "build/torch-cpu", tmp_path / "torch-ext/subquad"
    files = {path.relative_to(sources) for path in sources.rglob("*.py")}
    assert files == {path.relative_to(built) for path in built.rglob("*.py")} and len(files) > 50
    assert not any(path.parts[:2] == ("integrations", "transformers") for path in files)
    for path in files:
        lines = (sources / path).read_text().splitlines()
        assert [line for line in lines if line.lstrip().startswith(("from subquad", "import subquad"))] == []


def test_the_name_follows_the_contents(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from subquad.part import x\n")
    (package / "part.py").write_text("x = 1\n")
    first = hub_kernel.write(tmp_path / "kernel", package)
    (package / "part.py").write_text("x = 2\n")
    assert hub_kernel.write(tmp_path / "kernel", package) != first
    assert (tmp_path / "kernel/torch-ext/subquad/__init__.py").read_text().startswith("from .part import x\n")
