"""What the page reads of runs: each once, in short, and again only when it has changed."""

import json
import math
import shutil
from pathlib import Path

import pytest

from small_runs import reseal
from subquad_lab.figures.plots import CURVE_POINTS, values_by_epoch
from subquad_lab.report import reading as module
from subquad_lab.report.experiments import goodness
from subquad_lab.report.reading import History, Reader
from subquad_lab.training.run import Run


def records(count: int) -> list[dict[str, float]]:
    return [{"epoch": float(i), "loss": float(i), "valid/perplexity": 2.0 * i} for i in range(1, count + 1)]


def write_log(run: Path, lines: list[dict[str, float]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reseal(run)


def test_a_log_becomes_a_record_per_evaluation_with_the_mean_loss_since_the_one_before(trained):
    write_log(trained, [
        {"step": 1, "epoch": 0.5, "loss": 4.0}, {"step": 2, "epoch": 1.0, "loss": 2.0},
        {"step": 2, "epoch": 1.0, "valid/perplexity": 9.0}, {"step": 3, "epoch": 1.5, "loss": math.inf},
        {"step": 4, "epoch": 2.0, "loss": -math.inf}, {"step": 4, "epoch": 2.0, "valid/perplexity": 8.0},
        {"step": 5, "epoch": 2.5, "loss": 1.0},
    ])  # fmt: skip
    found = module.history(Run(trained), "perplexity")
    first, second = found.metrics()
    assert found.steps == 5 and first == {"epoch": 1.0, "loss": 3.0, "valid/perplexity": 9.0}
    assert math.isnan(second["loss"]) and second["valid/perplexity"] == 8.0


@pytest.mark.parametrize("line", [{"step": 1}, {"step": 1, "epoch": math.nan}, {"step": 1, "epoch": 10**400}])
def test_an_evaluation_without_an_epoch_is_damage(line, trained):
    write_log(trained, [line | {"valid/perplexity": 2.0}])
    readings, damaged = Reader().read({"a": Run(trained)})
    assert readings == {} and "metrics.jsonl: expected an epoch and numbers in each line" in damaged["a"]


@pytest.mark.parametrize("count", [1, CURVE_POINTS, CURVE_POINTS + 1, 12_345])
def test_a_curve_of_many_evaluations_has_few_points_with_the_same_mean(count):
    runs = [History(count, records(count)), History(count, records(count))]
    losses, measures = values_by_epoch(runs, "perplexity")
    assert min(count, CURVE_POINTS // 2) <= len(measures) <= CURVE_POINTS and list(measures)[-1] == count
    if count <= CURVE_POINTS:
        assert measures == {float(i): [2.0 * i, 2.0 * i] for i in range(1, count + 1)}
    size = -(-count // CURVE_POINTS)
    assert losses[float(size)] == [(size + 1) / 2] * 2


def test_a_reader_reads_again_only_what_has_changed(trained, monkeypatch):
    other = trained.with_name("other")
    shutil.copytree(trained, other)
    runs = {"a": Run(trained), "b": Run(other)}
    reader, places = Reader(), []
    read = module.reading
    monkeypatch.setattr(module, "reading", lambda place, run: places.append(place) or read(place, run))
    first, _ = reader.read(runs)
    assert places == ["a", "b"]
    (other / "metrics.jsonl").touch()
    second, _ = reader.read(runs)
    assert places == ["a", "b", "b"] and second["a"] is first["a"]
    (trained / "run.json").write_text("[")
    readings, damaged = reader.read(runs)
    assert list(readings) == ["b"] and list(damaged) == ["a"]


def test_a_result_that_is_not_finite_is_the_worst():
    for is_higher in (True, False):
        scores = [math.nan, None, 1.0, -math.inf, 3.0, 2.0, math.inf]
        best = sorted(scores, key=lambda score: goodness(score, is_higher), reverse=True)
        assert best[:3] == ([3.0, 2.0, 1.0] if is_higher else [1.0, 2.0, 3.0])
