"""`python -m subquad.native`, which works where only the library is installed."""

import os
import runpy
import subprocess
import sys

import pytest

from subquad import native


def test_it_prints_the_status(capsys) -> None:
    runpy.run_module("subquad.native", run_name="__main__")
    assert capsys.readouterr().out == f"{native.status()}\n"


@pytest.mark.parametrize(("wanted", "status"), [
    ("0", "torch (turned off by SUBQUAD_NATIVE=0)\n"),
    ("missing.so", "torch (missing.so cannot be used: "),
])  # fmt: skip
def test_it_works_without_kernels(wanted, status) -> None:
    command = [sys.executable, "-m", "subquad.native"]
    environment = os.environ | {"SUBQUAD_NATIVE": wanted}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(status) and done.stderr == ""
