"""Small runs that tests train, break off and read."""

from pathlib import Path

import pytest
import torch
import yaml

from subquad_lab import checkpoint, runs, snapshot
from subquad_lab.experiments.language import Config
from subquad_lab.records import METRICS, Run
from subquad_lab.train import Trainer

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


def broken_off(config: Config, folder: Path, step: int, error: BaseException) -> None:
    """A run that ends with an error after a step: what was interrupted is saved, anything else is a crash."""
    after_step = Trainer._stop_if_asked

    def stop(trainer: Trainer) -> None:
        after_step(trainer)
        if trainer.progress.step == step:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_stop_if_asked", stop)
        with pytest.raises(type(error)):
            runs.start("language", config, folder.parent, folder.name)


def read_config(folder: Path) -> dict:
    """Apart from the code that wrote it."""
    content = yaml.safe_load((folder / "config.yaml").read_text())
    assert content.pop("experiment") == "language"
    return content
