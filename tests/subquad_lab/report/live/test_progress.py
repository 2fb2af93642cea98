"""The log of a run while it grows: the numbers are those of the log, and damage is reported."""

import json
import math
from pathlib import Path

import pytest

from small_runs import tiny
from subquad_lab.report.live.progress import CURVE_POINTS, MAX_LINE_BYTES, Curve, Progress

MEASURE = "perplexity"


def line(step: int, **figures: float) -> str:
    return json.dumps({"step": step, **figures}) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def progress(log: Path, **changes) -> Progress:
    return Progress(log.parent, MEASURE, tiny("text", **changes))


def append(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_a_log_is_read_as_it_grows_and_a_half_line_waits_for_its_end(log):
    found = progress(log)
    assert not found.read() and found.as_json()["step"] == 0
    append(log, line(1, epoch=0.1, loss=3.0) + line(2, epoch=0.2, loss=2.0) + line(3, epoch=0.3, loss=1.5)[:9])
    assert found.read() and found.step == 2
    append(log, line(3, epoch=0.3, loss=1.5)[9:] + line(3, epoch=0.3, **{"valid/perplexity": 7.25}))
    assert found.read() and not found.read()
    assert found.as_json() == {
        "step": 3, "total": 30, "damage": "", "measure": "valid/perplexity",
        "figures": {"epoch": 0.3, "loss": 1.5, "valid/perplexity": 7.25},
        "loss": [[1, 2, 3], [3.0, 2.0, 1.5]], "valid": [[3], [7.25]],
    }  # fmt: skip


def test_the_number_of_steps_follows_from_the_epochs(log):
    found = progress(log, steps=None, epochs=3)
    append(log, line(7, epoch=7 / 95, loss=1.0))
    found.read()
    assert found.total == 3 * 95


def test_a_log_that_was_cut_is_read_from_its_beginning(log):
    found = progress(log)
    append(log, "".join(line(step, loss=9.0) for step in range(1, 6)))
    found.read()
    log.write_text(line(1, loss=2.0))  # resumed from a checkpoint
    assert found.read()
    assert found.as_json()["loss"] == [[1], [2.0]] and found.step == 1


def test_a_log_that_was_cut_and_grew_again_unseen_is_read_from_its_beginning(log):
    found = progress(log)
    append(log, "".join(line(step, loss=9.0) for step in range(1, 51)))
    found.read()
    log.write_text("".join(line(step, loss=9.0 if step < 20 else 1.0) for step in range(1, 101)))
    assert found.read() and found.damage == ""
    steps, losses = found.as_json()["loss"]
    assert steps == list(range(1, 101)) and losses == [9.0] * 19 + [1.0] * 81


@pytest.mark.parametrize(
    "text",
    ["nonsense", "[1]", '{"step": "1"}', '{"step": 1.5}', '{"step": -1}',
     '{"step": 1' + "0" * 400 + ', "epoch": 1}', '{"loss": 1}', '{"step": 1, "loss": "x"}',
     "[" * 50_000, '{"step": 1, "loss": 1' + "0" * 400 + "}", "\x00\x01", '{"step": 1, "loss": null}', "",
     json.dumps({"step": 1} | {f"m{i}": 1 for i in range(99)})],
    ids=lambda text: text[:22],
)  # fmt: skip
def test_a_line_that_is_not_a_record_is_reported_and_the_next_ones_are_read(log, text):
    found = progress(log)
    append(log, line(1, loss=1.0) + text + "\n" + line(2, loss=0.5))
    found.read()
    assert found.damage.startswith("metrics.jsonl: line 2 is not a valid record: ")
    assert found.damage.isprintable() and found.as_json()["loss"] == [[1, 2], [1.0, 0.5]]


def test_a_line_without_end_takes_no_memory(log):
    found = progress(log)
    append(log, "x" * (MAX_LINE_BYTES + 1))
    found.read()
    assert "the line is too long" in found.damage and found._rest == b""


def test_numbers_that_are_not_finite_are_null(log):
    found = progress(log)
    append(log, line(1, loss=math.nan) + line(2, loss=math.inf) + line(3, loss=1.0))
    found.read()
    assert found.as_json()["loss"] == [[1, 2, 3], [None, None, 1.0]]
    append(log, line(4, loss=1e308) + line(5, epoch=5e-324, loss=1e308))
    found.read()
    assert json.dumps(found.as_json(), allow_nan=False)


def test_a_named_pipe_or_a_folder_instead_of_the_log_is_damage(log):
    found = progress(log)
    log.mkdir()
    assert found.read() and not found.read()
    assert found.as_json()["damage"] == "metrics.jsonl: expected a regular file, got a folder"
    log.rmdir()
    append(log, line(1, loss=1.0))
    assert found.read() and found.as_json()["damage"] == ""


@pytest.mark.parametrize("count", [1, CURVE_POINTS, 2 * CURVE_POINTS - 1, 2 * CURVE_POINTS, 12_345])
def test_a_long_curve_keeps_its_mean_in_few_points(count):
    curve = Curve()
    for step in range(1, count + 1):
        curve.add(step, float(step))
    steps, means = curve.as_json()
    assert min(count, CURVE_POINTS) <= len(steps) < 2 * CURVE_POINTS
    size = curve._size
    assert steps == [size * (i + 1) for i in range(len(steps))]
    assert means == pytest.approx([step - (size - 1) / 2 for step in steps])
