"""The training loop: the same to the bit after every stop, clean evaluation, honest ends."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subquad_lab import RunError, UsageError, checkpoint, files, runs, snapshot
from subquad_lab.checkpoint import Checkpoint, Damaged
from subquad_lab.configs import config_of
from subquad_lab.experiments import language
from subquad_lab.experiments.language import Config
from subquad_lab.interruption import Interrupted
from subquad_lab.records import METRICS, Run
from subquad_lab.train import Progress, Trainer, Training, rate

MODELS = {
    "rnn": dict(model="rnn", embedding=6, width=8, context=5, tied=False),
    "lstm": dict(model="lstm", embedding=6, width=8, layers=2, context=5),
    "transformer": dict(model="transformer", width=8, heads=2, layers=1, context=5, method="random:8"),
}


def tiny(text, name: str = "rnn", **changes) -> Config:
    common = dict(data=str(text), batch=4, steps=30, evaluate_every=7, dropout=0.3, lr=0.02, warmup=3)
    return Config(**common | MODELS[name] | changes)


def final(run: Run) -> tuple[dict[str, torch.Tensor], bytes]:
    """The parameters of the last checkpoint, and the log."""
    found = checkpoint.newest(run.checkpoints)
    assert found is not None
    return snapshot.unpack("model", found.tensors), (run.folder / METRICS).read_bytes()


def assert_same(one: Run, other: Run) -> None:
    (weights, log), (others, other_log) = final(one), final(other)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
    assert log == other_log


@pytest.mark.parametrize("name", MODELS)
def test_a_run_stopped_at_any_step_and_resumed_is_the_same_to_the_bit(name, text, tmp_path, monkeypatch):
    config = tiny(text, name)
    monkeypatch.setattr(runs, "curves", lambda *_: b"")  # Sixty pictures would take longer than the runs.
    whole, result = runs.start("language", config, tmp_path, "whole")
    stop_at = 0
    after_step = Trainer._stop_if_asked

    def stop(trainer: Trainer) -> None:
        after_step(trainer)
        if trainer.progress.step == stop_at and trainer.kept == 0:
            raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_stop_if_asked", stop)
    for stop_at in range(1, 31):
        with pytest.raises(Interrupted):
            runs.start("language", config, tmp_path, f"cut-{stop_at}")
        run, again = runs.resume(tmp_path / f"cut-{stop_at}")
        assert_same(run, whole)
        clock = {"seconds", "words_per_second"}
        assert {k: v for k, v in again.items() if k not in clock} == {k: v for k, v in result.items() if k not in clock}


def test_a_run_without_its_random_numbers_would_not_be_the_same(text, tmp_path, monkeypatch):
    """The test above can fail."""
    config = tiny(text)
    whole, _ = runs.start("language", config, tmp_path, "whole")
    monkeypatch.setattr(snapshot, "set_random_numbers", lambda *_: None)
    after_step = Trainer._stop_if_asked

    def stop(trainer: Trainer) -> None:
        after_step(trainer)
        if trainer.progress.step == 12 and trainer.kept == 0:
            raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_stop_if_asked", stop)
    with pytest.raises(Interrupted):
        runs.start("language", config, tmp_path, "cut")
    run, _ = runs.resume(tmp_path / "cut")
    assert final(run)[1] != final(whole)[1]


@pytest.mark.parametrize("part", ["valid", "test"])
def test_a_signal_during_an_evaluation_loses_nothing(part, text, tmp_path, monkeypatch):
    """Also during the last ones, for which the best weights are in the place of the last."""
    wild = dict(lr=1.0, clip=None, schedule="constant", warmup=0)
    config = tiny(text, "lstm", evaluate_every=10, **wild)
    whole, result = runs.start("language", config, tmp_path, "whole")
    assert result["weights_of_step"] < 30
    evaluate, seen = language.Language.evaluate, []

    def stopped(task, of, check):
        seen.append(of)
        if of == part and len(seen) >= 3:
            raise Interrupted(signal.SIGINT)
        return evaluate(task, of, check)

    monkeypatch.setattr(language.Language, "evaluate", stopped)
    with pytest.raises(Interrupted):
        runs.start("language", config, tmp_path, "cut")
    monkeypatch.setattr(language.Language, "evaluate", evaluate)
    run, again = runs.resume(tmp_path / "cut")
    assert_same(run, whole)
    assert again["test"] == result["test"]


def test_a_run_that_was_not_evaluated_yet_is_used_as_it_is(text, tmp_path, monkeypatch):
    after_step = Trainer._stop_if_asked

    def stop(trainer: Trainer) -> None:
        after_step(trainer)
        if trainer.progress.step == 20:
            raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_stop_if_asked", stop)
    with pytest.raises(Interrupted):
        runs.start("language", tiny(text, evaluate_every=30), tmp_path, "cut")
    _, task = runs.trained(tmp_path / "cut")
    newest = checkpoint.newest(Run(tmp_path / "cut").checkpoints)
    assert newest.state["progress"]["step"] == 20
    for name, weight in snapshot.unpack("model", newest.tensors).items():
        assert torch.equal(task.model.state_dict()[name], weight)


def test_where_the_best_checkpoint_is_damaged_the_newest_is_used(text, tmp_path, capsys):
    run, _ = runs.start("language", tiny(text), tmp_path)
    best = checkpoint.newest(run.checkpoints).state["progress"]["best_checkpoint"]
    checkpoint.save(
        run.checkpoints, checkpoint.next_number(run.checkpoints), checkpoint.newest(run.checkpoints), {best}
    )
    (run.checkpoints / f"{best:08d}" / checkpoint.TENSORS).write_bytes(b"no")
    runs.trained(run.folder)
    assert "the newest is used, not the best" in capsys.readouterr().err


def test_minutes_end_a_run(text, tmp_path):
    _, result = runs.start("language", tiny(text, steps=100_000, minutes=0.02, evaluate_every=1000), tmp_path)
    assert 1.2 <= result["seconds"] < 5
    assert result["steps"] < 100_000


@pytest.mark.parametrize("file", ["metrics.jsonl", "timing.jsonl", "result.json", "curves.svg", "events"])
def test_a_full_disk_is_told_whatever_is_written(file, text, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if file == "events":
        from torch.utils.tensorboard import SummaryWriter

        monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    elif file.endswith("jsonl"):
        opened = Path.open

        def open_(path, *given, **named):
            return full() if path.name == file else opened(path, *given, **named)

        monkeypatch.setattr(Path, "open", open_)
    else:
        write = files.write_synced

        def write_(path, content):
            return full() if file in path.name else write(path, content)

        monkeypatch.setattr(files, "write_synced", write_)
    with pytest.raises(RunError, match=rf"cannot write .*{file}: No space left on device"):
        runs.start("language", tiny(text, steps=3), tmp_path, "full")
    monkeypatch.undo()
    _, result = runs.resume(tmp_path / "full")
    assert result["steps"] == 3


def test_a_crash_between_checkpoints_is_made_good(text, tmp_path, monkeypatch):
    """What was logged after the last checkpoint is logged again, not twice."""
    config = tiny(text, save_every=4)
    whole, _ = runs.start("language", config, tmp_path, "whole")
    step = Trainer.step

    def crash(trainer: Trainer) -> None:
        if trainer.progress.step == 18:
            raise MemoryError
        step(trainer)

    monkeypatch.setattr(Trainer, "step", crash)
    with pytest.raises(MemoryError):
        runs.start("language", config, tmp_path, "crashed")
    monkeypatch.setattr(Trainer, "step", step)
    run, _ = runs.resume(tmp_path / "crashed")
    assert_same(run, whole)


def test_a_damaged_last_checkpoint_costs_a_few_steps_only(text, tmp_path, monkeypatch, capsys):
    config = tiny(text, save_every=2)
    whole, _ = runs.start("language", config, tmp_path, "whole")
    step = Trainer.step

    def crash(trainer: Trainer) -> None:
        if trainer.progress.step == 19:
            raise MemoryError
        step(trainer)

    monkeypatch.setattr(Trainer, "step", crash)
    with pytest.raises(MemoryError):
        runs.start("language", config, tmp_path, "damaged")
    folder = Run(tmp_path / "damaged").checkpoints
    (folder / f"{checkpoint.numbers(folder)[-1]:08d}" / checkpoint.TENSORS).write_bytes(b"no")
    monkeypatch.setattr(Trainer, "step", step)
    run, _ = runs.resume(tmp_path / "damaged")
    assert "the one before it is used" in capsys.readouterr().err
    assert_same(run, whole)


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
    often, _ = runs.start("language", tiny(text, evaluate_every=1), tmp_path)
    seldom, _ = runs.start("language", tiny(text, evaluate_every=30), tmp_path)
    losses = [[line["loss"] for line in run.metrics() if "loss" in line] for run in (often, seldom)]
    assert len(losses[0]) == 30
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", MODELS)
def test_an_accumulated_step_is_the_step(name, text, tmp_path):
    whole, _ = runs.start("language", tiny(text, name, dropout=0.0, steps=8), tmp_path)
    parts, _ = runs.start("language", tiny(text, name, dropout=0.0, steps=8, accumulate=4), tmp_path)
    for one, other in zip(whole.metrics(), parts.metrics(), strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def test_training_learns(text, tmp_path):
    _, result = runs.start("language", tiny(text, "lstm", steps=300, dropout=0.0, evaluate_every=100), tmp_path)
    assert result["test"]["perplexity"] < 8  # 20 words; the best possible is about 4.4
    assert result["test"]["perplexity"] == pytest.approx(math.exp(result["test"]["cross_entropy"]))


def test_early_stopping_keeps_the_best_weights(text, tmp_path):
    config = tiny(
        text, "lstm", steps=400, lr=1.0, clip=None, patience=2, evaluate_every=5, schedule="constant", warmup=0
    )
    run, result = runs.start("language", config, tmp_path)
    values = [(line["valid/perplexity"], line["step"]) for line in run.metrics() if "valid/perplexity" in line]
    best = min(values)
    assert result["weights_of_step"] == best[1]
    assert result["valid"]["perplexity"] == best[0]
    assert result["steps"] == best[1] + 10 < 400
    assert runs.evaluate(run.folder, "valid")["perplexity"] == best[0]


def test_a_loss_that_is_not_finite_stops_before_the_update(text, tmp_path, monkeypatch):
    config = tiny(text, save_every=1)
    loss = language.Language.loss

    steps = iter(range(1, 31))

    def broken(task, model, rows, carry):
        found, carried = loss(task, model, rows, carry)
        return found * (math.nan if next(steps) == 10 else 1.0), carried

    monkeypatch.setattr(language.Language, "loss", broken)
    with pytest.raises(RunError, match=r"step 10: the loss is nan, .* nothing was updated"):
        runs.start("language", config, tmp_path, "nan")
    found = checkpoint.newest(Run(tmp_path / "nan").checkpoints)
    assert found.state["progress"]["step"] == 9
    assert all(tensor.isfinite().all() for tensor in found.tensors.values() if tensor.is_floating_point())
    monkeypatch.setattr(language.Language, "loss", loss)
    _, result = runs.resume(tmp_path / "nan")
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
        (dict(batch=0), "batch: expected a whole number >= 1, found 0"),
        (dict(minutes=0.0), "minutes: expected a number above 0, found 0.0"),
        (dict(clip=0.0), "clip: expected a number above 0, found 0.0"),
        (dict(seed=-1), "seed: expected a whole number from 0 to below 2^32, found -1"),
        (dict(lr=-1.0), "lr: expected a number >= 0, found -1.0"),
        (dict(lr=math.nan), "lr: expected a number >= 0, found nan"),
        (dict(batch=8, accumulate=3), "accumulate: expected a number that divides the batch of 8, found 3"),
    ],
)
def test_settings_that_make_no_sense_are_named(fields, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Training(**fields)


def test_a_checkpoint_of_another_model_is_refused(text, tmp_path):
    run, _ = runs.start("language", tiny(text), tmp_path)
    found = checkpoint.newest(run.checkpoints)
    task = language.build(tiny(text, width=9))
    with pytest.raises(Damaged, match=r"not of this model: .*size mismatch"):
        snapshot.load_model(task.model, found)


@pytest.mark.parametrize("missing", ["progress", "optimizer", "random", "logs"])
def test_a_checkpoint_that_lacks_a_part_is_refused(missing, text, tmp_path):
    run, _ = runs.start("language", tiny(text, steps=2), tmp_path)
    (run.folder / "result.json").unlink()
    found = checkpoint.newest(run.checkpoints)
    state = {key: value for key, value in found.state.items() if key != missing}
    checkpoint.save(run.checkpoints, checkpoint.next_number(run.checkpoints), Checkpoint(found.tensors, state))
    with pytest.raises(Damaged, match="not of this run: KeyError"):
        runs.resume(run.folder)


def test_other_data_are_not_trained_on(text, tmp_path):
    run, _ = runs.start("language", tiny(text, steps=2), tmp_path)
    (run.folder / "result.json").unlink()
    train = text / "train.txt"
    train.write_text(train.read_text().replace("w3", "w4", 1))
    for use in (runs.resume, runs.trained):
        with pytest.raises(UsageError, match="the data are not those that the run began with"):
            use(run.folder)


def test_two_processes_do_not_train_one_run(text, tmp_path):
    from subquad_lab.files import locked

    run, _ = runs.start("language", tiny(text, steps=2), tmp_path)
    (run.folder / "result.json").unlink()
    with locked(run.folder), pytest.raises(UsageError, match="is in use by another process"):
        runs.resume(run.folder)


# --- Processes and signals ------------------------------------------------------------------------------------------


def command(text, out, *options: str) -> list[str]:
    fields = {"data": text, "out": out, "model": "rnn", "embedding": 6, "width": 8, "context": 5, "batch": 4} | {
        "tied": "false", "lr": 0.02, "warmup": 3, "evaluate-every": 10
    }  # fmt: skip
    return ["train", "language", *(f"--{key}={value}" for key, value in fields.items()), *options]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_run_and_ends_it(number, text, tmp_path):
    arguments = command(text, tmp_path, "--steps=100000", "--evaluate-every=100000")
    with subprocess.Popen(
        [sys.executable, "-m", "subquad_lab", *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        log = tmp_path / "language-001" / METRICS
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().count("\n") > 5) and time.monotonic() < deadline:
            time.sleep(0.05)
        begin = time.monotonic()
        process.send_signal(number)
        errors = process.stderr.read()
    assert process.returncode == 128 + number
    assert time.monotonic() - begin < 5
    assert "the run is saved" in errors
    assert "Traceback" not in errors
    run = Run.open(tmp_path / "language-001")
    found = checkpoint.newest(run.checkpoints)
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(1, found.state["progress"]["step"] + 1))  # All that was done was saved.


def test_two_processes_make_the_steps_of_one(text, tmp_path):
    """To 1e-5, over 50 steps; and the checkpoints of one are good for the other."""
    options = ("--steps=50", "--dropout=0")
    for out, launcher in ((tmp_path / "one", [sys.executable]), (tmp_path / "two", torchrun())):
        done = subprocess.run([*launcher, "-m", "subquad_lab", *command(text, out, *options)], capture_output=True,
                              text=True, env=environment())  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, two = (list(Run.open(tmp_path / name / "language-001").metrics()) for name in ("one", "two"))
    assert len(one) == 55
    for line, other in zip(one, two, strict=True):
        assert other == pytest.approx(line, rel=1e-5)
    result = json.loads((tmp_path / "two" / "language-001" / "result.json").read_text())
    assert result["processes"] == 2

    # What two processes have saved, one goes on with; and the reverse.
    for name, launcher in (("two", [sys.executable]), ("one", torchrun())):
        run = Run.open(tmp_path / name / "language-001")
        (run.folder / "result.json").unlink()
        _, config = config_of(run)
        (run.folder / "config.yaml").write_text(
            (run.folder / "config.yaml").read_text().replace("steps: 50", "steps: 60")
        )
        done = subprocess.run([*launcher, "-m", "subquad_lab", "train", "--resume", str(run.folder)],
                              capture_output=True, text=True, env=environment())  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert max(line["step"] for line in run.metrics()) == 60
        assert replace(config, steps=60) == config_of(run)[1]
    one, two = ([line for line in Run.open(tmp_path / name / "language-001").metrics() if line["step"] > 50]
                for name in ("one", "two"))  # fmt: skip
    for line, other in zip(one, two, strict=True):
        assert other == pytest.approx(line, rel=1e-4)


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}
