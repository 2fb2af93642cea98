"""Runs as processes: signals, and the same steps on two or four of them, which share rows or sequences."""

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


TRANSFORMER = ["--model=transformer", "--method=taylor:2", "--heads=2", "--context=9", "--steps=20", "--dropout=0"]
SHARED = "--sequence-parallel=2"


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

    A process takes seconds to begin, so both of two make all their runs in turn: new ones of five experiments, one of
    them a series, and one that a single process has begun. The same for a Transformer, whose sequences are shared by
    both processes, or by two of four.
    """
    root = tmp_path_factory.mktemp("processes")
    places = {name: root / name for name in ("text", "one", "two", "1x2", "2x1", "2x2", "transformer")}
    write_text(places["text"])
    speech = [f"--data={write_digits(root / 'digits')}", "--clips=36", "--batch=4", "--width=8", "--blocks=1",
              "--steps=12", "--dropout=0", "--warmup=3", "--characters=20"]  # fmt: skip
    pairs = ["--task=induction", "--pairs=3,8", "--length=16", "--vocabulary=12", "--width=8", "--batch=4",
             "--seeds=1", "--steps=12"]  # fmt: skip
    stages = [f"--data={places['text']}", "--methods=window:2+hedgehog,linear:elu", "--untrained=window:2", "--batch=4",
              "--context=8", "--width=8", "--heads=2", "--layers=1", "--rank=2", "--exact-tokens=160", "--tokens=160",
              "--adapt-tokens=160", "--evaluate-tokens=64", "--dropout=0", "--lr=0.01"]  # fmt: skip
    series = [f"--data={write_pictures(root / 'small.npz')}", "--seeds=2", "--steps=6", "--batch=8", "--dropout=0"]
    commands = {}
    for name in ("one", "two"):
        language = command(places["text"], places[name], "--steps=50", "--dropout=0")
        others = [["train", "speech", *speech], ["train", "recall", *pairs], ["train", "convert", *stages],
                  ["train", "images", *series]]  # fmt: skip
        commands[name] = [language, *([*other, f"--out={places[name]}"] for other in others)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each of the two
    for arguments in commands["one"]:
        assert main(arguments) == 0
    transformer = {name: command(places["text"], places[name], *TRANSFORMER)
                   for name in ("1x2", "2x1", "2x2", "transformer")}  # fmt: skip
    assert main(transformer["transformer"]) == 0
    torch.set_num_threads(threads)
    begun = places["one"] / "begun"
    shutil.copytree(places["one"] / "language-001", begun)
    extend(begun)
    for name in ("begun-1x2", "begun-2x2"):
        shutil.copytree(places["transformer"] / "language-001", places["transformer"] / name)
        extend(places["transformer"] / name, "20", "25")
    resumed = {name: ["train", "--resume", str(places["transformer"] / f"begun-{name}"), SHARED]
               for name in ("1x2", "2x2")}  # fmt: skip
    rnn = command(places["text"], places["two"], SHARED)
    done = together(
        [*commands["two"], ["train", "--resume", str(begun)], [*transformer["1x2"], SHARED], transformer["2x1"],
         resumed["1x2"], rnn, [*commands["two"][-1], SHARED], [*transformer["1x2"], "--sequence-parallel=3"],
         [*transformer["1x2"], SHARED, "--context=3"]],
        root, failing=4,
    )  # fmt: skip
    assert done.stdout.count("mean of 2 seeds") == 1
    (places["two"] / "errors").write_text(done.stderr)
    together([[*transformer["2x2"], SHARED], resumed["2x2"]], root, count=4)
    return places


def together(
    commands: list[list[str]], folder: Path, count: int = 2, failing: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run commands in two or more processes, one after another; the last ones are misused and end with 2."""
    program = folder / "commands.py"
    codes = [0] * (len(commands) - failing) + [2] * failing
    program.write_text(
        f"import sys\nfrom subquad_lab.cli import main\nfor command, code in zip({commands!r}, {codes!r}):\n"
        "    if main(command) != code:\n        sys.exit(f'{command}: expected the exit code {code}')\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    done = subprocess.run(
        [*launcher, str(program)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


def extend(folder: Path, before: str = "50", after: str = "60") -> None:
    """Let a finished run have some steps left."""
    unfinish(folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace(f"steps: {before}", f"steps: {after}"))
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

    def test_they_train_recall(self, places):
        """Sequences differ in the number of their queries; each of them counts the same."""
        one, two = (lines(places[name] / "recall-001") for name in ("one", "two"))
        assert len(one) == 13
        for line, other in zip(one, two, strict=True):
            assert other == pytest.approx(line, rel=1e-5)

    def test_they_convert_a_model_in_stages(self, places):
        """Each stage leaves parameters without gradients, which two processes must not wait for."""
        one, two = (lines(places[name] / "convert-001") for name in ("one", "two"))
        assert [line["step"] for line in one] == [*range(1, 6), 5, *range(6, 11), 10, *range(11, 16), 15]
        for line, other in zip(one, two, strict=True):
            assert other == pytest.approx(line, rel=1e-4)

    @pytest.mark.parametrize("seed", ["seed-0", "seed-1"])
    def test_they_train_a_series(self, seed, places):
        """All decide alike what is begun and what goes on."""
        one, two = (lines(places[name] / "images-001" / seed) for name in ("one", "two"))
        for line, other in zip(one, two, strict=True):
            assert other == pytest.approx(line, rel=1e-4)


@pytest.mark.usefixtures("one_thread")
class TestSharedSequences:
    @pytest.mark.parametrize("grid", ["1x2", "2x1", "2x2"])
    def test_rows_x_parts_of_sequences_make_the_steps_of_one(self, grid, places):
        """To 1e-5, over 20 steps."""
        one, several = (lines(places[name] / "language-001") for name in ("transformer", grid))
        assert len(one) == 22
        for line, other in zip(one, several, strict=True):
            assert other == pytest.approx(line, rel=1e-5)
        result = json.loads((places[grid] / "language-001" / "result.json").read_text())
        rows, parts = map(int, grid.split("x"))
        assert (result["processes"], result["processes_per_sequence"]) == (rows * parts, parts)

    def test_checkpoints_do_not_depend_on_the_processes(self, places, tmp_path):
        """A run of one process continues on two and on four that share sequences, and one of theirs on one."""
        shutil.copytree(places["2x2"] / "language-001", tmp_path / "begun")
        extend(tmp_path / "begun", "20", "25")
        assert main(["train", "--resume", str(tmp_path / "begun")]) == 0
        folders = [places["transformer"] / "begun-1x2", places["transformer"] / "begun-2x2", tmp_path / "begun"]
        first, *others = [[line for line in lines(folder) if line["step"] > 20] for folder in folders]
        assert [line["step"] for line in first if "loss" in line] == [21, 22, 23, 24, 25]
        for other in others:
            for line, same in zip(first, other, strict=True):
                assert same == pytest.approx(line, rel=1e-4)
        names = [checkpoint.newest(Run(folder).checkpoints).tensors.keys() for folder in folders]
        kept = [{name for name in each if not name.startswith("random.")} for each in names]
        assert kept[0] == kept[1] == kept[2]

    @pytest.mark.parametrize(
        "line",
        [
            "--sequence-parallel: rnn passes its state from word to word; use --model transformer",
            "--sequence-parallel: not supported by images; use language",
            "--sequence-parallel: expected a divisor of the number of processes, 2, got 3",
            "--sequence-parallel: expected at least 2 words of the context for each of 2 processes, got 3",
        ],
    )
    def test_what_cannot_be_shared_is_refused_in_one_line(self, line, places):
        errors = (places["two"] / "errors").read_text()
        assert errors.count(line) == 2 and "Traceback" not in errors

    def test_one_process_shares_nothing(self, text, tmp_path, capsys):
        assert main(command(text, tmp_path, SHARED)) == 2
        assert "expected a divisor of the number of processes, 1, got 2" in capsys.readouterr().err
        train, *rest = command(text, tmp_path, "--steps=1")
        none = "--sequence-parallel=0"
        for line in ([train, none, *rest], [train, *rest, none]):
            assert main(line) == 2
            assert "expected a divisor of the number of processes, 1, got 0" in capsys.readouterr().err
        assert not list(tmp_path.glob("language-*"))
        assert main(["train", "--resume", "x", SHARED, "--lr=1"]) == 2
        assert "no option but --sequence-parallel, got also '--lr=1'" in capsys.readouterr().err
