"""compare and sweep: equal budgets, nothing twice, shared by processes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from small_runs import read_config
from subquad_lab import Diverged, RunError
from subquad_lab.cli import main
from subquad_lab.commands import sweep
from subquad_lab.training import lifecycle, processes


def test_compare_runs_all_variants_at_equal_size_and_goes_on_where_it_was(text, tmp_path, capfd, monkeypatch):
    out = tmp_path / "compare"
    arguments = ["compare", "language", f"--data={text}", f"--out={out}", "--width=16", "--heads=2", "--layers=1",
                 "--context=8", "--batch=4", "--steps=3", "--warmup=1"]  # fmt: skip
    assert main(arguments) == 0
    shown = capfd.readouterr().out
    content = json.loads((out / "compare.json").read_text())
    assert list(content) == ["exact", "taylor:2", "random:64", "linear:elu", "separable", "lstm", "rnn"]
    made = {name: entry["runs"][0] for name, entry in content.items()}
    sizes = [run["parameters"]["total"] for run in made.values()]
    assert max(sizes) < 1.1 * min(sizes)
    assert {run["steps"] for run in made.values()} == {3}
    for name, run in made.items():
        assert re.search(rf"^{name} .* {run['test']['perplexity']:.4g} ", shown, re.MULTILINE)
    assert b"<svg" in (out / "compare.svg").read_bytes()

    def refused(*_):
        raise AssertionError("a finished run was trained again")

    monkeypatch.setattr(lifecycle, "begin", refused)
    assert main(arguments) == 0
    assert capfd.readouterr().out.splitlines()[-9:] == shown.splitlines()[-9:]
    assert main([*arguments, "--lr=0.5"]) == 2
    assert "holds a run with another lr; use the same values or a new folder" in capfd.readouterr().err


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
    values = [float(re.search(r"perplexity ([\d.e+]+)", line)[1]) for line in shown[:-1]]
    assert values == sorted(values)
    assert len(values) == 4
    assert shown[-1] == str(out / "sweep.svg")
    assert (out / "sweep.svg").read_bytes().count(b"<svg") == 1
    assert main(arguments) == 0
    assert capfd.readouterr().out.splitlines() == shown
    assert not (out / "trial-004").exists()


def test_sweep_searches_a_span_and_takes_over_what_was_killed(options, tmp_path, capfd, monkeypatch):
    out = tmp_path / "sweep"
    arguments = [*sweep_arguments(options, out), "--span.lr=0.001,0.1", "--trials=3"]
    start = lifecycle.begin

    def killed(*given):
        if given[3] == "trial-001":
            raise KeyboardInterrupt
        return start(*given)

    monkeypatch.setattr(lifecycle, "begin", killed)
    assert main(arguments) == 130
    monkeypatch.setattr(lifecycle, "begin", start)
    capfd.readouterr()
    assert main(arguments) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line[:9] for line in lines[:-1]) == ["trial-000", "trial-001", "trial-002"]
    rates = [read_config(out / f"trial-{i:03d}")["lr"] for i in range(3)]
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    assert len(set(rates)) == 3


def test_a_sweep_does_not_go_on_with_another_config(options, tmp_path, capfd):
    out = tmp_path / "sweep"
    arguments = [*sweep_arguments(options, out), "--grid.lr=0.01"]
    assert main(arguments) == 0
    for other in ([*arguments, "--dropout=0.5"], [*arguments[:-1], "--grid.lr=0.01,0.1"]):
        assert main(other) == 2
        assert "holds a sweep with another config, grid or span; use a new folder" in capfd.readouterr().err


def test_values_of_a_grid_must_fit_each_other(options, tmp_path, capfd):
    arguments = [*sweep_arguments(options, tmp_path / "sweep"), "--model=transformer", "--grid.width=8,9", "--heads=2"]
    assert main(arguments) == 2
    assert "heads: expected a divisor of the width 9, got 2" in capfd.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_a_span_of_whole_ends_is_searched_between_them(options, tmp_path):
    """By the kind of the field, not by how its ends are written."""
    out = tmp_path / "sweep"
    arguments = [*sweep_arguments(options, out), "--span.weight-decay=0,1", "--span.width=4,8", "--trials=3"]
    assert main(arguments) == 0
    configs = [read_config(out / f"trial-{i:03d}") for i in range(3)]
    assert all(0 < config["weight_decay"] < 1 for config in configs)
    assert all(isinstance(config["width"], int) for config in configs)


def test_a_trial_that_diverges_fails_and_a_full_disk_ends_the_sweep(options, tmp_path, capfd, monkeypatch):
    out = tmp_path / "sweep"
    arguments = [*sweep_arguments(options, out), "--grid.lr=0.01,0.1"]
    start = lifecycle.begin

    def full(*_):
        raise RunError("cannot write: No space left on device")

    monkeypatch.setattr(lifecycle, "begin", full)
    assert main(arguments) == 1

    def diverged(*given):
        if given[3] == "trial-000":
            raise Diverged("the loss is nan")
        return start(*given)

    monkeypatch.setattr(lifecycle, "begin", diverged)
    capfd.readouterr()
    assert main(arguments) == 0
    shown = capfd.readouterr().out
    assert "trial-000: the loss is nan" in shown
    assert "trial-001  validation perplexity" in shown
    assert "1 trials failed, 0 are running in other processes" in shown


def test_a_trial_killed_before_it_had_all_its_values_gets_them(options, tmp_path, monkeypatch):
    from optuna.trial import Trial

    out = tmp_path / "sweep"
    arguments = [*sweep_arguments(options, out), "--grid.lr=0.01,0.1", "--grid.width=4,6"]
    suggest = Trial.suggest_categorical

    def killed(trial, field, options):
        if field == "width":
            raise KeyboardInterrupt
        return suggest(trial, field, options)

    monkeypatch.setattr(Trial, "suggest_categorical", killed)
    assert main(arguments) == 130
    monkeypatch.setattr(Trial, "suggest_categorical", suggest)
    assert main(arguments) == 0
    configs = [read_config(path) for path in sorted(out.glob("trial-*"))]
    tried = sorted((config["lr"], config["width"]) for config in configs)
    assert tried == [(0.01, 4), (0.01, 6), (0.1, 4), (0.1, 6)]


@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_several_processes_are_refused_where_each_run_may_have_them(command, options, tmp_path, complaint, monkeypatch):
    monkeypatch.setattr(processes, "processes", lambda: SimpleNamespace(num_processes=2, is_main_process=True))
    own = [*options, "--grid.lr=0.1"] if command == "sweep" else [x for x in options if not x.startswith("--model")]
    line = complaint([command, "language", *own])
    assert f"{command}: expected one process, got 2; start it without torchrun" in line


def test_a_trial_that_ends_while_another_process_looks_for_work_is_left_alone(options, tmp_path, monkeypatch):
    out = tmp_path / "sweep"
    arguments = [*sweep_arguments(options, out), "--grid.lr=0.01,0.1"]
    monkeypatch.setattr(sweep, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(arguments) == 130
    monkeypatch.undo()
    study, hold = sweep.make_study(out, higher_is_better=False), sweep.hold

    def ended(folder, number):
        if study.trials[number].state.name == "RUNNING" and number == 0:
            study.tell(number, 5.0)
        return hold(folder, number)

    monkeypatch.setattr(sweep, "hold", ended)
    monkeypatch.setattr(sweep, "show", lambda *_: None)
    assert main(arguments) == 0
    assert not (out / "trial-000").exists()
    assert (out / "trial-001" / "result.json").exists()


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
    trained = [err.count("validation:") for _, err in texts]
    assert sum(trained) == 4  # None was run twice.
