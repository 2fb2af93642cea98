"""The calibration in the user's cache folder: made once, and never trusted blindly."""

import json
import threading

import pytest
import torch

from subquad import plan
from subquad.planning import calibration as module
from subquad.planning import calibration_file as cache
from subquad.planning.calibration import grid
from subquad.planning.calibration_file import calibration

CPU = torch.device("cpu")


def test_it_is_made_once_with_progress(fresh) -> None:
    steps = []
    first = calibration(progress=lambda done, total: steps.append((done, total)))
    assert steps == [(i, len(fresh)) for i in range(len(fresh) + 1)]
    count = len(fresh)
    assert calibration() == first
    assert len(fresh) == count


@pytest.mark.parametrize("damage", ["", "[" * 100_000, "{", "[]", "null", '{"machine": {}, "coefficients": {}}'])
def test_a_damaged_cache_is_made_again(fresh, damage) -> None:
    first = calibration()
    (path,) = cache.cache_folder().iterdir()
    path.write_text(damage)
    count = len(fresh)
    assert calibration() == first
    assert len(fresh) == 2 * count
    json.loads(path.read_text())


@pytest.mark.parametrize("change", [
    lambda content: content["machine"].update(torch="0.0"),
    lambda content: content["machine"].update(version=-1),
    lambda content: content["machine"].update(device="cpu: another one"),
    lambda content: content["coefficients"].popitem(),
    lambda content: content["coefficients"].update(extra=[1.0]),
    lambda content: next(iter(content["coefficients"].values())).append(1.0),
    lambda content: next(iter(content["coefficients"].values())).__setitem__(0, -1.0),
    lambda content: next(iter(content["coefficients"].values())).__setitem__(0, float("nan")),
    lambda content: next(iter(content["coefficients"].values())).__setitem__(0, "1"),
    lambda content: next(iter(content["coefficients"].values())).__setitem__(slice(None), [0.0] * 18),
])  # fmt: skip
def test_a_cache_that_is_not_of_this_machine_is_not_trusted(fresh, change) -> None:
    first = calibration()
    (path,) = cache.cache_folder().iterdir()
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert cache.cached(CPU) is None
    assert calibration() == first


def test_threads_and_dtypes_have_their_own(fresh, one_thread) -> None:
    calibration()
    count = len(fresh)
    calibration(dtype=torch.float64)
    assert len(fresh) == 2 * count
    assert len(list(cache.cache_folder().iterdir())) == 2
    torch.set_num_threads(2)
    assert cache.cached(CPU) is None


def test_a_cache_that_cannot_be_written_is_said_before_the_work(fresh, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PermissionError, match=r"cache: cannot write .*file.*; set SUBQUAD_CACHE"):
        calibration()
    assert not fresh


def test_a_folder_in_the_way_is_said(fresh) -> None:
    cache.file_of(cache.machine(CPU, torch.float32)).mkdir(parents=True)
    with pytest.raises(PermissionError, match="cache: cannot write the calibration"):
        calibration()


def test_where_there_is_no_home_nothing_is_cached(monkeypatch) -> None:
    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache, "cache_folder", homeless)
    assert cache.cached(CPU) is None
    with pytest.raises(PermissionError, match="set SUBQUAD_CACHE"):
        calibration()


def test_an_interrupted_calibration_leaves_nothing(fresh, monkeypatch) -> None:
    def interrupted(*_) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "measured_seconds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibration()
    assert not list(cache.cache_folder().iterdir())


def test_two_processes_calibrate_once(fresh, tmp_path) -> None:
    """The second waits for the first, and then reads what it has left."""
    threads = [threading.Thread(target=calibration) for _ in range(2)]
    for thread in threads:  # flock holds between two opened handles, so threads show what processes do.
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fresh) == module.TURNS * len(list(grid()))


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "meta", 1.5])
def test_a_device_that_is_not_there_is_named(device) -> None:
    with pytest.raises(ValueError, match=r"device: expected one that torch can use here, got"):
        plan(query_length=10, head_dim=4, device=device)


def test_the_cache_is_where_users_expect_it(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("SUBQUAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "subquad"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "subquad"
