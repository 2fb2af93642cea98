import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

import subquad
from small_runs import heed_interrupts
from subquad_lab.cli import COMMANDS, OUTPUT_FOLDERS, main
from subquad_lab.experiments import EXPERIMENTS
from subquad_lab.options.parsing import call

COMMAND = [sys.executable, "-m", "subquad_lab"]
TOY = ["bench", "--lengths", "32,64", "--methods", "taylor:2,separable", "--heads", "1", "--head-dim", "4"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)


def test_version_is_the_library_s():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"subquad {subquad.__version__}\n")


def test_commands_do_not_load_the_compiler_of_torch():
    """It takes as long to import as torch itself."""
    program = "import sys, subquad_lab.experiments, subquad.distributed; assert 'torch._dynamo' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
        ([], "COMMAND: expected one of demo, plan, bench, verify, train, "),
        (["dance"], "got 'dance'; see `subquad --help`"),
        (["trian", "language"], "got 'trian'; did you mean train?"),
        (["runs", "--root", "nowhere"], "--root: no such folder: nowhere"),
        (["bench", "--color", "red"], "--color"),
        (["bench", "--heads", "many"], "many"),
        (["bench", "--heads", "0"], "--heads: expected positive integers, got '0'"),
        (["bench", "--lengths", "16,x"], "--lengths: expected positive integers, got 'x'"),
        (["bench", "--methods", "softmax"], "--methods: expected one of 'exact', 'taylor'"),
        (["bench", "--out", ""], "--out: expected a value, got ''"),
        (["verify", "14", "--plots", ""], "--plots: expected a value, got ''"),
        (["synthesize", "/dev/null", "out"], "METADATA: /dev/null is not a regular file; expected a file with lines"),
    ],
)
def test_bad_usage_gets_one_line_and_exit_code_2(arguments, message, complaint):
    assert message in complaint(arguments)


def help_of(*arguments: str, capfd) -> str:
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    return capfd.readouterr().out


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_help_has_an_example_that_is_accepted(command, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    example = re.search(rf"^Example: (subquad {command}\b.*)$", help_of(command, capfd=capfd), re.MULTILINE)
    called = []
    record = lambda function: functools.wraps(function)(lambda **given: called.append(function.__name__))
    call([record(each) for each in COMMANDS], OUTPUT_FOLDERS, shlex.split(example[1])[1:], lambda: EXPERIMENTS)
    assert called == [command]


@pytest.mark.parametrize("command", [["plan"], ["bench"], ["verify"], *(["train", name] for name in EXPERIMENTS)])
def test_each_option_is_described_with_its_default_and_without_python_types(command, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    options = re.split(r"\n  (?=--)", help_of(*command, capfd=capfd))[1:]
    assert len(options) >= 4
    for option in options:
        line = " ".join(option.split())
        assert re.match(r"--[a-z-]+ \S+ [A-Za-z]\S* .*[.)]$", line), line
        assert not re.search(r"type:|Literal|True|False", line), line
        assert ("default: null" in line) <= ("; null: " in line), line


@pytest.mark.parametrize("command", ["verify", "report"])
def test_what_may_be_left_out_is_not_called_required(command, capfd):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "required" not in capfd.readouterr().out


def test_closed_pipe_leaves_no_traceback():
    with subprocess.Popen([*COMMAND, "verify", "14"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_interrupt_leaves_no_traceback():
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([*COMMAND, *TOY], **pipes, preexec_fn=heed_interrupts) as process:
        process.stderr.readline()  # the first measurement
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().endswith(b"subquad: interrupted\n")
    assert process.returncode == 130


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which Linux has")
def test_a_full_disk_behind_the_output_is_told():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "verify", "14"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "subquad: error: output: No space left on device\n")


def test_without_the_lab_the_command_says_how_to_install_it(tmp_path):
    (tmp_path / "jsonargparse.py").write_text("raise ModuleNotFoundError('No module', name='jsonargparse')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for arguments in (["--help"], ["plan"], []):
        command = [sys.executable, "-m", "subquad_lab", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("subquad: error: jsonargparse is not installed")
        assert "pip install -c constraints.txt '.[lab]'" in done.stderr
        assert len(done.stderr.splitlines()) == 1
