"""The demo, stage by stage: what is done is not done again, what fails is said, and a stop is a stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from small_runs import heed_interrupts, unfinish
from subquad_lab.cli import main
from subquad_lab.commands import demo, verify
from subquad_lab.options.fields import presets
from subquad_lab.system.files import locked

SMALL = {
    "language": "steps: 2\nbatch: 2\nwidth: 8\nheads: 2\nlayers: 1\ncontext: 4\n",
    "graphs": "seeds: 2\nsteps: 2\n",
}


def test_every_experiment_has_a_quick_preset():
    assert all("quick" in presets(name) for name in demo.EXPERIMENTS)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Stages that take no time, in this process and in those that it starts."""
    package = tmp_path / "small"
    package.mkdir()
    for name, content in SMALL.items():
        (package / f"{name}.yaml").write_text(content)
    patch = f"""
from pathlib import Path
from subquad_lab.commands import demo, verify
demo.EXPERIMENTS = {{name: demo.EXPERIMENTS[name] for name in ("language", "graphs")}}
demo.presets = lambda name: {{"quick": Path({str(package)!r}) / f"{{name}}.yaml"}}
chosen = verify.chosen
verify.chosen = lambda which: chosen(["14", "21"])
"""
    (package / "small_demo.py").write_text(f"{patch}\nimport sys\nsys.exit(demo.main())\n")
    exec(compile(patch, "patch", "exec"), {})
    monkeypatch.setattr(demo, "PROCESS", (sys.executable, str(package / "small_demo.py")))
    yield tmp_path / "demo"
    import importlib

    importlib.reload(verify)
    importlib.reload(demo)


def make_plan(folder: Path) -> None:
    """Make a stage in this process, which saves the start of another where the stage is not what is tested."""
    folder.mkdir(exist_ok=True)
    demo.make_plan(folder)


def test_the_demo_ends_in_a_page_and_is_not_done_twice(small, capfd):
    assert main(["demo", "--out", str(small)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        f"{i} of 5, {name}" for i, name in enumerate(("plan", "verify", "language", "graphs", "report"), 1)
    ]
    assert lines[-1] == str(small / "report.html")
    assert "2 of 2 claims hold" in lines[1]
    page = (small / "report.html").read_text()
    assert all(f'id="{name}"' in page for name in ("experiment-language", "experiment-graphs", "claims"))
    assert "if the inputs at even positions" in page
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*.json")}
    begin = time.monotonic()
    assert main(["demo", "--out", str(small)]) == 0
    assert time.monotonic() - begin < 10
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*.json")} == before
    unfinish(small / "runs" / "language")  # One run was not finished.
    (small / "report.html").write_text("an old page")
    os.utime(small / "report.html", (0, 0))
    assert main(["demo", "--out", str(small)]) == 0
    assert (small / "runs" / "language" / "result.json").exists()
    assert (small / "plan.txt").exists()
    assert (small / "report.html").read_text() == page


def test_a_claim_that_fails_is_written_down_and_said(small, capfd):
    """The stage has written its file, which the next demo reuses, but its exit code still counts."""
    script = Path(demo.PROCESS[1])
    script.write_text(
        f"from subquad_lab.theory import recurrence\nrecurrence.even_wins = lambda x: x.sum(-1)\n{script.read_text()}"
    )
    make_plan(small)
    assert main(["demo", "--out", str(small)]) == 1
    assert "verify: subquad: error: 1 of 2 claims fail: 14 (full log: " in capfd.readouterr().err
    assert [row["holds"] for row in json.loads((small / "verify.json").read_text())] == [False, True]
    assert not (small / "report.html").exists()
    assert demo.verified(small) == "1 of 2 claims hold"


@pytest.mark.parametrize("content", ["", "[{", "[]", '[{"number": 14, "verdict": "holds"}]'])
def test_claims_that_cannot_be_read_are_checked_again(content, small):
    small.mkdir()
    (small / "verify.json").write_text(content)
    assert demo.verified(small) is None
    demo.check_claims(small)
    assert demo.verified(small) == "2 of 2 claims hold"


def test_a_folder_belongs_to_one_demo(small, capfd):
    small.mkdir()
    with locked(small):
        assert main(["demo", "--out", str(small)]) == 2
    assert f"{small} is in use by another process" in capfd.readouterr().err
    assert list((small / "logs").iterdir()) == []


def test_a_stage_that_fails_is_said(small, capfd):
    (small / "runs" / "language").mkdir(parents=True)
    (small / "runs" / "language" / "config.yaml").write_text("experiment: images\n")
    make_plan(small)
    demo.check_claims(small)
    assert main(["demo", "--out", str(small)]) == 1
    error = capfd.readouterr().err
    assert "language: subquad: error: " in error
    assert "logs/language.log" in error
    assert "Traceback" not in error


def test_a_folder_that_cannot_be_is_said(capfd):
    assert main(["demo", "--out", "/dev/null/demo"]) == 2
    assert "--out: cannot create /dev/null/demo" in capfd.readouterr().err


ENDLESS_STAGE = """
import sys, time
time.sleep(0.5)  # as if it were importing what it needs
from subquad_lab.commands import demo
demo.make_plan = lambda out: time.sleep(120)
sys.exit(demo.main())
"""
ITS_DEMO = """
import sys
from subquad_lab import cli
from subquad_lab.commands import demo
demo.PROCESS = (sys.executable, sys.argv[1])
sys.exit(cli.main(["demo", "--out", sys.argv[2]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stop_leaves_no_stage_behind(number, tmp_path):
    """Not even if it comes while the stage still imports."""
    (tmp_path / "stage.py").write_text(ENDLESS_STAGE)
    process = subprocess.Popen(
        [sys.executable, "-c", ITS_DEMO, str(tmp_path / "stage.py"), str(tmp_path / "demo")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts,
    )  # fmt: skip
    deadline, stage = time.monotonic() + 60, []
    while not stage and time.monotonic() < deadline:
        time.sleep(0.05)
        stage = children(process.pid)
    assert len(stage) == 1
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "Resume by running the same command again" in error
        assert "Traceback" not in error
    deadline = time.monotonic() + 30
    while Path(f"/proc/{stage[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{stage[0]}").exists()


def children(process: int) -> list[int]:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to see other processes")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
        except OSError:
            continue
        if f"PPid:\t{process}\n" in status and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found
