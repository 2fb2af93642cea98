"""Runs as processes: signals, and the same steps on two of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from small_runs import reseal, unfinish, write_digits, write_pictures, write_text
from subquad_lab.cli import main
from subquad_lab.experiments.stored import experiment_of
from subquad_lab.training import checkpoint
from subquad_lab.training.run import METRICS, Run


def command(text, out, *options: str) -> list[str]:
    fields = {"data": text, "out": out, "model": "rnn", "embedding": 6, "width": 8, "context": 5, "batch": 4} | {
        "tied": "false", "lr": 0.02, "warmup": 3, "evaluate-every": 10
    }  # fmt: skip
    return ["train", "language", *(f"--{key}={value}" for key, value in fields.items()), *options]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_run_and_ends_it(number, text, tmp_path):
    arguments = command(text, tmp_path, "--steps=100000", "--evaluate-every=100000")
    with subprocess.Popen(
        [sys.executable, "-m", "subquad_lab", *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        log = tmp_path / "language-001" / METRICS
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().count("\n") > 5) and time.monotonic() < deadline:
            time.sleep(0.05)
        begin = time.monotonic()
        process.send_signal(number)
        errors = process.stderr.read()
    assert process.returncode == 128 + number
    assert time.monotonic() - begin < 5
    assert "Progress saved" in errors
    assert "Traceback" not in errors
    run = Run.open(tmp_path / "language-001")
    found = checkpoint.newest(run.checkpoints)
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(1, found.state["progress"]["step"] + 1))  # All that was done was saved.


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """Folders with runs of one process and of two.

    A process takes seconds to begin, so both of two make all their runs in turn: new ones of three experiments, one of
    them a series, and one that a single process has begun.
    """
    root = tmp_path_factory.mktemp("processes")
    places = {name: root / name for name in ("text", "one", "two")}
    write_text(places["text"])
    speech = [f"--data={write_digits(root / 'digits')}", "--clips=36", "--batch=4", "--width=8", "--blocks=1",
              "--steps=12", "--dropout=0", "--warmup=3", "--characters=20"]  # fmt: skip
    series = [f"--data={write_pictures(root / 'small.npz')}", "--seeds=2", "--steps=6", "--batch=8", "--dropout=0"]
    commands = {}
    for name in ("one", "two"):
        language = command(places["text"], places[name], "--steps=50", "--dropout=0")
        others = [["train", "speech", *speech], ["train", "images", *series]]
        commands[name] = [language, *([*other, f"--out={places[name]}"] for other in others)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each of the two
    for arguments in commands["one"]:
        assert main(arguments) == 0
    torch.set_num_threads(threads)
    begun = places["one"] / "begun"
    shutil.copytree(places["one"] / "language-001", begun)
    extend(begun)
    together(commands["two"] + [["train", "--resume", str(begun)]], root)
    return places


def together(commands: list[list[str]], folder: Path) -> None:
    """Run commands in two processes, one after another."""
    program = folder / "commands.py"
    program.write_text(
        f"import sys\nfrom subquad_lab.cli import main\nfor command in {commands!r}:\n"
        "    if code := main(command):\n        sys.exit(code)\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(program)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean of 2 seeds") == 1


def extend(folder: Path) -> None:
    """Let a finished run have ten steps left."""
    unfinish(folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("steps: 50", "steps: 60"))
    reseal(folder)


def lines(folder: Path) -> list[dict[str, float]]:
    return list(Run.open(folder).metrics())


@pytest.mark.usefixtures("one_thread")
class TestTwoProcesses:
    def test_they_make_the_steps_of_one(self, places):
        """To 1e-5, over 50 steps."""
        one, two = (lines(places[name] / "language-001") for name in ("one", "two"))
        assert len(one) == 55
        for line, other in zip(one, two, strict=True):
            assert other == pytest.approx(line, rel=1e-5)
        result = json.loads((places["two"] / "language-001" / "result.json").read_text())
        assert result["processes"] == 2

    def test_checkpoints_of_one_are_good_for_two_and_the_reverse(self, places, tmp_path):
        shutil.copytree(places["two"] / "language-001", tmp_path / "begun")
        extend(tmp_path / "begun")
        assert main(["train", "--resume", str(tmp_path / "begun")]) == 0
        _, config = experiment_of(Run(places["one"] / "language-001"))
        found = []
        for folder in (places["one"] / "begun", tmp_path / "begun"):
            assert replace(config, steps=60) == experiment_of(Run(folder))[1]
            assert max(line["step"] for line in lines(folder)) == 60
            found.append([line for line in lines(folder) if line["step"] > 50])
        for line, other in zip(*found, strict=True):
            assert other == pytest.approx(line, rel=1e-4)

    def test_they_train_speech(self, places):
        one, two = (lines(places[name] / "speech-001") for name in ("one", "two"))
        assert len(one) == 14
        for line, other in zip(one, two, strict=True):
            assert other == pytest.approx(line, rel=1e-5)

    @pytest.mark.parametrize("seed", ["seed-0", "seed-1"])
    def test_they_train_a_series(self, seed, places):
        """All decide alike what is begun and what goes on."""
        one, two = (lines(places[name] / "images-001" / seed) for name in ("one", "two"))
        for line, other in zip(one, two, strict=True):
            assert other == pytest.approx(line, rel=1e-4)
