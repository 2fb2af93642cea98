"""What is installed: with the kernels where there is a compiler, and without them where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USE = """
import torch, subquad
import importlib.resources
report = importlib.resources.files("subquad_lab.report")
for name in ("page.html", "parts/claims.html", "assets/page.css", "data/heads.bin", "vendor/uplot.js"):
    assert (report / name).is_file(), name
assert (report / "vendor/uplot.LICENSE").is_file()
from subquad import Taylor, attention, native
q = k = v = torch.ones(1, 2, 300, 8)
assert attention(q, k, v, is_causal=True, method=Taylor(2)).allclose(v)
print(subquad.__file__, native.status(), sep="|")
"""


def installed(folder: Path, **environment: str) -> tuple[str, str, str]:
    """A wheel is built from a copy of the sources, installed beside nothing else of ours, and used from elsewhere."""
    copy = folder / "copy"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "runs", "*.so", "*.egg-info", "benchmarks")
    )
    pins = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_BUILD_CONSTRAINT": str(ROOT / "constraints.txt")}
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    clean = {name: value for name, value in os.environ.items() if name not in ("SUBQUAD_NATIVE", "LD_PRELOAD")}
    subprocess.run(
        [*pip, "wheel", "--no-deps", "-w", str(folder), str(copy)], env=clean | pins | environment, check=True
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], env=clean, check=True)
    used = subprocess.run([sys.executable, "-c", USE], env=clean | {"PYTHONPATH": str(folder / "site")}, cwd=folder,
                          capture_output=True, text=True, check=True)  # fmt: skip
    place, status = used.stdout.strip().split("|")
    return wheel.name, place, status


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_wheel_brings_the_kernels(tmp_path) -> None:
    """Compiled without optimization, in a sixth of the time: the kernels that other tests use were built with it."""
    compiler = tmp_path / "quick-c++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("c++")} "$@" -O0\n')
    compiler.chmod(0o755)
    name, place, status = installed(tmp_path, CC=str(compiler), CXX=str(compiler))
    assert "-cp311-abi3-" in name and place.startswith(str(tmp_path / "site"))
    assert status.startswith("native kernels, ")


def test_without_a_compiler_it_installs_and_uses_torch(tmp_path) -> None:
    _, place, status = installed(tmp_path, CC="no-such-compiler", CXX="no-such-compiler")
    assert place.startswith(str(tmp_path / "site"))
    assert status == "torch (not compiled: no C++ compiler was found when subquad was installed)"
