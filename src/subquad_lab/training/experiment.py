"""The interface of an experiment: a value that builds a task for the training loop.

To add an experiment, write a file in `experiments/` that ends in `EXPERIMENT = Experiment(...)`, and list it in
`experiments/__init__.py`. Commands, options, runs, comparisons and the report then support it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from subquad.distributed import SequenceParallel
from subquad_lab.figures.tables import Table
from subquad_lab.training.config import Training
from subquad_lab.training.run import Run

C = TypeVar("C", bound=Training)
Rows = tuple[Tensor, ...]  # each (rows, ...)
Carry = dict[str, Tensor]  # each (rows, ...)
PartName = Literal["valid", "test"]


class Task(Protocol):
    """The part of an experiment that the training loop uses: a model and its data."""

    @property
    def model(self) -> nn.Module:
        """The model to train."""

    @property
    def batches(self) -> int:
        """Number of batches per epoch."""

    def about(self) -> dict[str, Any]:
        """Return the content of run.json: the data with their checksum, and the number of parameters by module."""

    def batch(self, epoch: int, index: int) -> Rows:
        """Return the rows of one step. They depend only on the epoch and the index."""

    def begin(self, rows: int) -> Carry:
        """Return the recurrent state at the start of an epoch: empty, or tensors with one entry per row."""

    def loss(self, model: nn.Module, rows: Rows, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the mean loss over the rows, and the detached recurrent state for the next step."""

    def count(self, rows: Rows) -> int:
        """Return the number of units in these rows, to report the speed."""

    def evaluate(self, part: PartName, check: Callable[[], None]) -> dict[str, float]:
        """Return the metrics on a part of the data. Call `check` regularly; it may raise to interrupt."""

    def records(self) -> dict[str, Any]:
        """Return further JSON files of a finished run by name, such as its predictions on the test set."""


@runtime_checkable
class SplitTask(Task, Protocol):
    """A task whose sequences can be split over processes."""

    def split(self, sharing: int) -> dict[str, int]:
        """Return the dimension of the sequence for each argument of the model that holds tokens.

        Raises:
            UsageError: The model cannot be split over this number of processes.
        """

    def split_loss(self, model: nn.Module, rows: Rows, parallel: SequenceParallel) -> Tensor:
        """Return the mean loss over the rows, of all processes that share them, from a model that is split."""


@runtime_checkable
class StagedTask(Task, Protocol):
    """A task that trains different parameters at different steps, each group with its own learning rate."""

    @property
    def groups(self) -> list[list[nn.Parameter]]:
        """The parameters of the model, in groups with a common learning rate; gradients are clipped group by group."""

    @property
    def boundaries(self) -> frozenset[int]:
        """Steps before which to evaluate, in addition to those of `evaluate_every`."""

    def enter(self, step: int) -> list[float]:
        """Prepare the model for a step, or for an evaluation before it, and return the learning rate of each group."""


@runtime_checkable
class ExportingTask(Task, Protocol):
    """A task whose trained model other programs can load."""

    def exports(self) -> dict[str, bytes]:
        """Return further files of a finished run by name."""


def no_pictures(run: Run, config: Any) -> dict[str, bytes]:
    return {}


def no_shared_pictures(runs: Mapping[str, Sequence[Run]]) -> dict[str, bytes]:
    return {}


def no_table(run: Run) -> Table | None:
    return None


@dataclass(frozen=True)
class Experiment(Generic[C]):
    """A question, and everything needed to answer it by training.

    Attributes:
        name: Name on the command line, and of the folder of its presets.
        about: Description, with the question in the first line; shown in the help and in the report.
        config: Config class, whose fields are the options.
        measure: Metric that selects the best weights.
        higher_is_better: Whether higher values of the measure are better.
        unit: Unit of the training speed, such as words or images.
        loss_unit: What the loss is averaged over: "word" means nats per word.
        build: Returns the task for a config. Randomness comes from torch's generator, which is seeded before the call.
        label: Returns a short description that distinguishes a run from others.
        variants: Returns the configs that `subquad compare` trains, by name.
        varied: Fields that the variants set; `subquad compare` does not accept them as options.
        pictures: Returns SVG plots of a run by name, in addition to its learning curves.
        table: Returns a table of a finished run, if its metrics are too many for a line.
        in_demo: Whether its preset `quick` is short enough for `subquad demo`.
        shared_pictures: Returns SVG plots by name of several finished runs together, grouped by what differs in their
            seed only, in addition to their learning curves.
        published: Published results for the report: "what", on which "data", and the "figure".
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
    table: Callable[[Run], Table | None] = no_table
    in_demo: bool = True
    shared_pictures: Callable[[Mapping[str, Sequence[Run]]], dict[str, bytes]] = no_shared_pictures
    published: Sequence[Mapping[str, Any]] = ()

    @property
    def question(self) -> str:
        return self.about.partition("\n")[0]
