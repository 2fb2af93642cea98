"""A disk that is full: one line that names the file, what was there stays, and with room the end is the same.

No file of a process may be larger than a limit: the nearest to a full disk that needs no rights.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from small_runs import write_digits
from stress.kills import compare
from subquad_lab.cli import main
from subquad_lab.data.speech import load_speech

resource = pytest.importorskip("resource", reason="needs limits of a process, which Windows has not")

LIMITS = {2_500: "journal.log|checkpoints", 12_000: "checkpoints", 30_000: "curves.svg"}  # and what is too large


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let this process write files of at most this size."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_sweep_that_meets_a_full_disk_again_and_again_has_the_same_end(options, tmp_path, capfd):
    def sweep(out: str) -> list[str]:
        own = [option for option in options if not option.startswith("--out")]
        return ["sweep", "language", *own, f"--out={tmp_path / out}", "--grid.lr=0.01,0.02"]

    def complaint(arguments: list[str], code: int = 1) -> str:
        capfd.readouterr()
        assert main(arguments) == code
        errors = [line for line in capfd.readouterr().err.splitlines() if "error" in line or "Error" in line]
        assert len(errors) == 1 and errors[0].startswith("subquad: error: ")
        return errors[0]

    assert main(sweep("whole")) == 0
    for size, files in LIMITS.items():
        with limited(size):
            line = complaint(sweep("full"))
        assert line.partition(": File too large")[1] and any(name in line for name in files.split("|")), line
    assert main(sweep("full")) == 0
    picture, page = tmp_path / "full" / "sweep.svg", tmp_path / "report.html"
    assert main(["report", str(tmp_path / "full"), f"--out={page}"]) == 0
    old = [path.read_bytes() for path in (picture, page)]
    with limited(30_000):
        assert complaint(sweep("full")) == f"subquad: error: {picture}: File too large"
        line = complaint(["report", str(tmp_path / "full"), f"--out={page}"], code=2)
    assert line == f"subquad: error: --out: cannot write {page}: File too large"
    assert [path.read_bytes() for path in (picture, page)] == old
    compare("sweep", tmp_path / "full", tmp_path / "whole")
    assert not [path for path in tmp_path.glob("**/.*") if path.is_file()]


def test_features_that_do_not_fit_the_disk_are_not_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    write_digits(tmp_path / "digits")
    with limited(1_000), pytest.warns(UserWarning, match="features are not cached: .*File too large"):
        clips = load_speech(str(tmp_path / "digits"), clips=12)
    assert len(clips.train) and not [path for path in tmp_path.glob("cache/**/*") if path.is_file()]
