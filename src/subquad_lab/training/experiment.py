"""What an experiment is to the rest of the lab: a value, passed along, that builds a task for the training loop.

To add one, write its file in `experiments/`, which ends in `EXPERIMENT = Experiment(...)`, and list it in
`experiments/__init__.py`. Its commands, options, runs, comparisons and its part of the report follow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor, nn

from subquad_lab.training.config import Training
from subquad_lab.training.run import Run

C = TypeVar("C", bound=Training)
Rows = tuple[Tensor, ...]  # each (rows, ...)
Carry = dict[str, Tensor]  # each (rows, ...)
PartName = Literal["valid", "test"]


class Task(Protocol):
    """What the loop asks of an experiment: a model, and the data that it learns."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    @property
    def batches(self) -> int:
        """Of an epoch."""

    def about(self) -> dict[str, Any]:
        """What run.json tells of the data, their checksum among it, and of the parameters by part."""

    def batch(self, epoch: int, index: int) -> Rows:
        """The rows of one step; the same for the same place."""

    def begin(self, rows: int) -> Carry:
        """What the model remembers before an epoch: nothing, or a tensor of each row."""

    def loss(self, model: nn.Module, rows: Rows, carry: Carry) -> tuple[Tensor, Carry]:
        """The mean over the rows, and what is remembered for the next step, detached."""

    def count(self, rows: Rows) -> int:
        """Units in these rows, for the speed."""

    def evaluate(self, part: PartName, check: Callable[[], None]) -> dict[str, float]:
        """Figures of a part of the data. Changes nothing; calls `check` now and then, which may raise."""

    def records(self) -> dict[str, Any]:
        """What a finished run writes down besides, as JSON by name: predictions of the test part, for example."""


def no_pictures(run: Run, config: Any) -> dict[str, bytes]:
    return {}


@dataclass(frozen=True)
class Experiment(Generic[C]):
    """A question, and all that is needed to train for an answer.

    Attributes:
        name: On the command line, and of its folder of presets.
        about: The question in the first line, and how it is asked; shown as help and in the report.
        config: The class of its configs, whose fields are its options.
        measure: Of the figures that its tasks find, the one that says which weights are best.
        higher_is_better: Whether that is so of the measure.
        unit: What is counted for the speed: words, images.
        loss_unit: What the loss is a mean over: "word" stands for nats per word.
        build: The task, with its model and data; all randomness from torch's generator, which was seeded.
        label: What tells a run apart from others, in a few words.
        variants: What `subquad compare` trains: configs by name.
        varied: Fields that the variants set; `subquad compare` does not take them as options.
        pictures: SVG by name, drawn from what a run has written down, besides its curves.
        published: Figures of others, for the report: "what", on which "data", and the "figure".
    """

    name: str
    about: str
    config: type[C]
    measure: str
    higher_is_better: bool
    unit: str
    loss_unit: str
    build: Callable[[C], Task]
    label: Callable[[C], str]
    variants: Callable[[C], dict[str, C]]
    varied: Sequence[str] = ()
    pictures: Callable[[Run, C], dict[str, bytes]] = no_pictures
    published: Sequence[Mapping[str, Any]] = ()

    @property
    def question(self) -> str:
        return self.about.partition("\n")[0]
