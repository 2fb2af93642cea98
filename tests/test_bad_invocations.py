"""The command refuses what is wrong: hundreds of bad invocations in this process, and a few in processes of their own.

`python tests/bad_invocations.py` runs all of them as processes.
"""

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bad_invocations import MAX_SECONDS, Bad, Places, fault_of, invocations, prepare, run_as_process
from subquad_lab.cli import COMMANDS, main

IN_PROCESS, PROCESSES = 220, 3
MAX_IMPORTS = 2.0  # of torch, in whose time a bad invocation ends on a slow machine


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return prepare(tmp_path_factory.mktemp("bad"))


def test_bad_invocations_end_with_one_line_and_exit_code_2(places, monkeypatch, capfd, own_cache_folder):
    monkeypatch.chdir(places.root)
    faults = []
    for bad in invocations(places)[:IN_PROCESS]:
        begin = time.process_time()
        try:
            code = main(list(bad.arguments))
        except SystemExit as error:  # not the way in which an error ends
            code = -1 if error.code is None else int(error.code)
        out, err = capfd.readouterr()
        if fault := fault_of(bad, code, out, err, time.process_time() - begin):
            faults.append((bad.arguments, fault, err[-300:]))
    assert not faults


@pytest.fixture
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


def test_some_of_them_as_processes(places):
    """On a slow machine the import of torch alone takes most of five seconds."""
    limit = max(MAX_SECONDS, MAX_IMPORTS * torch_seconds())
    for bad in invocations(places, seed=1)[:PROCESSES]:
        assert fault_of(bad, *run_as_process(bad, places.root), limit) is None, bad


def torch_seconds() -> float:
    """Return the seconds of computing that the import of torch takes in a new process."""
    program = "import time; import torch; print(time.process_time())"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)


def test_the_list_is_long_covers_all_commands_and_follows_from_the_seed(places):
    found = invocations(places)
    assert len(found) > 500 and found == invocations(places) != invocations(places, seed=1)
    counts = Counter(bad.arguments[0] for bad in found if bad.arguments)
    assert all(counts[command.__name__] >= 5 for command in COMMANDS)
    assert {bad.arguments[0] for bad in found[:IN_PROCESS] if bad.arguments} >= {c.__name__ for c in COMMANDS}


@pytest.mark.parametrize(
    ("code", "out", "err", "seconds"),
    [
        (1, "", "subquad: error: --lr: wrong\n", 0.0),
        (0, "", "", 0.0),
        (2, "done\n", "subquad: error: --lr: wrong\n", 0.0),
        (2, "", "subquad: error: --lr: wrong\nsubquad: error: again\n", 0.0),
        (2, "", "Traceback (most recent call last)\nsubquad: error: --lr: wrong\n", 0.0),
        (2, "", "subquad: error: \x1b[2J --lr\n", 0.0),
        (2, "", "subquad: error: something else\n", 0.0),
        (2, "", "subquad: error: --lr: wrong\n", 9.0),
    ],
)
def test_an_end_that_is_not_as_it_should_be_is_a_fault(code, out, err, seconds):
    bad = Bad(("train",), "--lr")
    assert fault_of(bad, code, out, err, seconds) is not None
    assert fault_of(bad, 2, "", "subquad: error: --lr: wrong\n", 1.0) is None
