"""One watcher for all readers: runs that grow, finish, appear, vanish or are damaged."""

import json
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from small_runs import unfinish
from subquad_lab.report.live import listener
from subquad_lab.report.live import watcher as module
from subquad_lab.report.live.watcher import Watcher, pause_after, served_runs
from subquad_lab.training.run import all_runs


@pytest.fixture
def watcher(trained) -> Watcher:
    """A watcher of a folder with an unfinished run."""
    unfinish(trained)
    return Watcher(trained.parent)


def news(watcher: Watcher, seen: int = 0) -> tuple[int, dict[str, dict]]:
    """Look at everything, and return the version and the messages after version `seen` by run."""
    watcher._find_at = 0.0
    watcher.look()
    version, text = watcher.since(seen)
    messages = [json.loads(part.removeprefix(b"data: ")) for part in text.split(b"\n\n") if part]
    return version, {message["run"]: message for message in messages}


def joined(watcher: Watcher) -> socket.socket:
    """Return the far end of the connection of a new reader."""
    near, far = socket.socketpair()
    watcher.add(near, 0, lambda connection: connection.close())
    return far


def test_a_run_that_grows_is_sent_with_the_numbers_of_its_log(watcher, trained):
    log = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    version, messages = news(watcher)
    message = messages["language-001"]
    assert (message["state"], message["step"], message["total"], message["damage"]) == ("unfinished", 4, 4, "")
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert message["loss"][0] == [1, 2, 3, 4] and message["loss"][1] == pytest.approx(losses, rel=1e-5)
    assert message["valid"] == [[4], [pytest.approx(log[-1]["valid/perplexity"], rel=1e-5)]]
    assert news(watcher, version) == (version, {})
    with (trained / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "epoch": 0.1, "loss": 0.125}\n')
    version, messages = news(watcher, version)
    assert messages["language-001"]["step"] == 5 and messages["language-001"]["loss"][1][-1] == 0.125


def test_a_run_that_finishes_appears_or_vanishes_is_sent(watcher, trained, trained_once):
    version, _ = news(watcher)
    whole = trained_once / "runs" / "language-001"
    for name in ("result.json", "SHA256SUMS"):
        shutil.copy(whole / name, trained / name)
    shutil.copy(whole / "config.yaml", trained / "config.yaml")
    version, messages = news(watcher, version)
    assert messages["language-001"]["state"] == "finished" and messages["language-001"]["loss"][0] == [1, 2, 3, 4]
    shutil.copytree(whole, trained.parent / "later" / "a")
    version, messages = news(watcher, version)
    assert messages == {"later/a": {"run": "later/a", "name": "later/a", "state": "finished"}}
    shutil.rmtree(trained.parent / "later")
    version, messages = news(watcher, version)
    assert messages == {"later/a": {"run": "later/a", "name": "later/a", "state": "removed"}}


def test_damage_is_sent_and_heals(watcher, trained):
    content = (trained / "config.yaml").read_bytes()
    (trained / "config.yaml").write_bytes(content[:-9])
    version, messages = news(watcher)
    assert messages["language-001"]["state"] == "damaged" and "config.yaml" in messages["language-001"]["damage"]
    (trained / "config.yaml").write_bytes(content)
    version, messages = news(watcher, version)
    assert messages["language-001"]["state"] == "unfinished" and messages["language-001"]["step"] == 4


def test_a_damaged_or_refused_run_that_is_deleted_is_removed(watcher, trained):
    shutil.copytree(trained, trained.parent / "linked")
    (trained.parent / "linked" / "link").symlink_to(trained)
    (trained / "config.yaml").write_bytes(b"cut")
    version, messages = news(watcher)
    assert {message["state"] for message in messages.values()} == {"damaged"} and len(messages) == 2
    shutil.rmtree(trained)
    shutil.rmtree(trained.parent / "linked")
    version, messages = news(watcher, version)
    assert {place: message["state"] for place, message in messages.items()} == {
        "language-001": "removed", "linked": "removed"
    }  # fmt: skip
    assert news(watcher, version) == (version, {})


def test_a_fault_in_one_log_does_not_hide_the_other_runs(watcher, trained, monkeypatch, capfd):
    shutil.copytree(trained, trained.parent / "another")
    real = module.Progress.read

    def read(progress) -> bool:
        if progress.path.parent.name == "another":
            raise ZeroDivisionError("planted")
        return real(progress)

    monkeypatch.setattr(module.Progress, "read", read)
    assert news(watcher)[1]["language-001"]["step"] == 4
    assert "another: ZeroDivisionError: planted" in capfd.readouterr().err


def test_a_run_with_a_link_is_refused_and_a_linked_folder_is_not_entered(watcher, trained, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(trained, outside / "secret")
    (trained.parent / "linked").symlink_to(outside)
    (trained / "metrics.jsonl").unlink()
    (trained / "metrics.jsonl").symlink_to(outside / "secret" / "metrics.jsonl")
    runs, refused = served_runs(trained.parent)
    assert runs == {}
    assert refused == {"language-001": "metrics.jsonl is a symbolic link, which is not followed"}
    _, messages = news(watcher)
    assert messages.keys() == {"language-001"}
    assert messages["language-001"]["state"] == "damaged" and "loss" not in messages["language-001"]


def test_names_are_text_without_control_characters(watcher, trained):
    folder = trained.parent / "<"  # A slash separates folders.
    folder.mkdir()
    trained.rename(folder / "script><img src=x onerror=alert(1)>\x1b[2J\u202e")
    _, messages = news(watcher)
    (message,) = messages.values()
    assert message["name"] == "</script><img src=x onerror=alert(1)>\\x1b[2J\\u202e"
    assert message["run"].encode() == b"</script><img src=x onerror=alert(1)>\x1b[2J\xe2\x80\xae"


def test_nothing_is_read_without_readers_and_one_look_serves_all(watcher, monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    looks = []
    monkeypatch.setattr(watcher, "look", lambda: looks.append(threading.get_ident()))
    watcher.start()
    time.sleep(0.1)
    assert looks == []
    readers = [joined(watcher), joined(watcher)]
    end = time.monotonic() + 10
    while len(looks) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(looks) >= 3 and len(set(looks)) == 1
    monkeypatch.setattr(listener, "HEARTBEAT_SECONDS", 0.0)  # A reader who has gone is noticed at the next heartbeat.
    for reader in readers:
        reader.close()
    time.sleep(0.2)
    assert watcher._listeners == []
    count = len(looks)
    time.sleep(0.1)
    assert len(looks) == count


def test_a_fault_does_not_end_the_watcher(watcher, monkeypatch, capfd):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    whole, failed = watcher.look, threading.Event()

    def look() -> None:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError("planted")
        whole()

    monkeypatch.setattr(watcher, "look", look)
    watcher.start()
    with joined(watcher) as reader:
        reader.settimeout(10)
        assert b"language-001" in reader.recv(1 << 16)
    assert "ZeroDivisionError: planted" in capfd.readouterr().err


def test_logs_that_take_long_to_read_wait_for_their_turn(watcher, trained, monkeypatch):
    for name in ("a", "b"):
        shutil.copytree(trained, trained.parent / name)
    read = []
    monkeypatch.setattr(module, "READ_SECONDS", 0.0)
    monkeypatch.setattr(module.Progress, "read", lambda progress: read.append(progress.path.parent.name))
    for _ in range(5):
        watcher.look()
    assert read == ["a", "b", "language-001", "a", "b"]


def test_readers_get_heartbeats_though_no_run_can_be_read(watcher, monkeypatch, capfd):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(listener, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(watcher, "look", lambda: 1 / 0)
    watcher.start()
    with joined(watcher) as reader:
        reader.settimeout(10)
        assert reader.recv(3) == b":\n\n"
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_looking_takes_a_small_share_of_the_time():
    assert pause_after(0.001, 1.0) == 1.0
    assert pause_after(2.0, 1.0) == 40.0


def test_runs_are_found_while_another_process_removes_folders(tmp_path, monkeypatch, trained):
    """A checkpoint that vanishes between the listing of its parent and its own is not an error."""
    gone = trained / "checkpoints" / "00000009"
    gone.mkdir()
    real = module.os.scandir

    def scandir(path):
        if Path(path) == gone and gone.exists():
            gone.rmdir()
        return real(path)

    monkeypatch.setattr(module.os, "scandir", scandir)
    assert [run.folder for run in all_runs(tmp_path)] == [trained] and not gone.exists()
