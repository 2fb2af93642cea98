"""What the tests of all commands need."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from small_runs import SPEECH_OPTIONS, reseal, write_digits, write_text
from subquad_lab.cli import main


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Small runs would wait for it most of their time. No test cuts the power; those that kill a process start one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture
def complaint(capfd: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Run a command that is expected to be refused, and return the one line that says why."""

    def refused(arguments: list[str]) -> str:
        capfd.readouterr()  # what a fixture has printed
        assert main(arguments) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("subquad: error: ")
        assert err.count("\n") == 1
        return err

    return refused


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


SMALL: dict[str, object] = dict(model="rnn", embedding=6, width=8, context=5, batch=4, steps=4)


def options_in(folder: Path) -> list[str]:
    return [f"--{key}={value}" for key, value in {"data": folder / "text", "out": folder / "runs", **SMALL}.items()]


@pytest.fixture
def options(text, tmp_path) -> list[str]:
    return options_in(tmp_path)


def moved(root: Path, tmp_path: Path, name: str) -> Path:
    """Copy a run that many tests share, so that each may change it; its data are those of the test."""
    folder = tmp_path / "runs" / name
    shutil.copytree(root / "runs" / name, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(str(root), str(tmp_path)))
    reseal(folder)
    return folder


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    write_text(root / "text")
    assert main(["train", "language", *options_in(root)]) == 0
    return root


@pytest.fixture
def trained(trained_once, text, tmp_path) -> Path:
    """The folder of a small run, as `main(["train", "language", *options])` leaves it."""
    return moved(trained_once, tmp_path, "language-001")


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def digits(tmp_path, own_cache) -> str:
    """A folder of spoken digits, which are tones."""
    return str(write_digits(tmp_path / "digits"))


@pytest.fixture(scope="session")
def speech_once(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("speech")
    options = ["--data", str(write_digits(root / "digits")), *SPEECH_OPTIONS, "--steps", "12", "--characters", "20"]
    assert main(["train", "speech", *options, "--out", str(root / "runs")]) == 0
    return root


@pytest.fixture
def speech_run(speech_once, digits, tmp_path) -> Path:
    """The folder of a small run of `train speech`."""
    return moved(speech_once, tmp_path, "speech-001")
