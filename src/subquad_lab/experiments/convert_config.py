"""The options of the experiment `convert`."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from subquad_lab import UsageError
from subquad_lab.data.text import Tokens
from subquad_lab.options.methods import parse_method
from subquad_lab.training.config import Training


@dataclass(frozen=True)
class Config(Training):
    """Convert a trained language model to other attention methods.

    Args:
        batch: Total batch size (number of parallel text streams) of all processes.
        data: Folder with Penn Treebank, WikiText or other text files. Default: Python's embedded documentation.
        model: Trained model to convert: the folder of a finished run of `language` with a Transformer, a folder saved
            by transformers, or a .gguf file. Default: train a small Transformer first.
        units: Tokens of the small Transformer: characters or words.
        repeats: Let the second half of every other piece of --context tokens repeat the first, in all parts of the
            text, so that the model needs to look back. Default: only for the small Transformer.
        methods: Methods to convert to, separated by commas, such as window:16+hedgehog, taylor:2, linear:elu.
            window:64:4 is a window with 4 attention sinks.
        untrained: Methods to swap in without training, for comparison.
        exact_tokens: Number of tokens to train the small Transformer with exact attention.
        tokens: Number of tokens to train the feature maps.
        adapt_tokens: Number of tokens to train the low-rank matrices; 0: no adaptation.
        rank: Rank of these matrices.
        transfer_lr: Peak learning rate of the feature maps.
        adapt_lr: Peak learning rate of the low-rank matrices. --lr is that of the small Transformer.
        scratch: Also train a small Transformer from scratch with each method, on as many tokens in total.
        evaluate_tokens: Number of tokens of each part to evaluate on; null: all.
        width: Hidden size of the small Transformer.
        layers: Its number of layers.
        heads: Its number of attention heads.
        context: Context length in tokens.
        dropout: Dropout probability while the small Transformer is trained.
    """

    paths: ClassVar[tuple[str, ...]] = ("data", "model")

    batch: int = 16
    lr: float = 3e-3
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: int = 20
    clip: float | None = 1.0
    evaluate_every: int | None = 50
    weights: Literal["best", "last"] = "last"
    data: str | None = None
    model: str | None = None
    units: Tokens = "characters"
    repeats: bool | None = None
    methods: str = "window:16+hedgehog,window:16+taylor:2,window:16+linear:elu,taylor:2,linear:elu"
    untrained: str = "window:16,multipole"
    exact_tokens: int = 2_000_000
    tokens: int = 300_000
    adapt_tokens: int = 300_000
    rank: int = 16
    transfer_lr: float = 2e-2
    adapt_lr: float = 1e-2
    scratch: bool = True
    evaluate_tokens: int | None = None
    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 128
    dropout: float = 0.0

    @property
    def has_repeats(self) -> bool:
        return self.model is None if self.repeats is None else self.repeats

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = {"epochs": 1, "steps": None, "minutes": None, "patience": None, "weights": "last"}
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise UsageError(f"{name}: the numbers of tokens set the length of a conversion, and the last weights "
                                 f"are its result; expected no value, got {getattr(self, name)}")  # fmt: skip
        for name in ("exact_tokens", "tokens", "rank", "width", "layers", "heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected a positive integer, got {getattr(self, name)}")
        if self.context < 4:
            raise UsageError(f"context: expected at least 4, got {self.context}")
        if self.adapt_tokens < 0:
            raise UsageError(f"adapt_tokens: expected an integer >= 0, got {self.adapt_tokens}")
        if self.evaluate_tokens is not None and self.evaluate_tokens < 1:
            raise UsageError(f"evaluate_tokens: expected a positive integer, got {self.evaluate_tokens}")
        for name in ("transfer_lr", "adapt_lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}: expected a number >= 0, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout: expected a number in [0, 1), got {self.dropout}")
        if self.width % self.heads:
            raise UsageError(f"heads: expected a divisor of the width {self.width}, got {self.heads}")
        for name in ("methods", "untrained"):
            specs = split(getattr(self, name))
            if len(set(specs)) < len(specs):
                raise UsageError(f"{name}: expected different methods, got {getattr(self, name)!r}")
            for spec in specs:
                parse_method(spec, f"--{name}")
        if not split(self.methods):
            raise UsageError(f"methods: expected at least one method, got {self.methods!r}")
        if "exact" in split(self.methods):
            raise UsageError(f"methods: expected other methods than exact, which every run has, got {self.methods!r}")


def split(specs: str) -> list[str]:
    return [spec for spec in (part.strip() for part in specs.split(",")) if spec]
