"""Is max pooling better than strided convolutions for downsampling, and is the difference significant?

    loss = mean of -log p(class | image),  accuracy = fraction of images whose most likely class is correct

Each epoch has a new order of the images, which depends only on the seed and the epoch. The last batch is filled up with
the first images of the order, so that all batches have the same size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad_lab import UsageError
from subquad_lab.data.images import OCT, Pictures, load_images, published_test
from subquad_lab.figures.classification import PREDICTIONS, Predictions, confusion_picture, figures
from subquad_lab.models import parameters, refuse_too_large
from subquad_lab.models.images import ConvNet, Downsample, halved_twice
from subquad_lab.training import optimizers
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Carry, Experiment, PartName, Rows
from subquad_lab.training.run import Run

EVALUATION_PIXELS = 1 << 20  # per forward pass
PIXEL_SCALE = 256.0  # Pixel values are divided by it.

PUBLISHED = [
    {"what": f"{how}, rate {rate}, run {run}", "data": f"{OCT}, 529 test images", "figure": figure}
    for run, found in {"A": (0.7013, 0.8280, 0.7505, 0.7958), "B": (0.7845, 0.8393, 0.7977, 0.8204),
                       "C": (0.7958, 0.8374, 0.7940, 0.8147)}.items()
    for (how, rate), figure in zip(
        [("pooling", 0.1), ("pooling", 0.01), ("pooling", 0.001), ("strides", 0.01)], found, strict=True
    )
]  # fmt: skip


@dataclass(frozen=True)
class Config(Training):
    """Train a small convolutional network.

    Args:
        batch: Total batch size of all processes.
        data: MedMNIST npz file, or folder with MNIST *-ubyte files. Default: scikit-learn's handwritten digits.
        downsample: Downsampling: pool (2x2 max pooling) or stride (convolutions with stride 2).
        dropout: Dropout probability before the second linear layer.
        published_test: For OCTMNIST, test on the 529 images of the published results instead of the whole test set.
    """

    seeds: int = 3
    epochs: int = 15
    batch: int = 8
    optimizer: optimizers.Name = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    patience: int | None = 5
    data: str | None = None
    downsample: Downsample = "pool"
    dropout: float = 0.7
    published_test: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout: expected a number in [0, 1), got {self.dropout}")


class Images:
    """The task of the training loop: images in a new order for each epoch."""

    def __init__(self, config: Config, pictures: Pictures) -> None:
        self.config, self.pictures = config, pictures
        _, height, width = pictures.shape
        least = next(side for side in range(1, 99) if halved_twice(side, config.downsample) >= 1)
        if min(height, width) < least:
            raise UsageError(f"--data: expected images of at least {least}x{least}, got {height}x{width} in "
                             f"{pictures.name}")  # fmt: skip
        with torch.device("meta"):  # counts parameters without allocating them
            total = parameters(self._network())["total"]
        refuse_too_large(total, f"--data: a network for images of {height}x{width}")
        self.model = self._network()
        count = len(pictures.train[1])
        if count < config.batch:
            raise UsageError(f"batch: expected at most {count:,}, the number of training images of {pictures.name}, "
                             f"got {config.batch}")  # fmt: skip
        self.batches = -(-count // config.batch)
        self.is_published_test = config.published_test and pictures.name in (OCT, f"{OCT}, changed")
        self.parts = {"valid": pictures.valid, "test": pictures.test}
        if self.is_published_test:
            self.parts["test"] = published_test(pictures.test)
        self.order: tuple[int, Tensor] = (-1, torch.empty(0))  # of an epoch

    def _network(self) -> ConvNet:
        config = self.config
        return ConvNet(*self.pictures.shape, len(self.pictures.classes), config.downsample, config.dropout)

    def about(self) -> dict[str, Any]:
        sizes = {"train": len(self.pictures.train[1])} | {part: len(rows) for part, (_, rows) in self.parts.items()}
        shape = "x".join(map(str, self.pictures.shape))
        data = {"name": self.pictures.name, "sha256": self.pictures.checksum, "classes": self.pictures.classes,
                "shape": shape, "sizes": sizes, "published_test": self.is_published_test}  # fmt: skip
        return {"data": data, "parameters": parameters(self.model)}

    def batch(self, epoch: int, index: int) -> Rows:
        if self.order[0] != epoch:
            self.order = epoch, self._shuffled(epoch)
        rows = self.order[1][index * self.config.batch : (index + 1) * self.config.batch]
        pictures, classes = self.pictures.train
        return pictures[rows], classes[rows]

    def _shuffled(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.pictures.train[1]), generator=generator)
        return torch.cat([order, order[: self.batches * self.config.batch - len(order)]])

    def begin(self, rows: int) -> Carry:
        return {}

    def loss(self, model: nn.Module, rows: Rows, carry: Carry) -> tuple[Tensor, Carry]:
        pictures, classes = rows
        return F.nll_loss(model(pictures / PIXEL_SCALE), classes), {}

    def count(self, rows: Rows) -> int:
        return len(rows[0])

    def evaluate(self, part: PartName, check: Callable[[], None]) -> dict[str, float]:
        return figures(self.predict(self.parts[part][0], check), self.parts[part][1])

    @torch.no_grad()
    def predict(self, pictures: Tensor, check: Callable[[], None] = lambda: None) -> Tensor:
        """Return log probabilities for images (n, channels, height, width) of bytes."""
        device, found = next(self.model.parameters()).device, []
        for piece in pictures.split(max(1, EVALUATION_PIXELS // pictures[0].numel())):
            check()
            found.append(self.model(piece.to(device) / PIXEL_SCALE).cpu())
        return torch.cat(found)

    def records(self) -> dict[str, Any]:
        self.model.eval()
        pictures, classes = self.parts["test"]
        found = self.predict(pictures).argmax(-1)
        return {PREDICTIONS: Predictions(self.pictures.classes, classes.tolist(), found.tolist()).record()}


def build(config: Config) -> Images:
    return Images(config, load_images(config.data))


def label(config: Config) -> str:
    """Return a short description that distinguishes a run from others."""
    return f"{config.downsample}, lr {config.lr:g}"


def pictures(run: Run, config: Config) -> dict[str, bytes]:
    predictions = Predictions.of(run.folder)
    return {} if predictions is None else {"confusion": confusion_picture(predictions)}


def variants(config: Config) -> dict[str, Config]:
    """Return both kinds of downsampling; everything else is equal."""
    return {how: replace(config, downsample=how) for how in get_args(Downsample)}


EXPERIMENT = Experiment(
    name="images",
    about=__doc__,
    config=Config,
    measure="accuracy",
    higher_is_better=True,
    unit="images",
    loss_unit="image",
    build=build,
    label=label,
    variants=variants,
    varied=("downsample",),
    pictures=pictures,
    published=PUBLISHED,
)
