"""What the tests of all commands need."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from small_runs import SPEECH_OPTIONS, write_digits
from subquad_lab.cli import main


@pytest.fixture
def complaint(capfd: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Run a command that is expected to be refused, and return the one line that says why."""

    def refused(arguments: list[str]) -> str:
        assert main(arguments) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("subquad: error: ")
        assert err.count("\n") == 1
        return err

    return refused


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with a small text in three parts; each word follows from the one before it, most of the time."""
    words, folder = [f"w{i}" for i in range(20)], tmp_path / "text"
    folder.mkdir()
    draw = random.Random(0)
    for part, count in (("train", 1200), ("valid", 150), ("test", 150)):
        numbers = [0]
        while len(numbers) < count:
            numbers.append((numbers[-1] * 3 + 1) % 20 if draw.random() < 0.8 else draw.randrange(20))
        lines = [" ".join(words[i] for i in numbers[k : k + 10]) for k in range(0, count, 10)]
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return folder


SMALL: dict[str, object] = dict(model="rnn", embedding=6, width=8, context=5, batch=4, steps=4)


@pytest.fixture
def options(text, tmp_path) -> list[str]:
    return [f"--{key}={value}" for key, value in {"data": text, "out": tmp_path / "runs", **SMALL}.items()]


@pytest.fixture
def trained(options, tmp_path, capfd) -> Path:
    assert main(["train", "language", *options]) == 0
    capfd.readouterr()
    return tmp_path / "runs" / "language-001"


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def digits(tmp_path, own_cache) -> str:
    """A folder of spoken digits, which are tones."""
    return str(write_digits(tmp_path / "digits"))


@pytest.fixture
def speech_run(digits, tmp_path, capfd) -> Path:
    options = ["--data", digits, *SPEECH_OPTIONS, "--steps", "12", "--characters", "20"]
    assert main(["train", "speech", *options, "--out", str(tmp_path / "runs")]) == 0
    capfd.readouterr()
    return tmp_path / "runs" / "speech-001"
