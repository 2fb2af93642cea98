"""Runs as processes: signals, and the same steps on two of them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from small_runs import write_digits, write_pictures
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


def test_two_processes_make_the_steps_of_one(text, tmp_path):
    """To 1e-5, over 50 steps; and the checkpoints of one are good for the other."""
    options = ("--steps=50", "--dropout=0")
    for out, launcher in ((tmp_path / "one", [sys.executable]), (tmp_path / "two", torchrun())):
        done = subprocess.run([*launcher, "-m", "subquad_lab", *command(text, out, *options)], capture_output=True,
                              text=True, env=environment())  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, two = (list(Run.open(tmp_path / name / "language-001").metrics()) for name in ("one", "two"))
    assert len(one) == 55
    for line, other in zip(one, two, strict=True):
        assert other == pytest.approx(line, rel=1e-5)
    result = json.loads((tmp_path / "two" / "language-001" / "result.json").read_text())
    assert result["processes"] == 2

    # What two processes have saved, one goes on with; and the reverse.
    for name, launcher in (("two", [sys.executable]), ("one", torchrun())):
        run = Run.open(tmp_path / name / "language-001")
        (run.folder / "result.json").unlink()
        _, config = experiment_of(run)
        (run.folder / "config.yaml").write_text(
            (run.folder / "config.yaml").read_text().replace("steps: 50", "steps: 60")
        )
        done = subprocess.run([*launcher, "-m", "subquad_lab", "train", "--resume", str(run.folder)],
                              capture_output=True, text=True, env=environment())  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert max(line["step"] for line in run.metrics()) == 60
        assert replace(config, steps=60) == experiment_of(run)[1]
    one, two = ([line for line in Run.open(tmp_path / name / "language-001").metrics() if line["step"] > 50]
                for name in ("one", "two"))  # fmt: skip
    for line, other in zip(one, two, strict=True):
        assert other == pytest.approx(line, rel=1e-4)


def test_two_processes_train_speech(tmp_path):
    options = [f"--data={write_digits(tmp_path / 'digits')}", "--clips=36", "--batch=4", "--width=8", "--blocks=1",
               "--steps=12", "--dropout=0", "--warmup=3", "--characters=20"]  # fmt: skip
    for out, launcher in ((tmp_path / "one", [sys.executable]), (tmp_path / "two", torchrun())):
        done = subprocess.run([*launcher, "-m", "subquad_lab", "train", "speech", *options, f"--out={out}"],
                              capture_output=True, text=True, env=environment())  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, two = (list(Run.open(tmp_path / name / "speech-001").metrics()) for name in ("one", "two"))
    assert len(one) == 14
    for line, other in zip(one, two, strict=True):
        assert other == pytest.approx(line, rel=1e-5)


def test_two_processes_train_a_series(tmp_path):
    """All decide alike what is begun and what goes on."""
    data = write_pictures(tmp_path / "small.npz")
    options = [f"--data={data}", f"--out={tmp_path}", "--seeds=2", "--steps=6", "--batch=8", "--dropout=0"]
    for launcher in (torchrun(), [sys.executable]):
        done = subprocess.run([*launcher, "-m", "subquad_lab", "train", "images", *options], capture_output=True,
                              text=True, env=environment(), timeout=120)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("mean of 2 seeds") == 1
    for seed in ("seed-0", "seed-1"):
        one, two = (list(Run.open(tmp_path / f"images-00{i}" / seed).metrics()) for i in (1, 2))
        for line, other in zip(one, two, strict=True):
            assert other == pytest.approx(line, rel=1e-4)


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}
