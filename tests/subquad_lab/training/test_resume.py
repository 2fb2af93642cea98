"""Runs that go on: the same to the bit after every stop, and nothing lost on a crash, a damage or a full disk."""

import signal
from dataclasses import replace

import pytest
import torch

from small_runs import MODELS, OTHERS, assert_same, broken_off, final, resume, small, start, tiny, unfinish
from subquad_lab import RunError, UsageError
from subquad_lab.experiments import language
from subquad_lab.experiments.stored import trained
from subquad_lab.system import files
from subquad_lab.system.checksums import Damaged
from subquad_lab.training import checkpoint, lifecycle, logs, snapshot
from subquad_lab.training.checkpoint import Checkpoint
from subquad_lab.training.experiment import no_pictures
from subquad_lab.training.interruption import Interrupted
from subquad_lab.training.run import Run


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_a_run_stopped_at_any_step_and_resumed_is_the_same_to_the_bit(name, text, tmp_path, monkeypatch):
    experiment, config = small(name, text)
    monkeypatch.setattr(lifecycle, "curves", lambda *_: b"")  # Sixty pictures would take longer than the runs.
    experiment = replace(experiment, pictures=no_pictures)
    whole, result = start(config, tmp_path, "whole", experiment)
    # The loop is the same for all: one model is stopped at every step, the others of the language at every place
    # between two evaluations, which are 7 steps apart, and other experiments here and there.
    for step in range(1, 31, 1 if name == "rnn" else 4 if name in MODELS else 11):
        broken_off(config, tmp_path / f"cut-{step}", step, Interrupted(signal.SIGTERM), experiment)
        run, again = resume(tmp_path / f"cut-{step}", experiment)
        assert_same(run, whole)
        for record in whole.folder.glob("*.json"):  # predictions and the like
            if record.name not in ("result.json", "decoding.json"):  # They hold times.
                assert (run.folder / record.name).read_bytes() == record.read_bytes()
        timeless = [{name: value for name, value in of.items() if "second" not in name} for of in (again, result)]
        assert timeless[0] == timeless[1]


def test_a_run_without_its_random_numbers_would_not_be_the_same(text, tmp_path, monkeypatch):
    """The test above can fail."""
    config = tiny(text)
    whole, _ = start(config, tmp_path, "whole")
    monkeypatch.setattr(snapshot, "set_random_numbers", lambda *_: None)
    broken_off(config, tmp_path / "cut", 12, Interrupted(signal.SIGTERM))
    run, _ = resume(tmp_path / "cut")
    assert final(run)[1] != final(whole)[1]


@pytest.mark.parametrize("part", ["valid", "test"])
def test_a_signal_during_an_evaluation_loses_nothing(part, text, tmp_path, monkeypatch):
    """Also during the last steps, when the best weights have replaced the last ones."""
    wild = dict(lr=1.0, clip=None, schedule="constant", warmup=0)
    config = tiny(text, "lstm", evaluate_every=10, **wild)
    whole, result = start(config, tmp_path, "whole")
    assert result["weights_of_step"] < 30
    evaluate, seen = language.Language.evaluate, []

    def stopped(task, of, check):
        seen.append(of)
        if of == part and len(seen) >= 3:
            raise Interrupted(signal.SIGINT)
        return evaluate(task, of, check)

    monkeypatch.setattr(language.Language, "evaluate", stopped)
    with pytest.raises(Interrupted):
        start(config, tmp_path, "cut")
    monkeypatch.setattr(language.Language, "evaluate", evaluate)
    run, again = resume(tmp_path / "cut")
    assert_same(run, whole)
    assert again["test"] == result["test"]


def test_a_run_that_was_not_evaluated_yet_is_used_as_it_is(text, tmp_path):
    broken_off(tiny(text, evaluate_every=30), tmp_path / "cut", 20, Interrupted(signal.SIGTERM))
    _, task = trained(tmp_path / "cut")
    newest = checkpoint.newest(Run(tmp_path / "cut").checkpoints)
    assert newest.state["progress"]["step"] == 20
    for name, weight in snapshot.unpack("model", newest.tensors).items():
        assert torch.equal(task.model.state_dict()[name], weight)


def test_where_the_best_checkpoint_is_damaged_the_newest_is_used(text, tmp_path, capsys):
    run, _ = start(tiny(text), tmp_path)
    best = checkpoint.newest(run.checkpoints).state["progress"]["best_checkpoint"]
    checkpoint.save(
        run.checkpoints, checkpoint.next_number(run.checkpoints), checkpoint.newest(run.checkpoints), {best}
    )
    (run.checkpoints / f"{best:08d}" / checkpoint.TENSORS).write_bytes(b"no")
    trained(run.folder)
    assert "using the latest instead of the best" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["metrics.jsonl", "timing.jsonl", "result.json", "curves.svg", "events"])
def test_a_full_disk_is_told_whatever_is_written(file, text, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if file == "events":
        from torch.utils.tensorboard import SummaryWriter

        monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    elif file.endswith("jsonl"):
        append = files.append

        def append_(path, content):
            return full() if path.name == file else append(path, content)

        monkeypatch.setattr(logs, "append", append_)
    else:
        write = files.write_synced

        def write_(path, content):
            return full() if file in path.name else write(path, content)

        monkeypatch.setattr(files, "write_synced", write_)
    with pytest.raises(RunError, match=rf"cannot write .*{file}: No space left on device"):
        start(tiny(text, steps=3), tmp_path, "full")
    monkeypatch.undo()
    _, result = resume(tmp_path / "full")
    assert result["steps"] == 3


def test_a_crash_between_checkpoints_is_made_good(text, tmp_path):
    """What was logged after the last checkpoint is logged again, not twice."""
    config = tiny(text, save_every=4)
    whole, _ = start(config, tmp_path, "whole")
    broken_off(config, tmp_path / "crashed", 18, MemoryError())
    run, _ = resume(tmp_path / "crashed")
    assert_same(run, whole)


def test_a_damaged_last_checkpoint_costs_a_few_steps_only(text, tmp_path, capsys):
    config = tiny(text, save_every=2)
    whole, _ = start(config, tmp_path, "whole")
    broken_off(config, tmp_path / "damaged", 19, MemoryError())
    folder = Run(tmp_path / "damaged").checkpoints
    (folder / f"{checkpoint.numbers(folder)[-1]:08d}" / checkpoint.TENSORS).write_bytes(b"no")
    run, _ = resume(tmp_path / "damaged")
    assert "falling back to the previous checkpoint" in capsys.readouterr().err
    assert_same(run, whole)


def test_a_checkpoint_of_another_model_is_refused(text, tmp_path):
    run, _ = start(tiny(text), tmp_path)
    found = checkpoint.newest(run.checkpoints)
    task = language.build(tiny(text, width=9))
    with pytest.raises(Damaged, match=r"does not fit this model: .*size mismatch"):
        snapshot.load_model(task.model, found)


@pytest.mark.parametrize("missing", ["progress", "optimizer", "random", "logs"])
def test_a_checkpoint_that_lacks_a_part_is_refused(missing, text, tmp_path):
    run, _ = start(tiny(text, steps=2), tmp_path)
    unfinish(run.folder)
    found = checkpoint.newest(run.checkpoints)
    state = {key: value for key, value in found.state.items() if key != missing}
    checkpoint.save(run.checkpoints, checkpoint.next_number(run.checkpoints), Checkpoint(found.tensors, state))
    with pytest.raises(Damaged, match="does not fit this run: KeyError"):
        resume(run.folder)


def test_other_data_are_not_trained_on(text, tmp_path):
    run, _ = start(tiny(text, steps=2), tmp_path)
    unfinish(run.folder)
    train = text / "train.txt"
    train.write_text(train.read_text().replace("w3", "w4", 1))
    for use in (resume, trained):
        with pytest.raises(UsageError, match="the data have changed since the run started"):
            use(run.folder)


def test_two_processes_do_not_train_one_run(text, tmp_path):
    from subquad_lab.system.files import locked

    run, _ = start(tiny(text, steps=2), tmp_path)
    unfinish(run.folder)
    with locked(run.folder), pytest.raises(UsageError, match="is in use by another process"):
        resume(run.folder)
