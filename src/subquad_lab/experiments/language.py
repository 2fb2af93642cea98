"""How does the perplexity of a word language model depend on its sequence mixer?

    cross-entropy = mean of -log p(word | previous words),  perplexity = exp(cross-entropy)

The training text is split into one stream per batch row, and each step reads the next `context` words of every stream.
Recurrent models carry their state from step to step (truncated backpropagation through time); a Transformer attends
only to the words of the current step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.distributed import SequenceParallel
from subquad_lab import UsageError
from subquad_lab.data.text import END, UNKNOWN, Corpus, Tokens, load_text
from subquad_lab.experiments.positions import MAX_LENGTH, POSITIONS, by_position, positions_picture
from subquad_lab.models import parameters, refuse_too_large
from subquad_lab.models.language import LSTM, Model, SigmoidRNN, Transformer, generate
from subquad_lab.models.scores import perplexity
from subquad_lab.options.methods import parse_method, refuse_many_features
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Carry, Experiment, PartName, Rows
from subquad_lab.training.run import Run

EVALUATION_WORDS = 4096  # per forward pass
MIN_SPLIT_WORDS = 2  # of a process that shares its sequences with others
EVALUATION_STREAMS = 16  # Few, because each starts without a state.

PUBLISHED = [
    {"what": "sigmoid RNN, embedding 256, width 512", "data": "Penn Treebank", "figure": 164},
    {"what": "sigmoid RNN, embedding 2048, width 4096", "data": "Penn Treebank", "figure": 140},
]


@dataclass(frozen=True)
class Config(Training):
    """Train a word language model.

    Args:
        batch: Total batch size (number of parallel text streams) of all processes.
        data: Folder with Penn Treebank, WikiText or other text files. Default: Python's embedded documentation.
        model: rnn (sigmoid), lstm or transformer.
        method: Attention method of the transformer: exact, taylor:DEGREE, random:FEATURES, linear:ACTIVATION,
            separable, window:SIZE, multipole:TOP, hedgehog:RANK (learned), or window:SIZE+METHOD for both.
        embedding: Embedding size of rnn and lstm.
        width: Hidden size.
        layers: Number of layers of lstm and transformer.
        heads: Number of attention heads of the transformer.
        context: Context length: words per stream and step.
        dropout: Dropout probability on embeddings, between layers and on outputs; not on recurrent connections.
        tied: Share the input and output embeddings. Always true for the transformer.
        positions: Position encoding of the transformer: rotary or learned.
        tokens: Predict words or characters. What the other options say about words is then about characters.
        longest: After training, record the test perplexity by position in texts of this many words; null: do not.
            Learned positions end with the context, so it needs rotary positions beyond it.
    """

    epochs: int = 10
    batch: int = 16
    lr: float = 3e-3
    schedule: Literal["constant", "linear", "cosine", "epochs"] = "cosine"
    warmup: int = 50
    clip: float | None = 1.0
    data: str | None = None
    model: Literal["rnn", "lstm", "transformer"] = "transformer"
    method: str = "exact"
    embedding: int = 128
    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 128
    dropout: float = 0.2
    tied: bool = True
    positions: Literal["rotary", "learned"] = "rotary"
    tokens: Tokens = "words"
    longest: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embedding", "width", "layers", "heads", "context"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected a positive integer, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout: expected a number in [0, 1), got {self.dropout}")
        if self.model == "transformer" and self.width % self.heads:
            raise UsageError(f"heads: expected a divisor of the width {self.width}, got {self.heads}")
        if self.longest is not None:
            refuse_positions(self, self.longest)
        if self.model == "transformer":
            refuse_many_features(self.method, self.width // self.heads)


def refuse_positions(config: Config, longest: int) -> None:
    """Raise if the model of a config cannot read texts of this length."""
    if not 1 <= longest <= MAX_LENGTH:
        raise UsageError(f"longest: expected an integer from 1 to {MAX_LENGTH:,}, got {longest}")
    if config.model == "transformer" and config.positions == "learned" and longest > config.context:
        raise UsageError(f"longest: learned positions end with the context of {config.context:,} words, got "
                         f"{longest:,}; train with --positions rotary to go beyond")  # fmt: skip


def make_model(config: Config, words: int) -> Model:
    match config.model:
        case "rnn":
            return SigmoidRNN(words, config.embedding, config.width, config.dropout, config.tied)
        case "lstm":
            return LSTM(words, config.embedding, config.width, config.layers, config.dropout, config.tied)
        case "transformer":
            return Transformer(words, config.width, config.layers, config.heads, config.context, config.dropout,
                               parse_method(config.method), config.positions)  # fmt: skip


class Language:
    """The task of the training loop: streams of words."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus
        refuse_too_large(count_parameters(config, len(corpus.words)), f"width: a model of width {config.width}")
        self.model = make_model(config, len(corpus.words))
        length = (len(corpus.train) - 1) // config.batch
        self.batches = length // config.context
        if not self.batches:
            raise UsageError(f"batch: {config.batch} streams of {config.context} words need more than the "
                             f"{len(corpus.train):,} training words of {corpus.name}; use a smaller --batch or "
                             "--context")  # fmt: skip
        self.inputs = corpus.train[: config.batch * length].view(config.batch, length)
        self.targets = corpus.train[1 : config.batch * length + 1].view(config.batch, length)
        if config.longest is not None and config.longest >= len(corpus.test):
            raise UsageError(f"longest: expected at most {len(corpus.test) - 1:,}, the number of predicted test words "
                             f"of {corpus.name}, got {config.longest:,}")  # fmt: skip
        self.carries = config.model != "transformer"

    def about(self) -> dict[str, Any]:
        corpus = self.corpus
        sizes = {part: len(getattr(corpus, part)) for part in ("train", "valid", "test")}
        data = {"name": corpus.name, "sha256": corpus.checksum, "words": len(corpus.words), "sizes": sizes}
        return {"data": data, "parameters": parameters(self.model)}

    def batch(self, epoch: int, index: int) -> Rows:
        now = slice(index * self.config.context, (index + 1) * self.config.context)
        return self.inputs[:, now], self.targets[:, now]

    def begin(self, rows: int) -> Carry:
        return {"state": self.model.start(rows)} if self.carries else {}

    def loss(self, model: nn.Module, rows: Rows, carry: Carry) -> tuple[Tensor, Carry]:
        inputs, targets = rows
        logits, state = model(inputs, carry.get("state"))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, {"state": state.detach()} if self.carries else {}

    def split(self, sharing: int) -> dict[str, int]:
        config = self.config
        if self.carries:
            raise UsageError(
                f"--sequence-parallel: {config.model} passes its state from word to word; use --model transformer"
            )
        if config.context < MIN_SPLIT_WORDS * sharing:
            raise UsageError(
                f"--sequence-parallel: expected at least {MIN_SPLIT_WORDS} words of the context for each of {sharing} "
                f"processes, got {config.context}; use a larger --context"
            )
        return {"tokens": 1, "places": 0}

    def split_loss(self, model: nn.Module, rows: Rows, parallel: SequenceParallel) -> Tensor:
        inputs, targets = rows
        places = torch.arange(inputs.shape[1], device=inputs.device)
        logits, _ = model(inputs, None, places)
        own = parallel.shard(targets)
        return parallel.total(F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum") / targets.numel())

    def count(self, rows: Rows) -> int:
        return rows[0].numel()

    @torch.no_grad()
    def evaluate(self, part: PartName, check: Callable[[], None]) -> dict[str, float]:
        """Return the metrics over every word of the part except the first."""
        words = getattr(self.corpus, part)
        device = next(self.model.parameters()).device
        streams = EVALUATION_STREAMS
        length = -(-(len(words) - 1) // streams)
        inputs, targets = words.new_zeros(streams * length), words.new_full((streams * length,), -100)
        inputs[: len(words) - 1], targets[: len(words) - 1] = words[:-1], words[1:]
        piece = EVALUATION_WORDS // streams if self.carries else self.config.context
        pairs = (x.view(streams, length).split(piece, 1) for x in (inputs, targets))
        total, carry = torch.zeros((), dtype=torch.float64), self.begin(streams).get("state")
        for x, y in zip(*pairs, strict=True):
            for rows, wanted in _fitting(x.to(device), y.to(device), self.carries):
                check()
                logits, state = self.model(rows, carry)
                loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
                total += loss.double().cpu()
            carry = state if self.carries else None
        entropy = float(total) / (len(words) - 1)
        return {"cross_entropy": entropy, "perplexity": perplexity(entropy)}

    def positions(self, part: PartName, longest: int, check: Callable[[], None]) -> dict[str, Any]:
        """Return the cross-entropy by position in texts of this length."""
        refuse_positions(self.config, longest)
        self.model.eval()
        return by_position(self.model, getattr(self.corpus, part), longest, check)

    def records(self) -> dict[str, Any]:
        longest = self.config.longest
        return {} if longest is None else {POSITIONS: self.positions("test", longest, lambda: None)}

    def sample(self, prompt: str, count: int, temperature: float, top_k: int | None, top_p: float | None,
               seed: int) -> str:  # fmt: skip
        """Return the prompt with its continuation up to the end of the sentence."""
        place, words = self.corpus.numbers, self.corpus.split(prompt)
        if not words:
            raise UsageError("--prompt: expected at least one word, got none")
        for word in words:
            if word not in place:
                raise UsageError(f"--prompt: {word!r} is not in the model's vocabulary")
        numbers = [place[word] for word in words]
        if self.config.model == "transformer" and self.config.positions == "learned":
            if len(numbers) >= self.config.context:
                raise UsageError(f"--prompt: expected fewer than {self.config.context} words, the number of learned "
                                 f"positions, got {len(numbers)}")  # fmt: skip
            count = min(count, self.config.context - len(numbers))
        generator = torch.Generator().manual_seed(seed)
        self.model.eval()
        added = generate(self.model, numbers, count, temperature=temperature, top_k=top_k, top_p=top_p,
                         generator=generator, end=place[END], banned=place[UNKNOWN])  # fmt: skip
        return self.corpus.text([*numbers, *added]).removesuffix(END).strip()


def _fitting(inputs: Tensor, targets: Tensor, whole: bool) -> list[tuple[Tensor, Tensor]]:
    """Split the rows to limit memory; keep them together if their state is carried."""
    rows = len(inputs) if whole else max(1, EVALUATION_WORDS // inputs.shape[1])
    return list(zip(inputs.split(rows), targets.split(rows), strict=True))


def build(config: Config) -> Language:
    return Language(config, load_text(config.data, config.tokens))


def pictures(run: Run, config: Config) -> dict[str, bytes]:
    return positions_picture({label(config): [run]})


METHODS = ("exact", "taylor:2", "random:64", "linear:elu", "separable")


def variants(config: Config) -> dict[str, Config]:
    """Return the Transformer with each method, and recurrent models of about the same size; the rest is equal."""
    words = len(load_text(config.data, config.tokens).words)
    base = replace(config, model="transformer")
    total = count_parameters(base, words)
    recurrent = {name: matched(replace(config, model=name, layers=1), words, total) for name in ("lstm", "rnn")}
    return {method: replace(base, method=method) for method in METHODS} | recurrent


def label(config: Config) -> str:
    """Return a short description that distinguishes a run from others."""
    return f"{config.model}, {config.method}" if config.model == "transformer" else config.model


def matched(config: Config, words: int, total: int) -> Config:
    """Return the config with the width and embedding size that give about `total` parameters."""
    sized = [replace(config, width=width, embedding=width) for width in range(2, 4097, 2)]
    low, high = 0, len(sized) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if count_parameters(sized[middle], words) < total else (low, middle)
    near = sized[max(0, low - 1) : low + 1]
    return min(near, key=lambda c: abs(count_parameters(c, words) - total))


def count_parameters(config: Config, words: int) -> int:
    with torch.device("meta"):
        return parameters(make_model(config, words))["total"]


EXPERIMENT = Experiment(
    name="language",
    about=__doc__,
    config=Config,
    measure="perplexity",
    higher_is_better=False,
    unit="words",
    loss_unit="word",
    build=build,
    label=label,
    variants=variants,
    varied=("model", "method"),
    pictures=pictures,
    shared_pictures=positions_picture,
    published=PUBLISHED,
)
