"""Files that the lab writes: whole or absent, and no link leads it to another file."""

import os
import random
import stat
import subprocess
import sys

import pytest
import torch

from subquad_lab import RunError
from subquad_lab.system import files
from subquad_lab.system.checksums import Damaged
from subquad_lab.system.files import append, made_whole, remove_leftovers, write_whole
from subquad_lab.system.journal import Journal
from subquad_lab.training import checkpoint
from subquad_lab.training.checkpoint import Checkpoint
from subquad_lab.training.run import METRICS, Run


@pytest.fixture
def victim(tmp_path):
    """A file that others want to be overwritten."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def test_the_name_of_a_temporary_file_cannot_be_guessed(tmp_path):
    names = []
    for _ in range(2):
        with made_whole(tmp_path / "report.html") as temporary:
            names.append(temporary.name)
            assert temporary.read_bytes() == b""
    assert names[0] != names[1] and str(os.getpid()) not in names[0].split(".")
    assert files.LEFTOVER.fullmatch(names[0])


def test_a_link_under_the_temporary_name_is_refused(tmp_path, victim, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)  # Someone has guessed it.
    (tmp_path / f".page.html.{'0' * 16}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "page.html", b"new")
    assert victim.read_text() == "precious" and not (tmp_path / "page.html").exists()


def test_a_link_under_the_final_name_is_replaced(tmp_path, victim):
    (tmp_path / "page.html").symlink_to(victim)
    write_whole(tmp_path / "page.html", b"new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "page.html").read_bytes() == b"new" and not (tmp_path / "page.html").is_symlink()


def test_a_log_is_not_appended_to_a_link(tmp_path, victim):
    (tmp_path / METRICS).symlink_to(victim)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory|Too many"):
        append(tmp_path / METRICS, b"line\n")
    with pytest.raises(RunError, match=rf"cannot write .*{METRICS}"):
        Run(tmp_path).log(1, {"loss": 1.0})
    (tmp_path / "journal.log").symlink_to(victim)
    with pytest.raises(RunError, match=r"cannot open .*journal.log"):
        Journal(tmp_path / "journal.log")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", [".new", ".old", ".new.0000000000000000", ".old.0000000000000000"])
def test_links_among_checkpoints_are_not_followed(name, tmp_path):
    """They only waited for the next checkpoint before, or were in its way."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "other")
    for number in (1, 2, 3):
        checkpoint.save(folder, number, Checkpoint({"x": torch.ones(1)}, {}))
    assert sorted(path.name for path in folder.iterdir()) == ["00000002", "00000003"]
    assert (tmp_path / "other" / "precious").exists()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_umask_decides_who_may_read(umask, tmp_path):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "a", b"1")
        append(tmp_path / "b", b"1")
        checkpoint.save(tmp_path / "checkpoints", 1, Checkpoint({}, {}))
    finally:
        os.umask(before)
    for name in ("a", "b", "checkpoints/00000001/state.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "checkpoints" / "00000001").stat().st_mode) == 0o777 & ~umask


def test_what_a_killed_process_leaves_is_removed_and_nothing_else(tmp_path, victim):
    script = (
        "import os, sys, pathlib; from subquad_lab.system.files import made_whole\n"
        "with made_whole(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "result.json")]).returncode == -9
    others = (".mine", ".mine.123", "a.0123456789abcdef", ".folder.0123456789abcdef", "victim")
    for name in others[:3]:
        (tmp_path / name).touch()
    (tmp_path / others[3]).mkdir()
    (tmp_path / ".link.0123456789abcdef").symlink_to(victim)
    assert len(list(tmp_path.iterdir())) == len(others) + 2
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


# --- The journal of a sweep ---------------------------------------------------------------------------------------

RECORDS = [{"op_code": i, "value": 0.1 * i} for i in range(5)]


@pytest.fixture
def journal(tmp_path) -> Journal:
    made = Journal(tmp_path / "journal.log")
    made.append_logs(RECORDS[:3])
    made.append_logs(RECORDS[3:])
    return made


def test_a_journal_is_shared(journal):
    other = Journal(journal.path)
    assert list(other.read_logs(0)) == RECORDS
    other.append_logs([{"op_code": 9}])
    assert list(journal.read_logs(4)) == [RECORDS[4], {"op_code": 9}]
    journal.append_logs([{"op_code": 10}])
    assert list(Journal(journal.path).read_logs(5)) == [{"op_code": 9}, {"op_code": 10}]


def test_every_flipped_bit_of_a_journal_is_noticed(journal):
    content = journal.path.read_bytes()
    last = 8 * len(content) - 1
    for bit in [*random.Random(0).sample(range(last), 300), last]:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        journal.path.write_bytes(changed)
        if bit // 8 == len(content) - 1:  # Without its line break, the last line is one that a crash has cut.
            assert list(Journal(journal.path).read_logs(0)) == RECORDS[:-1]
            continue
        with pytest.raises(Damaged, match=r"journal.log: line \d does not match its checksum"):
            list(Journal(journal.path).read_logs(0))


def test_lines_of_a_journal_keep_their_order(journal):
    lines = journal.path.read_bytes().splitlines(keepends=True)
    for changed in (lines[1:], [lines[1], lines[0], *lines[2:]], [lines[0], *lines]):
        journal.path.write_bytes(b"".join(changed))
        with pytest.raises(Damaged, match=r"line 1|line 2"):
            list(Journal(journal.path).read_logs(0))


def test_a_line_that_a_crash_has_cut_is_written_again(journal):
    content = journal.path.read_bytes()
    begin = content.rindex(b"\n", 0, -1) + 1
    for size in range(begin, len(content)):
        journal.path.write_bytes(content[:size])
        other = Journal(journal.path)
        assert list(other.read_logs(0)) == RECORDS[:-1]
        other.append_logs(RECORDS[-1:])
        assert journal.path.read_bytes() == content
    assert list(other.read_logs(0)) == RECORDS
    journal.path.write_bytes(content[:begin])
    with pytest.raises(Damaged, match="the file was truncated"):
        other.read_logs(0)
