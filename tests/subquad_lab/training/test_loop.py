"""The training loop: schedules, clean evaluation, early stops, steps in parts, honest ends."""

import math
import re

import pytest
import torch

from small_runs import MODELS, resume, start, tiny
from subquad_lab import RunError, UsageError
from subquad_lab.experiments import language
from subquad_lab.experiments.stored import trained
from subquad_lab.training import checkpoint
from subquad_lab.training.config import Training
from subquad_lab.training.run import Run
from subquad_lab.training.schedule import Progress, rate


def test_minutes_end_a_run(text, tmp_path):
    _, result = start(tiny(text, steps=100_000, minutes=0.02, evaluate_every=1000), tmp_path)
    assert 1.2 <= result["seconds"] < 5
    assert result["steps"] < 100_000


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_changes_nothing(name, text):
    task = language.build(tiny(text, name))
    task.model.train()
    before = {key: tensor.clone() for key, tensor in task.model.state_dict().items()}
    generator = torch.get_rng_state()
    task.evaluate("valid", lambda: None)
    task.evaluate("test", lambda: None)
    assert all(torch.equal(tensor, before[key]) for key, tensor in task.model.state_dict().items())
    assert all(parameter.grad is None for parameter in task.model.parameters())
    assert task.model.training
    task.model.eval()  # As the trainer has it; dropout would draw numbers.
    torch.set_rng_state(generator)
    task.evaluate("valid", lambda: None)
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_number_of_evaluations_does_not_change_the_training(text, tmp_path):
    """Neither parameters nor random numbers are touched."""
    often, _ = start(tiny(text, evaluate_every=1), tmp_path)
    seldom, _ = start(tiny(text, evaluate_every=30), tmp_path)
    losses = [[line["loss"] for line in run.metrics() if "loss" in line] for run in (often, seldom)]
    assert len(losses[0]) == 30
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", MODELS)
def test_an_accumulated_step_is_the_step(name, text, tmp_path):
    whole, _ = start(tiny(text, name, dropout=0.0, steps=8), tmp_path)
    parts, _ = start(tiny(text, name, dropout=0.0, steps=8, accumulate=4), tmp_path)
    for one, other in zip(whole.metrics(), parts.metrics(), strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def test_training_learns(text, tmp_path):
    _, result = start(tiny(text, "lstm", steps=300, dropout=0.0, evaluate_every=100), tmp_path)
    assert result["test"]["perplexity"] < 8  # 20 words; the best possible is about 4.4
    assert result["test"]["perplexity"] == pytest.approx(math.exp(result["test"]["cross_entropy"]))


def test_early_stopping_keeps_the_best_weights(text, tmp_path):
    config = tiny(
        text, "lstm", steps=400, lr=1.0, clip=None, patience=2, evaluate_every=5, schedule="constant", warmup=0
    )
    run, result = start(config, tmp_path)
    values = [(line["valid/perplexity"], line["step"]) for line in run.metrics() if "valid/perplexity" in line]
    best = min(values)
    assert result["weights_of_step"] == best[1]
    assert result["valid"]["perplexity"] == best[0]
    assert result["steps"] == best[1] + 10 < 400
    assert trained(run.folder)[1].evaluate("valid", lambda: None)["perplexity"] == best[0]


def test_a_loss_that_is_not_finite_stops_before_the_update(text, tmp_path, monkeypatch):
    config = tiny(text, save_every=1)
    loss = language.Language.loss

    steps = iter(range(1, 31))

    def broken(task, model, rows, carry):
        found, carried = loss(task, model, rows, carry)
        return found * (math.nan if next(steps) == 10 else 1.0), carried

    monkeypatch.setattr(language.Language, "loss", broken)
    with pytest.raises(RunError, match=r"step 10: the loss is nan .* the step was not applied"):
        start(config, tmp_path, "nan")
    found = checkpoint.newest(Run(tmp_path / "nan").checkpoints)
    assert found.state["progress"]["step"] == 9
    assert all(tensor.isfinite().all() for tensor in found.tensors.values() if tensor.is_floating_point())
    monkeypatch.setattr(language.Language, "loss", loss)
    _, result = resume(tmp_path / "nan")
    assert result["steps"] == 30


def test_the_rate_follows_its_schedule():
    def rates(**fields) -> list[float]:
        settings = Training(lr=1.0, **fields)
        return [rate(settings, Progress(step=step), 10) for step in range(10)]

    assert rates() == [1.0] * 10
    assert rates(schedule="linear") == pytest.approx([1 - step / 10 for step in range(10)])
    assert rates(schedule="cosine")[5] == pytest.approx(0.5)
    assert rates(warmup=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    timed = Training(lr=1.0, schedule="linear", minutes=1.0)
    assert rate(timed, Progress(step=1, seconds=30.0), 10) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(batch=0), "batch: expected a positive integer, got 0"),
        (dict(minutes=0.0), "minutes: expected a positive number, got 0.0"),
        (dict(clip=0.0), "clip: expected a positive number, got 0.0"),
        (dict(seed=-1), "seed: expected an integer in [0, 2^32), got -1"),
        (dict(lr=-1.0), "lr: expected a number >= 0, got -1.0"),
        (dict(lr=math.nan), "lr: expected a number >= 0, got nan"),
        (dict(batch=8, accumulate=3), "accumulate: expected a divisor of the batch size 8, got 3"),
    ],
)
def test_settings_that_make_no_sense_are_named(fields, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Training(**fields)
