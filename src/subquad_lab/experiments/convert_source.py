"""The model that the experiment `convert` begins with, and its text: a new one, that of a run, or a pretrained one."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from subquad_lab import UsageError
from subquad_lab.data.text import Corpus, load_prose, load_text
from subquad_lab.experiments import language
from subquad_lab.experiments.convert_config import Config, split
from subquad_lab.models import parameters, refuse_too_large
from subquad_lab.models.decoders import Decoder, WordDecoder
from subquad_lab.models.language import Transformer
from subquad_lab.models.pretrained import load
from subquad_lab.models.pretrained_decoder import PretrainedDecoder
from subquad_lab.options.fields import config_from, read
from subquad_lab.options.methods import parse_method
from subquad_lab.training import lifecycle
from subquad_lab.training.run import ABOUT, CONFIG, Run


class Source(NamedTuple):
    """The model to convert, and its text."""

    decoder: Decoder
    corpus: Corpus
    is_trained: bool


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
    corpus = load_text(config.data, config.units)
    make = maker(config, len(corpus.words))
    with torch.device("meta"):
        total = parameters(make(parse_method("exact")))["total"]
    copies = 1 + (len(split(config.methods)) if config.scratch else 0)
    refuse_too_large(copies * total, f"width: a set of {copies} models of width {config.width}")
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


def maker(config: Config, words: int) -> Callable[[Any], Transformer]:
    return lambda method: Transformer(
        words, config.width, config.layers, config.heads, config.context, config.dropout, method, "rotary"
    )
