"""Series of seeds: each a run of its own, stopped and resumed as one, and used as one."""

import json
import signal

import pytest

from small_runs import assert_same, start, tiny, unfinish
from subquad_lab import UsageError
from subquad_lab.cli import main
from subquad_lab.commands.train import print_result
from subquad_lab.experiments.language import EXPERIMENT
from subquad_lab.experiments.stored import chosen, opened
from subquad_lab.training import seeds
from subquad_lab.training.interruption import Interrupted
from subquad_lab.training.loop import Trainer
from subquad_lab.training.run import Run


def test_a_series_stopped_anywhere_goes_on_where_it_was(text, tmp_path, monkeypatch):
    config = tiny(text, seeds=3, seed=5, steps=8)
    whole = seeds.train(EXPERIMENT, config, tmp_path / "whole")
    assert [run.name for run in whole.runs] == ["seed-5", "seed-6", "seed-7"]
    after_step, count = Trainer._stop_if_asked, 0

    def stop(trainer):
        nonlocal count
        count += 1
        after_step(trainer)
        if count == 20:  # in the second run
            raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(Trainer, "_stop_if_asked", stop)
    with pytest.raises(Interrupted):
        seeds.train(EXPERIMENT, config, tmp_path / "cut")
    monkeypatch.setattr(Trainer, "_stop_if_asked", after_step)
    assert (tmp_path / "cut" / "seed-5" / "result.json").is_file()
    assert (tmp_path / "cut" / "seed-6").is_dir()
    assert not (tmp_path / "cut" / "seed-6" / "result.json").exists()
    assert not (tmp_path / "cut" / "seed-7").exists()
    with pytest.raises(UsageError, match="holds a run with another steps; use the same values or a new folder"):
        seeds.train(EXPERIMENT, tiny(text, seeds=3, seed=5, steps=9), tmp_path / "cut")
    again = seeds.train(*opened(tmp_path / "cut"), tmp_path / "cut")
    for one, other in zip(again.runs, whole.runs, strict=True):
        assert_same(one, other)
    assert json.loads((tmp_path / "cut" / "summary.json").read_text()) == seeds.summary(whole)


def test_each_run_of_a_series_is_the_run_of_its_seed(text, tmp_path):
    made = seeds.train(EXPERIMENT, tiny(text, seeds=2, seed=3, steps=6), tmp_path, numbered=True)
    alone, _ = start(tiny(text, seed=4, steps=6), tmp_path)
    assert_same(made.runs[1], alone)
    assert made.values("test", "perplexity")[0] != made.values("test", "perplexity")[1]


def test_the_best_run_speaks_for_a_series(text, tmp_path, capfd, complaint):
    made = seeds.train(EXPERIMENT, tiny(text, seeds=3, steps=6), tmp_path, numbered=True)
    values = made.values("valid", "perplexity")
    assert chosen(made.folder) == made.runs[values.index(min(values))].folder
    assert chosen(made.runs[2].folder) == made.runs[2].folder
    capfd.readouterr()
    assert main(["sample", str(made.folder), "--prompt=w1", "--count=2"]) == 0
    assert capfd.readouterr().out.count("w1") >= 2
    for run in made.runs:
        unfinish(run.folder)
    assert f"RUN: {made.folder} has no finished run yet" in complaint(["evaluate", str(made.folder)])


def test_the_figure_of_one_run_has_no_interval(text, tmp_path, capfd):
    made = seeds.train(EXPERIMENT, tiny(text, steps=3), tmp_path, numbered=True)
    value = made.values("test", "perplexity")[0]
    assert made.shown("test", "perplexity") == f"{value:.4g}"
    assert not (made.folder / "summary.json").exists()
    print_result(EXPERIMENT, made)
    assert capfd.readouterr().out.startswith("test: cross-entropy ")
    assert Run(made.folder).result() == made.results[0]
