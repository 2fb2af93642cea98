"""`subquad env`: complete where everything is installed, and without an error where nothing is."""

import json
import os
import re
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

import subquad
from subquad import native
from subquad.planning import calibration_file
from subquad_lab.cli import main
from subquad_lab.commands import env


def printed(capfd: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the rows that `subquad env` prints, having checked that their values are in one column."""
    assert main(["env"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    rows = [re.fullmatch(r"( *\S+)( +)(.+)", line) for line in out.splitlines()]
    assert len({row.start(3) for row in rows}) == 1
    return {row[1].strip(): row[3] for row in rows}


def file_here() -> Path:
    return calibration_file.file_of(calibration_file.machine(torch.device("cpu"), torch.float32))


def test_versions_kernels_and_threads_are_printed(capfd, one_thread) -> None:
    rows = printed(capfd)
    assert rows["subquad"] == subquad.__version__
    assert rows["torch"] == torch.__version__
    assert rows["numpy"] == version("numpy")
    assert rows["kernels"] == str(native.status())
    assert rows["instructions"].startswith(f"{native.status().instructions or 'none'} (kernels), ")
    assert rows["threads"].startswith("1 (torch), ")
    assert re.fullmatch(r"measured, .+ old", rows["calibration"])


def test_json_has_the_same(capfd) -> None:
    rows = printed(capfd)
    assert main(["env", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["packages"].items() <= rows.items()
    assert str(native.Status(**found["kernels"])) == rows["kernels"]
    assert found["calibration"]["state"] == "measured"
    assert found["calibration"]["file"] == rows["file"]


def test_a_missing_calibration_is_not_made(capfd, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    assert printed(capfd)["calibration"].startswith("none (the first plan calibrates")
    assert not (tmp_path / "cache").exists()


def test_a_rough_calibration_tells_its_age_and_reason(capfd, fresh) -> None:
    here = calibration_file.machine(torch.device("cpu"), torch.float32)
    rough = replace(calibration_file.calibration(), note=" Times are rough: the machine was busy.")
    calibration_file.calibrate_into(file_here(), here, lambda: rough, None)
    then = time.time() - 3 * 3600 - 60
    os.utime(file_here(), (then, then))
    assert printed(capfd)["calibration"] == "rough, 3 hours old. Times are rough: the machine was busy."


def test_a_damaged_calibration_is_called_invalid(capfd, fresh) -> None:
    file_here().parent.mkdir()
    file_here().write_text("{")
    assert printed(capfd)["calibration"] == "invalid, less than a minute old: the next plan calibrates again"


def test_it_works_without_kernels_packages_and_home(capfd, monkeypatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(env, "status", lambda: native.Status(False, None, "turned off"))
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(env, "version", missing)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("SUBQUAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    rows = printed(capfd)
    assert rows["kernels"] == "torch (turned off)"
    assert rows["instructions"].startswith("none (kernels), ")
    assert rows["calibration"] == "none (no home folder: set SUBQUAD_CACHE)"
    assert "numpy" not in rows and "file" not in rows


def test_the_name_of_the_home_folder_is_not_printed(capfd, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    rows = printed(capfd)
    assert rows["SUBQUAD_CACHE"] == "~/cache"
    assert not any(str(tmp_path) in value for value in rows.values())
