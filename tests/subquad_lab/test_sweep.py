"""compare and sweep: equal budgets, nothing twice, shared by processes."""

import json
import re
import subprocess
import sys
from pathlib import Path

from reading import read_config
from subquad_lab import runs
from subquad_lab.cli import main


def test_compare_runs_all_variants_at_equal_size_and_goes_on_where_it_was(text, tmp_path, capfd, monkeypatch):
    out = tmp_path / "compare"
    arguments = ["compare", "language", f"--data={text}", f"--out={out}", "--width=16", "--heads=2", "--layers=1",
                 "--context=8", "--batch=4", "--steps=3", "--warmup=1"]  # fmt: skip
    assert main(arguments) == 0
    shown = capfd.readouterr().out
    content = json.loads((out / "compare.json").read_text())
    assert list(content) == ["exact", "taylor:2", "random:64", "linear:elu", "separable", "lstm", "rnn"]
    sizes = [entry["parameters"]["total"] for entry in content.values()]
    assert max(sizes) < 1.1 * min(sizes)
    assert {entry["steps"] for entry in content.values()} == {3}
    for name, entry in content.items():
        assert re.search(rf"^{name} .* {entry['test']['perplexity']:.2f} ", shown, re.MULTILINE)
    assert b"<svg" in (out / "compare.svg").read_bytes()
    assert not re.search(r"not finished", shown)

    def refused(*_):
        raise AssertionError("a finished run was trained again")

    monkeypatch.setattr(runs, "start", refused)
    assert main(arguments) == 0
    assert capfd.readouterr().out.splitlines()[-9:] == shown.splitlines()[-9:]
    assert main([*arguments, "--lr=0.5"]) == 2
    assert "is a run with another config" in capfd.readouterr().err


def sweep_arguments(options: list[str], out: Path) -> list[str]:
    return ["sweep", "language", *(o for o in options if not o.startswith("--out")), f"--out={out}"]


def test_sweep_tries_the_whole_grid_once(options, tmp_path, capfd):
    out = tmp_path / "sweep"
    arguments = [*sweep_arguments(options, out), "--grid.lr=0.001,0.1", "--grid.width=4,8"]
    assert main(arguments) == 0
    shown = capfd.readouterr().out.splitlines()
    tried = {
        (read_config(out / f"trial-{i:03d}")["lr"], read_config(out / f"trial-{i:03d}")["width"]) for i in range(4)
    }
    assert tried == {(0.001, 4), (0.001, 8), (0.1, 4), (0.1, 8)}
    values = [float(re.search(r"perplexity ([\d.e+]+)", line)[1]) for line in shown]
    assert values == sorted(values)
    assert len(values) == 4
    assert main(arguments) == 0
    assert capfd.readouterr().out.splitlines() == shown
    assert not (out / "trial-004").exists()


def test_sweep_searches_a_span_and_takes_over_what_was_killed(options, tmp_path, capfd, monkeypatch):
    out = tmp_path / "sweep"
    arguments = [*sweep_arguments(options, out), "--span.lr=0.001,0.1", "--trials=3"]
    start = runs.start

    def killed(*given):
        if given[-1] == "trial-001":
            raise KeyboardInterrupt
        return start(*given)

    monkeypatch.setattr(runs, "start", killed)
    assert main(arguments) == 130
    monkeypatch.setattr(runs, "start", start)
    capfd.readouterr()
    assert main(arguments) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line[:9] for line in lines) == ["trial-000", "trial-001", "trial-002"]
    rates = [read_config(out / f"trial-{i:03d}")["lr"] for i in range(3)]
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    assert len(set(rates)) == 3


def test_two_processes_share_a_sweep(options, tmp_path):
    out = tmp_path / "sweep"
    arguments = [sys.executable, "-m", "subquad_lab", *sweep_arguments(options, out), "--grid.lr=0.001,0.01,0.1,1.0"]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    trials = sorted(path.name for path in out.glob("trial-*"))
    assert trials == ["trial-000", "trial-001", "trial-002", "trial-003"]
    assert all((out / name / "result.json").exists() for name in trials)
    assert max(out.count("perplexity") for out, _ in texts) == 4
