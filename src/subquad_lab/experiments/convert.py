"""What does a short training give back after exact attention is replaced in a trained model?

    exact -> swap -> transfer: learn the feature maps, layer by layer -> adapt: low-rank matrices on the projections

A small Transformer is trained with exact attention first, or a trained model is given by --model. Each method then gets
the same tokens. For comparison: the exact model, the swap without training, windows and Multipole without training, and
a model trained from scratch with the method on as many tokens in total. Perplexity is that of held-out text.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from subquad_lab import UsageError
from subquad_lab.data.text import with_repeats
from subquad_lab.experiments.convert_config import Config, split
from subquad_lab.experiments.convert_figures import DECODING, PUBLISHED, TABLE, UNTRAINED, pictures, table
from subquad_lab.experiments.convert_source import Source, maker, source_of
from subquad_lab.models import parameters
from subquad_lab.models.conversion import Conversion, Stage
from subquad_lab.models.converted import exported
from subquad_lab.models.decoders import Decoder
from subquad_lab.models.learned_maps import LearnedMethods
from subquad_lab.models.pretrained_decoder import PretrainedDecoder
from subquad_lab.models.scores import decoding, entropy, perplexity, repeated_entropies
from subquad_lab.options.methods import refuse_many_features
from subquad_lab.training import schedule
from subquad_lab.training.experiment import Carry, Experiment, PartName, Rows

LOG_FACTOR_RATE = 10.0  # relative to the matrices: the factor of a hybrid's far weights has e-foldings to go
STAGES: tuple[Stage, ...] = ("exact", "transfer", "adapt")


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
        for name in ("methods", "untrained"):
            for spec in split(getattr(config, name)):
                refuse_many_features(spec, source.decoder.shape.width, f"--{name}")
        make = None if source.is_trained or not config.scratch else maker(config, len(source.corpus.words))
        self.model = Conversion(source.decoder, source.is_trained, specs, rank, make)
        self.step, corpus = 0, source.corpus
        self.texts = {
            part: with_repeats(text, config.context) if config.has_repeats else text
            for part, text in (("train", corpus.train), ("valid", corpus.valid), ("test", corpus.test))
        }
        self.passes = (len(corpus.train) - 1) // config.context // config.batch  # steps per pass over the text
        if not self.passes:
            raise UsageError(f"batch: {config.batch} streams of {config.context} tokens need more than the "
                             f"{len(corpus.train):,} training tokens of {corpus.name}; use a smaller "
                             "--batch or --context")  # fmt: skip
        cut = config.batch * self.passes * config.context
        self.inputs = self.texts["train"][:cut].view(config.batch, -1)
        self.targets = self.texts["train"][1 : cut + 1].view(config.batch, -1)
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
        name = f"{corpus.name}, with repeats" if self.config.has_repeats else corpus.name
        data = {"name": name, "sha256": corpus.checksum, "sizes": sizes}
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
        tokens = self.texts[part][: self.config.evaluate_tokens and self.config.evaluate_tokens + 1]
        found = {name: perplexity(entropy(decoder, tokens, self.config.context, check))
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
            rows[name] = {"first_copy": perplexity(first), "second_copy": perplexity(second), "state_bytes": nbytes}
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
    return spec + UNTRAINED


def build(config: Config) -> Convert:
    return Convert(config, source_of(config))


def label(config: Config) -> str:
    """Return a short description that distinguishes a run from others."""
    return config.methods


def variants(config: Config) -> dict[str, Config]:
    """Return a conversion to each method alone; the rest is equal."""
    return {spec: replace(config, methods=spec) for spec in split(config.methods)}


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
