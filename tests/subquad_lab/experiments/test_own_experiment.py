"""A new experiment: a value in the list of all, and every command knows it."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from subquad_lab import UsageError
from subquad_lab.cli import main
from subquad_lab.experiments import EXPERIMENTS
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.loop import Trainer


@dataclass(frozen=True)
class Config(Training):
    """Learn a line.

    Args:
        slope: Of the line.
    """

    batch: int = 4
    lr: float = 0.1
    steps: int | None = 4
    slope: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slope == 0:
            raise UsageError("slope: expected a number other than 0, got 0")


class Line:
    batches = 5

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, nn.Linear(1, 1)

    def about(self):
        return {"data": {"name": "a line", "sha256": str(self.config.slope)}, "parameters": {"total": 2}}

    def batch(self, epoch, index):
        return (torch.arange(4.0)[:, None] + index,)

    def begin(self, rows):
        return {}

    def loss(self, model, rows, carry):
        return (model(rows[0]) - self.config.slope * rows[0]).square().mean(), {}

    def count(self, rows):
        return len(rows[0])

    def evaluate(self, part, check):
        return {"distance": abs(float(self.model.weight) - self.config.slope)}

    def records(self):
        return {"weights": {"slope": float(self.model.weight)}}


LINE = Experiment(
    name="line",
    about="Can a line be learned?\n\nIt can.",
    config=Config,
    measure="distance",
    higher_is_better=False,
    unit="points",
    loss_unit="point",
    build=Line,
    label=lambda config: f"slope {config.slope:g}",
    variants=lambda config: {name: replace(config, optimizer=name) for name in ("sgd", "adam")},
    pictures=lambda run, config: {"slope": b"<svg>" + str(config.slope).encode() + b"</svg>"},
)


@pytest.fixture(autouse=True)
def listed(monkeypatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "line", LINE)


def test_every_command_knows_a_new_experiment(tmp_path, capfd):
    runs, compared = tmp_path / "runs", tmp_path / "compare"
    assert main(["train", "line", f"--out={runs}", "--slope=3"]) == 0
    assert "test: distance " in capfd.readouterr().out
    folder = runs / "line-001"
    assert json.loads((folder / "weights.json").read_text()).keys() == {"slope"}
    assert (folder / "slope.svg").read_bytes() == b"<svg>3.0</svg>"
    assert b"nats per point" in (folder / "curves.svg").read_bytes()
    assert main(["evaluate", str(folder)]) == 0
    assert main(["train", "--resume", str(folder)]) == 0
    assert main(["runs", f"--root={runs}"]) == 0
    assert "slope 3" in capfd.readouterr().out
    assert main(["compare", "line", f"--out={compared}"]) == 0
    assert "line: distance, lower is better" in capfd.readouterr().out
    assert main(["sweep", "line", f"--out={tmp_path / 'sweep'}", "--grid.slope=1,2"]) == 0
    assert main(["report", str(runs), str(compared), f"--out={tmp_path / 'page.html'}"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Can a line be learned?" in page and "slope 3" in page


def test_its_fields_are_options(tmp_path, capfd, complaint):
    with pytest.raises(SystemExit):
        main(["train", "line", "--help"])
    assert "--slope SLOPE" in capfd.readouterr().out
    assert "--slope: expected a number other than 0, got 0" in complaint(["train", "line", "--slope=0"])


def test_three_functions_lead_from_the_command_to_the_loop(tmp_path, monkeypatch):
    import inspect

    train, seen = Trainer.train, []

    def noted(trainer):
        frames = [(frame.frame.f_globals["__name__"], frame.function) for frame in inspect.stack()[1:]]
        names = [f"{module.removeprefix('subquad_lab.')}.{function}" for module, function in frames]
        seen.append(names[: names.index("cli.train") + 1][::-1])
        return train(trainer)

    monkeypatch.setattr(Trainer, "train", noted)
    assert main(["train", "line", f"--out={tmp_path}"]) == 0
    assert seen == [["cli.train", "commands.train.run", "training.seeds.train"]]
