import os
import signal
import subprocess
import sys
import time

import pytest

import subquad

COMMAND = [sys.executable, "-m", "subquad_lab"]
TOY = ["demo", "--lengths", "32,64", "--methods", "taylor:2,separable", "--heads", "1", "--width", "4"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)


def test_version_is_the_library_s():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"subquad {subquad.__version__}\n")


def test_help_is_quick_and_does_not_load_torch():
    program = """
import sys
from subquad_lab.cli import main
try:
    main(["--help"])
finally:
    assert "torch" not in sys.modules
"""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert time.perf_counter() - start < 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "subcommand"),
        (["dance"], "dance"),
        (["demo", "--colour", "red"], "--colour"),
        (["demo", "--heads", "many"], "many"),
        (["demo", "--heads", "0"], "--heads: expected whole numbers above 0, found '0'"),
        (["demo", "--lengths", "16,x"], "--lengths: expected whole numbers above 0, found 'x'"),
        (["demo", "--methods", "softmax"], "'softmax' is unknown"),
    ],
)
def test_bad_usage_gets_one_line_and_exit_code_2(arguments, message, complaint):
    assert message in complaint(arguments)


def test_demo_in_a_pipe_prints_a_line_per_measurement():
    done = run(*TOY)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split()[:2] for line in done.stdout.splitlines()[2:8]]
    assert rows == [[length, name] for length in ("32", "64") for name in ("exact", "taylor:2", "separable")]
    assert "worse than returning zeros" in done.stdout


def test_closed_pipe_leaves_no_traceback():
    with subprocess.Popen([*COMMAND, *TOY], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_interrupt_leaves_no_traceback():
    # A session of its own, so that the signal reaches the command and its measuring process as Ctrl-C does.
    with subprocess.Popen(
        [*COMMAND, *TOY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr.read() == b"subquad: interrupted\n"
    assert process.returncode == 130


def test_a_full_disk_behind_the_output_is_told():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *TOY], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "subquad: error: output: No space left on device\n")
