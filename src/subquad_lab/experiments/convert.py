"""What does a short training give back after exact attention is replaced in a trained model?

    exact -> swap -> transfer: learn the feature maps, layer by layer -> adapt: low-rank matrices on the projections

A word Transformer is trained with exact attention first, or a trained model is given by --model. Each method then gets
the same tokens. For comparison: the exact model, the swap without training, windows and Multipole without training, and
a model trained from scratch with the method on as many tokens in total. Perplexity is that of held-out text.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from subquad_lab import UsageError
from subquad_lab.data.text import Corpus, load_prose, load_text
from subquad_lab.experiments import language
from subquad_lab.figures.plots import axes_of, by_factors, plain, svg
from subquad_lab.figures.tables import Table
from subquad_lab.models import parameters, refuse_too_large
from subquad_lab.models.conversion import Conversion, Stage
from subquad_lab.models.converted import exported
from subquad_lab.models.decoders import Decoder, WordDecoder
from subquad_lab.models.language import Transformer
from subquad_lab.models.learned_maps import LearnedMethods
from subquad_lab.models.pretrained import load
from subquad_lab.models.pretrained_decoder import PretrainedDecoder
from subquad_lab.models.scores import decoding, entropy, repeated_entropies
from subquad_lab.options.fields import config_from, read
from subquad_lab.options.methods import parse_method, refuse_many_features
from subquad_lab.training import lifecycle, schedule
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Carry, Experiment, PartName, Rows
from subquad_lab.training.run import ABOUT, CONFIG, Run

LOG_FACTOR_RATE = 10.0  # of a hybrid's far weights: one number for each head, which has e-foldings to go
STAGES: tuple[Stage, ...] = ("exact", "transfer", "adapt")
TABLE, DECODING = "conversion", "decoding"  # records of a run
PUBLISHED = [
    {"what": "GPT-2, 125 million parameters, converted to Hedgehog and trained further (2024)", "data": "WikiText-103",
     "figure": 16.7},
]  # fmt: skip


@dataclass(frozen=True)
class Config(Training):
    """Convert a trained language model to other attention methods.

    Args:
        batch: Total batch size (number of parallel text streams) of all processes.
        data: Folder with Penn Treebank, WikiText or other text files. Default: Python's embedded documentation.
        model: Trained model to convert: the folder of a finished run of `language` with a Transformer, a folder saved
            by transformers, or a .gguf file. Default: train a word Transformer first.
        methods: Methods to convert to, separated by commas, such as window:64+hedgehog, taylor:2, linear:elu.
        untrained: Methods to swap in without training, for comparison.
        exact_tokens: Number of tokens to train the word Transformer with exact attention.
        tokens: Number of tokens to train the feature maps.
        adapt_tokens: Number of tokens to train the low-rank matrices; 0: no adaptation.
        rank: Rank of these matrices.
        transfer_lr: Peak learning rate of the feature maps.
        adapt_lr: Peak learning rate of the low-rank matrices. --lr is that of the word Transformer.
        scratch: Also train a word Transformer from scratch with each method, on as many tokens in total.
        evaluate_tokens: Number of tokens of each part to evaluate on; null: all.
        width: Hidden size of the word Transformer.
        layers: Its number of layers.
        heads: Its number of attention heads.
        context: Context length in tokens.
        dropout: Dropout probability while the word Transformer is trained.
    """

    paths: ClassVar[tuple[str, ...]] = ("data", "model")

    batch: int = 8
    lr: float = 3e-3
    schedule: Literal["constant", "linear", "cosine", "epochs"] = "cosine"
    warmup: int = 50
    clip: float | None = 1.0
    evaluate_every: int | None = 50
    weights: Literal["best", "last"] = "last"
    data: str | None = None
    model: str | None = None
    methods: str = "window:64+hedgehog,taylor:2,linear:elu"
    untrained: str = "window:64,multipole"
    exact_tokens: int = 1_000_000
    tokens: int = 300_000
    adapt_tokens: int = 300_000
    rank: int = 8
    transfer_lr: float = 1e-2
    adapt_lr: float = 3e-3
    scratch: bool = True
    evaluate_tokens: int | None = None
    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 256
    dropout: float = 0.2

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
        for spec in split(self.methods):
            refuse_many_features(spec, self.width // self.heads)


def split(specs: str) -> list[str]:
    return [spec for spec in (part.strip() for part in specs.split(",")) if spec]


class Source(NamedTuple):
    """The model to convert, and its text."""

    decoder: Decoder
    corpus: Corpus
    is_trained: bool


class Span(NamedTuple):
    """Parameters with the steps in which they are trained, and their peak learning rate."""

    parameters: list[nn.Parameter]
    start: int
    end: int
    lr: float


class Convert:
    """The task of the training loop: one model, in stages."""

    def __init__(self, config: Config, source: Source) -> None:
        self.config, self.corpus, self.is_trained = config, source.corpus, source.is_trained
        specs, rank = split(config.methods), config.rank if config.adapt_tokens else None
        make = None if source.is_trained or not config.scratch else _maker(config, len(source.corpus.words))
        self.model = Conversion(source.decoder, source.is_trained, specs, rank, make)
        self.step, length = 0, (len(source.corpus.train) - 1) // config.batch
        self.passes = length // config.context  # steps per pass over the text
        if not self.passes:
            raise UsageError(f"batch: {config.batch} streams of {config.context} tokens need more than the "
                             f"{len(source.corpus.train):,} training tokens of {source.corpus.name}; use a smaller "
                             "--batch or --context")  # fmt: skip
        cut = config.batch * length
        self.inputs = source.corpus.train[:cut].view(config.batch, length)
        self.targets = source.corpus.train[1 : cut + 1].view(config.batch, length)
        self.ends = self._ends()
        self.batches = self.ends["adapt"]
        self.spans = self._spans()

    def _ends(self) -> dict[Stage, int]:
        """Return the step after which each stage ends."""
        config = self.config
        has_maps = any(len(student.learned.maps) for student in self.model.students.values())
        tokens = {"exact": 0 if self.is_trained else config.exact_tokens,
                  "transfer": config.tokens if has_maps else 0, "adapt": config.adapt_tokens}  # fmt: skip
        ends: dict[Stage, int] = {}
        for stage in STAGES:
            ends[stage] = max(ends.values(), default=0) + math.ceil(tokens[stage] / (config.batch * config.context))
        return ends

    def _spans(self) -> list[Span]:
        model, ends, config = self.model, self.ends, self.config
        spans = [Span(parameters, ends["exact"], ends["transfer"], factor * config.transfer_lr)
                 for student in model.students.values()
                 for parameters, factor in ((student.learned.matrices, 1.0),
                                            (student.learned.log_factors, LOG_FACTOR_RATE))]  # fmt: skip
        spans += [Span([*student.adapters.values()], ends["transfer"], ends["adapt"], config.adapt_lr)
                  for student in model.students.values()]  # fmt: skip
        spans += [Span([*network.parameters()], 0, ends["adapt"], config.lr) for network in model.scratch]
        if model.network is not None:
            spans.append(Span([*model.network.parameters()], 0, ends["exact"], config.lr))
        spans = [span for span in spans if span.parameters]
        for span in spans:  # Those of adapters come from another library, which may have changed it.
            for parameter in span.parameters:
                parameter.requires_grad_(True)
        return spans

    # --- What the loop asks for -----------------------------------------------------------------------------------

    @property
    def groups(self) -> list[list[nn.Parameter]]:
        return [span.parameters for span in self.spans]

    @property
    def boundaries(self) -> frozenset[int]:
        return frozenset({self.ends["exact"], self.ends["transfer"]})

    def enter(self, step: int) -> list[float]:
        self.step = step
        self.model.stage = next((stage for stage in STAGES if step < self.ends[stage]), None)
        rates = []
        for span in self.spans:
            is_active = span.start <= step < span.end
            for parameter in span.parameters:
                parameter.requires_grad_(is_active)
            own = schedule.Progress(step=step - span.start)
            settings = replace(self.config, lr=span.lr)
            rates.append(schedule.rate(settings, own, span.end - span.start) if is_active else 0.0)
        self.model.train(self.model.training)
        return rates

    def about(self) -> dict[str, Any]:
        corpus = self.corpus
        sizes = {part: len(getattr(corpus, part)) for part in ("train", "valid", "test")}
        data = {"name": corpus.name, "sha256": corpus.checksum, "sizes": sizes}
        return {"data": data, "parameters": parameters(self.model)}

    def batch(self, epoch: int, index: int) -> Rows:
        now = index % self.passes * self.config.context
        return tuple(x[:, now : now + self.config.context] for x in (self.inputs, self.targets))

    def begin(self, rows: int) -> Carry:
        return {}

    def loss(self, model: nn.Module, rows: Rows, carry: Carry) -> tuple[Tensor, Carry]:
        return model(*rows), {}

    def count(self, rows: Rows) -> int:
        return rows[0].numel()

    # --- Figures --------------------------------------------------------------------------------------------------

    def evaluate(self, part: PartName, check: Callable[[], None]) -> dict[str, float]:
        """Return the perplexity of each model that is trained; at the swap and on the test part, of all models."""
        tokens = getattr(self.corpus, part)[: self.config.evaluate_tokens and self.config.evaluate_tokens + 1]
        found = {name: math.exp(min(700.0, entropy(decoder, tokens, self.config.context, check)))
                 for name, decoder in self._decoders(part)}  # fmt: skip
        main = next((name for name in split(self.config.methods) if name in found), "exact")
        return {"perplexity": found[main], **found}

    def _decoders(self, part: PartName) -> Iterable[tuple[str, Decoder]]:
        """Yield the decoders to evaluate by name; those that are only evaluated exist one at a time."""
        model, teacher = self.model, self.model.teacher
        is_whole = part == "test"
        if is_whole or self.step <= self.ends["exact"]:
            yield "exact", teacher
        if is_whole or self.step == self.ends["exact"]:
            for spec in split(self.config.untrained):
                yield untrained(spec), self._swapped(spec)
        for spec, student in model.students.items() if self.step >= self.ends["exact"] else ():
            if is_whole:
                yield untrained(spec), self._swapped(spec)
                if student.adapters and len(student.learned.maps):
                    yield f"{spec} transferred", teacher.converted(student.learned.methods)
            yield spec, student.decoder
        for spec, decoder in model.from_scratch.items():
            yield f"{spec} from scratch", decoder

    def _swapped(self, spec: str) -> Decoder:
        """Return the teacher with a method and an untrained map."""
        return self.model.teacher.converted(LearnedMethods(spec, self.model.teacher.shape).methods)

    def records(self) -> dict[str, Any]:
        """Return recall, state and speed of each model in the table."""
        self.enter(self.batches)
        self.model.eval()
        rows, speeds = {}, {}
        context, limit = self.config.context, self.config.evaluate_tokens
        tokens = self.corpus.test[: limit and max(context, limit // 2)]  # half of them, because they are read twice
        for name, decoder in self._decoders("test"):
            first, second = repeated_entropies(decoder, tokens, context)
            nbytes, speed = decoding(decoder, tokens[:context])
            rows[name] = {"first_copy": math.exp(first), "second_copy": math.exp(second), "state_bytes": nbytes}
            speeds[name] = {"tokens_per_second": speed}
        return {TABLE: {"tokens": context, "rows": rows}, DECODING: {"tokens": context, "rows": speeds}}

    def exports(self) -> dict[str, bytes]:
        """Return the files of each converted model, which `models.converted.load` reads."""
        if self.config.model is None or not isinstance(self.model.teacher, PretrainedDecoder):
            return {}
        base, checksum = str(Path(self.config.model).resolve()), self.model.teacher.checksum()
        files: dict[str, bytes] = {}
        for spec, student in self.model.students.items():
            files |= exported(base, checksum, spec, student, self.config.rank if student.adapters else None)
        return files


def untrained(spec: str) -> str:
    return f"{spec} untrained"


def build(config: Config) -> Convert:
    return Convert(config, source_of(config))


def source_of(config: Config) -> Source:
    """Return the model to convert: a new one, that of a run, or a pretrained one."""
    if config.model is None:
        return _new(config)
    path = Path(config.model)
    if (path / CONFIG).is_file() or (path / ABOUT).is_file():
        return _of_run(config, path)
    prose = load_prose(config.data)
    network, tokenizer = load(config.model, with_head=True)
    longest = getattr(network.config, "max_position_embeddings", config.context)
    if config.context > longest:
        raise UsageError(f"context: expected at most {longest:,}, the model's maximum, got {config.context:,}")
    decoder = PretrainedDecoder(network.requires_grad_(False))
    parts = {part: tokenizer(text, return_tensors="pt").input_ids[0] for part, text in prose.parts.items()}
    return Source(decoder, Corpus(prose.name, joint(prose.checksum, decoder), (), **parts), True)


def _new(config: Config) -> Source:
    corpus = load_text(config.data)
    make = _maker(config, len(corpus.words))
    with torch.device("meta"):
        total = parameters(make(parse_method("exact")))["total"]
    copies = 1 + (len(split(config.methods)) if config.scratch else 0)
    refuse_too_large(copies * total, f"width: {copies} models of width {config.width}")
    return Source(WordDecoder(make(parse_method("exact"))), corpus, False)


def _of_run(config: Config, folder: Path) -> Source:
    """Return the model of a finished run of `language`, with the text that it was trained on."""
    run = Run.open(folder)
    values = read(folder / CONFIG)
    if values.pop("experiment", None) != "language":
        raise UsageError(f"model: expected a run of language, got {folder}")
    own = config_from(language.EXPERIMENT, values, folder / CONFIG)
    if own.model != "transformer" or own.method != "exact":
        raise UsageError(f"model: expected a Transformer with exact attention, got {language.label(own)} in {folder}")
    if run.result() is None:
        raise UsageError(f"model: {folder} is not finished; resume it with: subquad train --resume {folder}")
    if config.data is not None and config.data != own.data:
        raise UsageError(f"data: the model in {folder} has the words of its own text; expected no --data")
    if own.positions == "learned" and config.context > own.context:
        raise UsageError(f"context: expected at most {own.context}, the number of learned positions, "
                         f"got {config.context}")  # fmt: skip
    task = lifecycle.reopen(language.EXPERIMENT, own, run).task
    assert isinstance(task, language.Language)
    lifecycle.load_weights(task.model, run, own)
    decoder = WordDecoder(task.model.requires_grad_(False))
    return Source(decoder, replace(task.corpus, checksum=joint(task.corpus.checksum, decoder)), True)


def joint(checksum: str, decoder: Decoder) -> str:
    """Return a checksum of the text and of the model."""
    return hashlib.sha256(f"{checksum} {decoder.checksum()}".encode()).hexdigest()


def _maker(config: Config, words: int) -> Callable[[Any], Transformer]:
    return lambda method: Transformer(
        words, config.width, config.layers, config.heads, config.context, config.dropout, method, "rotary"
    )


def label(config: Config) -> str:
    """Return a short description that distinguishes a run from others."""
    return config.methods


def variants(config: Config) -> dict[str, Config]:
    """Return a conversion to each method alone; the rest is equal."""
    return {spec: replace(config, methods=spec) for spec in split(config.methods)}


def pictures(run: Run, config: Config) -> dict[str, bytes]:
    """Plot the perplexity of each model against the tokens that it was trained on."""
    figure, (axes,) = axes_of(1)
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in run.metrics():
        for name, value in line.items():
            if name.startswith("valid/") and name not in ("valid/perplexity", "valid/cross_entropy"):
                tokens = line["step"] * config.batch * config.context
                curves.setdefault(name.removeprefix("valid/"), []).append((tokens, value))
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), "--" if name.endswith("scratch") else "o-", markersize=3,
                  label=plain(name))  # fmt: skip
    axes.set(xlabel="tokens", ylabel="validation perplexity")
    by_factors(axes)
    if curves:
        axes.legend(fontsize="small")
    return {TABLE: svg(figure)}


def table(run: Run) -> Table | None:
    """Return perplexity, recall, state and speed of each model."""
    result = run.result()
    if result is None or not all(run.has(f"{name}.json") for name in (TABLE, DECODING)):
        return None
    probes, speeds = run.read_json(f"{TABLE}.json"), run.read_json(f"{DECODING}.json")
    exact, rows = result["test"]["exact"], []
    for name, own in probes["rows"].items():
        perplexity = result["test"][name]
        rows.append((
            name, f"{perplexity:,.4g}", f"{100 * (perplexity / exact - 1):+,.1f} %", f"{own['first_copy']:,.4g}",
            f"{own['second_copy']:,.4g}", f"{own['state_bytes'] / 1024:,.0f} KiB",
            f"{speeds['rows'][name]['tokens_per_second']:,.0f}",
        ))  # fmt: skip
    columns = ("model", "perplexity", "gap", "first copy", "second copy", f"state after {probes['tokens']}", "tokens/s")
    return Table(columns, rows, "perplexity of the test text, and of a text that is repeated once")


EXPERIMENT = Experiment(
    name="convert",
    about=__doc__,
    config=Config,
    measure="perplexity",
    higher_is_better=False,
    unit="tokens",
    loss_unit="token, summed over the models in training",
    build=build,
    label=label,
    variants=variants,
    varied=("methods",),
    pictures=pictures,
    table=table,
    in_demo=False,
    published=PUBLISHED,
)
