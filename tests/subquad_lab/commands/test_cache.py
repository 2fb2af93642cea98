"""`subquad cache`: everything of ours is shown and removed, and nothing else."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from subquad.planning.calibration_file import cache_folder, calibration
from subquad_lab.cli import main
from subquad_lab.data.speech import load_speech
from subquad_lab.system import cache
from subquad_lab.system.files import locked

OURS = {
    "calibration-x.json": 100, ".calibration-abc": 50, "speech/a.safetensors": 5000, "speech/a.sha256": 64,
    "speech/.b.safetensors.123": 700, "graphs/cora-1.npz": 300,
}  # fmt: skip
OTHERS = ("notes.txt", "calibration.txt", "speech/notes.txt", "graphs/.gitignore", "other/x.npz")


@pytest.fixture
def folder(own_cache) -> Path:
    for name, size in [*OURS.items(), *((name, 10) for name in OTHERS)]:
        path = cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    return cache_folder()


def test_folder_files_and_sizes_are_shown(folder, capfd):
    assert main(["cache"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    *lines, last = out.splitlines()
    assert last == f"{folder}: {len(OURS)} files, 6.1 KiB"
    assert {name: re.search(rf" {re.escape(name)} +(\S+ \S+) +0$", out, re.MULTILINE)[1] for name in OURS} == {
        "calibration-x.json": "100 B", ".calibration-abc": "50 B", "speech/a.safetensors": "4.9 KiB",
        "speech/a.sha256": "64 B", "speech/.b.safetensors.123": "700 B", "graphs/cora-1.npz": "300 B",
    }  # fmt: skip
    assert len(lines) == 1 + len(OURS)


def test_clear_removes_our_files_alone(folder, capfd):
    assert main(["cache", "--clear"]) == 0
    assert capfd.readouterr() == (f"{folder}: removed {len(OURS)} files, 6.1 KiB\n", "")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(OTHERS)


@pytest.mark.parametrize("name", ["", "speech", "graphs"])
def test_clear_waits_for_a_process_that_writes(name, folder):
    with ThreadPoolExecutor(1) as pool:
        with locked(folder / name):
            done = pool.submit(cache.clear)
            with pytest.raises(TimeoutError):
                done.result(timeout=0.3)
            assert all((folder / file).is_file() for file in OURS)
        assert done.result(timeout=30)[0] == len(OURS)


def test_a_file_that_another_process_removes_is_not_missed(folder, monkeypatch, capfd):
    gone = folder / "graphs" / "gone.npz"
    monkeypatch.setattr("subquad_lab.commands.cache.cached_files", lambda: {"graph": [gone]})
    monkeypatch.setattr(cache, "cached_files", lambda: {"graph": [gone]})
    for option in ([], ["--clear"]):
        assert main(["cache", *option]) == 0
        assert " 0 files, 0 B\n" in capfd.readouterr().out.replace("removed ", "")


def test_a_folder_that_is_not_there_is_empty(own_cache, capfd):
    for option in ([], ["--clear"]):
        assert main(["cache", *option]) == 0
        assert " 0 files, 0 B\n" in capfd.readouterr().out.replace("removed ", "")
    assert not cache_folder().exists()


def test_a_user_without_a_home_is_told(monkeypatch, complaint):
    monkeypatch.delenv("SUBQUAD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert "cache: no home; set SUBQUAD_CACHE to a folder" in complaint(["cache"])


def test_what_is_kept_is_known(digits, fresh):
    """What calibrations and features leave behind is shown: a new kind of file needs a pattern."""
    calibration()
    load_speech(digits, clips=12)
    left = {path for path in cache_folder().rglob("*") if path.is_file()}
    found = cache.cached_files()
    assert left == {path for paths in found.values() for path in paths}
    assert found["calibration"] and len(found["speech features"]) == 2
