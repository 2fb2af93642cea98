"""How much can each attention method recall per byte of its state?

    accuracy = fraction of the queries whose answer, which is earlier in the sequence, has the largest logit

The data are drawn from a seed: training sequences are new in every step, and all runs are tested on the same ones. Each
batch has one of the numbers of pairs, in turn; accuracy is measured for each of them and averaged.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad_lab import UsageError
from subquad_lab.data.recall import IGNORED, Task, draw, max_pairs, min_length
from subquad_lab.figures import intervals
from subquad_lab.figures.plots import axes_of, plain, svg
from subquad_lab.models import parameters, refuse_too_large
from subquad_lab.models.recall import RecallTransformer
from subquad_lab.options.methods import parse_methods, refuse_many_features
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Carry, Experiment, PartName, Rows
from subquad_lab.training.run import Run

TESTED_SEQUENCES = 256  # of each part and number of pairs
BATCHES_PER_EPOCH = 100
MAX_TOKENS = 1 << 24  # of a batch


@dataclass(frozen=True)
class Config(Training):
    """Train a small Transformer to recall what is earlier in a sequence.

    Args:
        epochs: Number of times 100 batches; every batch is new.
        task: recall (values of keys), copy (a list of tokens) or induction (what followed a token the last time).
        method: Attention method: exact, taylor:DEGREE, random:FEATURES, linear:ACTIVATION, separable, window:SIZE,
            multipole:TOP. A list, such as window:16,taylor:2, has one for each layer in turn.
        pairs: Numbers of pairs to train with and to test, separated by commas.
        length: Number of tokens of a sequence.
        vocabulary: Number of different tokens. For recall, half of them are keys and half values.
        width: Hidden size.
        heads: Number of attention heads. Fewer and wider heads have larger states.
        layers: Number of layers.
        positions: Position encoding: none, rotary or learned.
        shift: Combine the embedding of each token with that of the previous one, so that one layer is enough.
    """

    seeds: int = 3
    epochs: int = 20
    evaluate_every: int = 200
    batch: int = 32
    lr: float = 5e-3
    schedule: Literal["constant", "linear", "cosine", "epochs"] = "cosine"
    warmup: int = 100
    clip: float | None = 1.0
    task: Task = "recall"
    method: str = "exact"
    pairs: int | str = "4,8,16,32,64"
    length: int = 256
    vocabulary: int = 256
    width: int = 64
    heads: int = 4
    layers: int = 1
    positions: Literal["none", "rotary", "learned"] = "none"
    shift: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("length", "vocabulary", "width", "heads", "layers"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected a positive integer, got {getattr(self, name)}")
        if self.width % self.heads:
            raise UsageError(f"heads: expected a divisor of the width {self.width}, got {self.heads}")
        most = max(numbers_of(self.pairs))
        if most > max_pairs(self.task, self.vocabulary):
            raise UsageError(f"vocabulary: {self.vocabulary} tokens are enough for at most "
                             f"{max_pairs(self.task, self.vocabulary)} pairs, got --pairs {self.pairs}")  # fmt: skip
        if self.length < min_length(self.task, most):
            raise UsageError(f"length: expected at least {min_length(self.task, most)} tokens for {most} pairs, got "
                             f"{self.length}")  # fmt: skip
        if max(self.batch, TESTED_SEQUENCES) * self.length > MAX_TOKENS:
            raise UsageError(f"length: expected at most {MAX_TOKENS:,} tokens in a batch, got {self.length:,} in each "
                             f"of {max(self.batch, TESTED_SEQUENCES)} sequences")  # fmt: skip
        specs = self.method.split(",")
        for spec in specs:
            refuse_many_features(spec.strip(), self.width // self.heads)
        if len(specs) > self.layers:
            raise UsageError(f"method: expected no more methods than --layers {self.layers}, got {self.method!r}")


def numbers_of(pairs: int | str) -> list[int]:
    """Return the numbers of pairs.

    >>> numbers_of("4,8")
    [4, 8]
    """
    words = [word.strip() for word in str(pairs).split(",")]
    if not all(word.isascii() and word.isdecimal() and 0 < int(word) < MAX_TOKENS for word in words):
        raise UsageError(f"pairs: expected positive integers separated by commas, got {pairs!r}")
    return sorted({int(word) for word in words})


def make_model(config: Config) -> RecallTransformer:
    return RecallTransformer(config.vocabulary, config.width, config.layers, config.heads, config.length,
                             parse_methods(config.method), config.positions, config.shift)  # fmt: skip


class Recall:
    """The task of the training loop: sequences that are drawn for each step."""

    batches = BATCHES_PER_EPOCH

    def __init__(self, config: Config) -> None:
        self.config, self.pairs = config, numbers_of(config.pairs)
        with torch.device("meta"):
            refuse_too_large(parameters(make_model(config))["total"], f"width: a model of width {config.width}")
        self.model = make_model(config)
        self.tests = {part: {pairs: self._drawn(TESTED_SEQUENCES, pairs, part) for pairs in self.pairs}
                      for part in ("valid", "test")}  # fmt: skip

    def _drawn(self, rows: int, pairs: int, *seed: object) -> tuple[Tensor, Tensor]:
        config = self.config
        return draw(config.task, rows, pairs, config.length, config.vocabulary, seed)

    def about(self) -> dict[str, Any]:
        config, digest = self.config, hashlib.sha256()
        for rows in (rows for part in self.tests.values() for rows in part.values()):
            for tensor in rows:
                digest.update(tensor.numpy().tobytes())
        data = {"name": config.task, "sha256": digest.hexdigest(), "pairs": self.pairs, "length": config.length,
                "vocabulary": config.vocabulary}  # fmt: skip
        return {"data": data, "parameters": parameters(self.model.transformer), "method": config.method,
                "state_bytes": self.model.state_bytes(config.length)}  # fmt: skip

    def batch(self, epoch: int, index: int) -> Rows:
        pairs = self.pairs[(epoch * self.batches + index) % len(self.pairs)]
        return self._drawn(self.config.batch, pairs, "train", self.config.seed, epoch, index)

    def begin(self, rows: int) -> Carry:
        return {}

    def loss(self, model: nn.Module, rows: Rows, carry: Carry) -> tuple[Tensor, Carry]:
        tokens, targets = rows
        each = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        # The mean of each sequence first: sequences differ in their queries, and processes in their sequences.
        return (each.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)).mean(), {}

    def count(self, rows: Rows) -> int:
        return rows[0].numel()

    @torch.no_grad()
    def evaluate(self, part: PartName, check: Callable[[], None]) -> dict[str, float]:
        device = next(self.model.parameters()).device
        found = {}
        for pairs, rows in self.tests[part].items():
            check()
            tokens, targets = (tensor.to(device) for tensor in rows)
            is_query = targets != IGNORED
            right = self.model(tokens).argmax(-1)[is_query] == targets[is_query]
            found[f"accuracy_{pairs}_pairs"] = float(right.double().mean())
        return {"accuracy": fmean(found.values())} | found

    def records(self) -> dict[str, Any]:
        return {}


def build(config: Config) -> Recall:
    # A model that is trained with a method does not need it to approximate softmax.
    warnings.filterwarnings("ignore", ".* is far outside its range")
    return Recall(config)


def label(config: Config) -> str:
    """Return a short description that distinguishes a run from others."""
    layers = f", {config.layers} layers" if config.layers > 1 else ""
    return f"{config.method}, {config.heads} heads{layers}"


def variants(config: Config) -> dict[str, Config]:
    """Return each method with states of several sizes; the number of parameters is the same for all."""
    quarter, half = config.length // 4, config.length // 2
    found = {"exact": replace(config, method="exact")}
    for method in ("linear:elu", "taylor:2", "separable"):
        for heads in (2 * config.heads, config.heads):  # narrow and wide heads
            if config.width % heads == 0:
                found[f"{method} {config.width // heads} wide"] = replace(config, method=method, heads=heads)
    others = ["random:16", "random:64", f"window:{quarter}", f"window:{half}"]
    if config.layers > 1:
        others.append(f"window:{quarter},taylor:2")
    return found | {method: replace(config, method=method) for method in others}


# --- Pictures -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """Finished runs that differ in their seed only: the size of their state, and the results of each."""

    spec: str
    state_bytes: int
    results: list[dict[str, float]]

    def interval(self, figure: str) -> tuple[float, float]:
        """Return the mean of a figure and the half-width of its 95 % confidence interval, 0 for a single run."""
        values = [result[figure] for result in self.results]
        if len(values) == 1:
            return values[0], 0.0
        found = intervals.over_seeds(values)
        return found.mean, found.half


def family(spec: str) -> str:
    """Return what is the same for methods of one line: "window:16" and "window:32" are "window".

    >>> family("window:16,taylor:2"), family("linear:elu")
    ('window,taylor', 'linear:elu')
    """
    names = [part.partition(":") for part in spec.split(",")]
    return ",".join(name if argument.isdecimal() else name + colon + argument for name, colon, argument in names)


def shared_pictures(runs: Mapping[str, Sequence[Run]]) -> dict[str, bytes]:
    lines: dict[str, list[Point]] = {}
    for group in runs.values():
        about, results = group[0].about(), [run.result() for run in group]
        tests = [result["test"] for result in results if result is not None]
        spec, state = str(about.get("method")), about.get("state_bytes")
        if len(tests) == len(group) and type(state) is int:
            lines.setdefault(family(spec), []).append(Point(spec, state, tests))
    return {"recall": recall_picture(lines)} if lines else {}


def recall_picture(lines: Mapping[str, list[Point]]) -> bytes:
    """Plot accuracy against the size of the state, and against the number of pairs for the largest state of a line."""
    figure, (left, right) = axes_of(2)
    for points in lines.values():
        points = sorted(points, key=lambda point: point.state_bytes)
        largest = points[-1]
        name = plain(largest.spec if len({point.spec for point in points}) == 1 else family(largest.spec))
        means, halves = zip(*(point.interval("accuracy") for point in points), strict=True)
        left.errorbar([point.state_bytes for point in points], means, halves, marker="o", capsize=3, label=name)
        counts = {int(key.split("_")[1]): key for key in largest.results[0] if key.startswith("accuracy_")}
        means, halves = zip(*(largest.interval(counts[count]) for count in sorted(counts)), strict=True)
        right.errorbar(sorted(counts), means, halves, marker="o", capsize=3, label=plain(largest.spec))
    left.set(xscale="log", xlabel="state of a sequence, bytes", ylabel="test accuracy", ylim=(0, 1.05))
    right.set(xscale="log", xlabel="pairs", ylabel="test accuracy", ylim=(0, 1.05))
    for axes in (left, right):
        axes.legend(fontsize="x-small")
    return svg(figure)


EXPERIMENT = Experiment(
    name="recall",
    about=__doc__,
    config=Config,
    measure="accuracy",
    higher_is_better=True,
    unit="tokens",
    loss_unit="query",
    build=build,
    label=label,
    variants=variants,
    varied=("method",),
    shared_pictures=shared_pictures,
)
