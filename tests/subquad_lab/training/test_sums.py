"""The files of a run: every damage is noticed, a crash at any moment damages nothing, other runs are shown."""

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from small_runs import broken_off, listed, resume, start, tiny, unfinish
from subquad_lab import RunError, UsageError
from subquad_lab.cli import main
from subquad_lab.commands.runs import cells, row
from subquad_lab.experiments.language import EXPERIMENT
from subquad_lab.experiments.stored import experiment_of
from subquad_lab.system.checksums import SUMS, Damaged, closed, read_sums, write_listed
from subquad_lab.training import lifecycle, seeds
from subquad_lab.training.logs import Log
from subquad_lab.training.run import METRICS, Run, all_runs

ROOT = Path(__file__).resolve().parents[3]
READ = ("config.yaml", "run.json", "result.json", "metrics.jsonl")  # by `runs`, all of them


class Killed(BaseException):
    """No handler of the lab may see it, as none sees `kill -9`."""


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the runs."""
    monkeypatch.setattr(lifecycle, "curves", lambda *_: b"curves")
    monkeypatch.setattr(seeds, "compared", lambda *_: b"curves")


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_the_sums_are_those_of_sha256sum(trained):
    assert set(READ) <= set(listed(trained))
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=trained, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", READ)
def test_every_flipped_bit_and_every_cut_is_noticed(file, trained):
    draw, path = random.Random(0), trained / file
    content = path.read_bytes()
    assert cells(Run(trained))[5] == "finished"
    for bit in draw.sample(range(8 * len(content)), 100):
        path.write_bytes(flipped(content, bit))
        with pytest.raises(Damaged, match=f"{file}: the file was changed or cut"):
            cells(Run(trained))
    for length in draw.sample(range(len(content)), 50):
        path.write_bytes(content[:length])
        with pytest.raises(Damaged, match=f"{file}: the file was changed or cut"):
            cells(Run(trained))
    path.unlink()
    with pytest.raises(Damaged, match=f"{file}: the file is missing"):
        cells(Run(trained))


def test_every_flipped_bit_and_every_cut_of_the_sums_is_noticed(trained):
    """A list that was cut at the end of a line would make a finished run look unfinished."""
    path = trained / SUMS
    content = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(content)), 300):
        path.write_bytes(flipped(content, bit))
        with pytest.raises(Damaged, match="the list was changed or cut"):
            cells(Run(trained))
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(Damaged, match="the list was changed or cut"):
            cells(Run(trained))


@pytest.mark.parametrize("command", ["evaluate", "sample", "train --resume", "report"])
@pytest.mark.parametrize("file", ["config.yaml", "run.json"])
def test_a_cut_file_is_damage_and_not_a_shorter_one(command, file, trained, complaint, tmp_path, monkeypatch):
    """Half a config is a config too, with defaults for the rest."""
    monkeypatch.chdir(tmp_path)
    lines = (trained / file).read_text().splitlines(keepends=True)
    (trained / file).write_text("".join(lines[: len(lines) // 2]))
    assert f"{trained / file}: the file was changed or cut" in complaint([*command.split(), str(trained)])


@pytest.mark.parametrize("command", ["evaluate", "train --resume", "report"])
def test_a_run_without_its_sums_is_refused(command, trained, complaint):
    (trained / SUMS).unlink()
    line = complaint([*command.split(), str(trained)])
    assert f"{trained}: SHA256SUMS is missing: it was deleted, or an earlier" in line


def test_a_cut_config_of_a_run_is_not_a_config_for_another(trained, complaint, tmp_path):
    options = ["train", "language", "--out", str(tmp_path / "more"), "--config"]
    (tmp_path / "copy.yaml").write_text("steps: 1\ndata: nowhere\n")
    assert "--data: no such folder" in complaint([*options, str(tmp_path / "copy.yaml")])
    (trained / "config.yaml").write_text("steps: 1\n")
    assert "config.yaml: the file was changed or cut" in complaint([*options, str(trained / "config.yaml")])


def test_an_earlier_run_is_accepted_as_the_docs_say(trained, capfd):
    (trained / SUMS).unlink()
    (commands,) = re.findall(r"^sha256sum config.yaml .*\n.*$", (ROOT / "docs" / "lab.md").read_text(), re.MULTILINE)
    subprocess.run(commands, shell=True, cwd=trained, check=True)
    assert main(["evaluate", str(trained)]) == 0
    assert cells(Run(trained))[5] == "finished"


def test_damage_of_one_run_hides_no_other(trained, tmp_path, capfd):
    for name in ("language-002", "language-003", "language-004"):
        shutil.copytree(trained, trained.with_name(name))
    (trained.with_name("language-002") / "config.yaml").unlink()
    (trained.with_name("language-003") / SUMS).unlink()
    (trained.with_name("language-004") / "run.json").unlink()
    for command in (["runs"], ["report", "--out", str(tmp_path / "r.html")]):
        assert main([*command, "--root", str(trained.parent)]) == 0
    out, err = capfd.readouterr()
    first, second, third, fourth = out.splitlines()[1:5]
    assert first.startswith("language-001") and " finished " in first
    assert "damaged   config.yaml: the file is missing" in second
    assert "damaged" in third and "SHA256SUMS is missing" in third
    assert "damaged   run.json: the file is missing" in fourth
    assert err.count("is damaged and left out") == 3


# --- The log of an unfinished run ---------------------------------------------------------------------------------


@pytest.fixture
def crashed(text, tmp_path) -> Run:
    """A run whose last checkpoint is that of step 8, and whose log ends at step 10."""
    broken_off(tiny(text, save_every=4, evaluate_every=30), tmp_path / "crashed", 10, MemoryError())
    return Run(tmp_path / "crashed")


def edited(change: Callable[[list[bytes]], list[bytes]], run: Run) -> None:
    path = run.folder / METRICS
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0].replace(b"1", b"2", 1), *lines[1:]], "was changed before the last checkpoint"),
        (lambda lines: lines[1:], "was changed before the last checkpoint"),
        (lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]], "was changed before the last checkpoint"),
        (lambda lines: lines[:7], "expected at least [0-9]+ bytes, got [0-9]+: the file was truncated"),
        (lambda lines: [], "expected at least [0-9]+ bytes, got 0"),
    ],
)
def test_a_log_changed_before_the_last_checkpoint_is_damaged(change, message, crashed):
    assert [line["step"] for line in crashed.metrics()] == list(range(1, 11))
    edited(change, crashed)
    with pytest.raises(Damaged, match=message):
        list(crashed.metrics())
    with pytest.raises(Damaged, match=message):
        resume(crashed.folder)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("cut", [1, 20])
def test_a_last_line_cut_by_a_crash_is_tolerated(cut, crashed, text, tmp_path):
    edited(lambda lines: [*lines[:-1], lines[-1][:-cut]], crashed)
    assert [line["step"] for line in crashed.metrics()][:9] == list(range(1, 10))
    run, _ = resume(crashed.folder)
    whole, _ = start(tiny(text, save_every=4, evaluate_every=30), tmp_path, "whole")
    assert (run.folder / METRICS).read_bytes() == (whole.folder / METRICS).read_bytes()


def test_a_log_without_checkpoints_is_damaged(crashed):
    shutil.rmtree(crashed.checkpoints)
    for use in (lambda: list(crashed.metrics()), lambda: resume(crashed.folder)):
        with pytest.raises(Damaged, match=r"metrics.jsonl: expected no lines without a checkpoint"):
            use()


def test_a_mark_does_not_read_the_log_again(crashed, monkeypatch):
    run = Run(crashed.folder)
    run.log(1, {"loss": 1.0})
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    assert run.marks()[METRICS]["bytes"] == len('{"step": 1, "loss": 1.0}\n')


# --- Crashes ------------------------------------------------------------------------------------------------------


def kill_at(patch: pytest.MonkeyPatch, number: int, after: bool, where: Path) -> list[str]:
    """Kill at the rename with this number in a folder, before or after it; return the names of all of them so far."""
    seen: list[str] = []
    rename = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if target.parent == where:
            seen.append(target.name)
        if target.parent != where or len(seen) != number:
            return rename(path, target)
        if after:
            rename(path, target)
        raise Killed

    patch.setattr(Path, "replace", replace)
    return seen


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("count", "files"), [(1, ["run.json", "result.json"]), (2, ["summary.json"])])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_write_leaves_a_run_that_can_go_on(count, files, after, text, tmp_path):
    config, folder = tiny(text, steps=1, seeds=count, evaluate_every=1), tmp_path / "runs"
    with pytest.MonkeyPatch.context() as patch:
        names = kill_at(patch, 0, after, folder)
        whole = seeds.train(EXPERIMENT, config, folder)
    assert {SUMS, "config.yaml", *files} <= set(names)
    expected = {name: sorted(listed(folder / name)) for name in ("", "seed-0")[:count]}
    for number in range(1, len(names) + 1):
        shutil.rmtree(folder)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, number, after, folder)
            with pytest.raises(Killed):
                seeds.train(EXPERIMENT, config, folder)
        assert {cells(run)[5] for run in all_runs(folder)} <= {"finished", "unfinished"}
        again = seeds.train(EXPERIMENT, config, folder)
        assert [result["test"] for result in again.results] == [result["test"] for result in whole.results]
        assert {name: sorted(listed(folder / name)) for name in expected} == expected
        assert {cells(run)[5] for run in again.runs} == {"finished"}
        assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_replaced_file_is_not_listed_meanwhile(tmp_path, monkeypatch):
    write_listed(tmp_path, {"a": b"1", "b": b"1"})
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 2, True, tmp_path)
        with pytest.raises(Killed):
            write_listed(tmp_path, {"a": b"2"})
    assert (tmp_path / "a").read_bytes() == b"2" and list(read_sums(tmp_path)) == ["b"]


def test_a_sum_without_run_json_is_damage_once_there_are_checkpoints(trained):
    config = experiment_of(Run(trained))[1]
    lines = (trained / SUMS).read_text().splitlines(keepends=True)[:-1]
    (trained / SUMS).write_bytes(closed("".join(line for line in lines if "run.json" not in line).encode()))
    with pytest.raises(UsageError, match=r"SHA256SUMS: expected a line for run.json, got none"):
        seeds.train(EXPERIMENT, config, trained)
    assert cells_of(trained) == ["damaged"]


def cells_of(folder: Path) -> list[str]:
    return [row(run, folder.parent)[6] for run in all_runs(folder.parent)]


def test_a_run_of_an_earlier_version_names_the_reason(trained):
    """Once its files are listed by hand, it can be evaluated, but not continued without the sums of its log."""
    unfinish(trained)
    with pytest.raises(Damaged, match="an earlier version of subquad made this run"):
        Run(trained).rewind({METRICS: 7, "timing.jsonl": 7})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_a_folder_of_runs_is_not_waited_for(tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / SUMS)
    assert all_runs(tmp_path) == []
    os.mkfifo(tmp_path / METRICS)
    with pytest.raises(Damaged, match=f"{METRICS}: expected a regular file, got a named pipe"):
        Log(tmp_path / METRICS).rewind(None)


def test_a_log_behind_a_link_is_not_truncated(tmp_path):
    mine, link = Log(tmp_path / "mine"), tmp_path / METRICS
    mine.append(b"one\n")
    mark = mine.mark()
    mine.append(b"two\n")
    link.symlink_to(mine.path)
    with pytest.raises(RunError, match=f"cannot write .*{METRICS}"):
        Log(link).rewind(mark)
    assert mine.path.read_bytes() == b"one\ntwo\n"
