"""Fitted feature maps on the attention of trained models: MiniLM, an encoder, and SmolLM2, a decoder.

    error = |out - exact| / |exact| of one head, on a text that the fit has not seen

Every method is fitted to each layer on one text (`subquad.fit`) and measured on another. "FAVOR+" is
RandomFeatures(r): positive orthogonal features without a fit, as in performer-pytorch. The error of random features is
the root mean square over four draws that the fit has not seen, the same ones before and after. A mean over heads is
geometric.

Usage: python benchmarks/fit.py [--quick]
"""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from decoder import capture as capture_decoder
from decoder import load as load_decoder
from decoder import texts as decoder_texts
from encoder import capture as capture_encoder
from encoder import load as load_encoder
from encoder import manual
from encoder import texts as encoder_texts
from results import machine, today, write_page
from torch import Tensor

from subquad import RandomFeatures, Taylor, attention, fit

COUNTS = (64, 256, 1024)
LAYERS = (0, 6, 12, 18, 24, 29)  # of SmolLM2
TOKENS = 1024  # of its texts
SEEDS = (10, 11, 12, 13)  # of the draws that are measured; `fit` chooses by others
GOOD = 0.05
FAVOR = "FAVOR+"


@dataclass(frozen=True)
class Measured:
    """The errors of one method in one layer, of each query head."""

    model: str
    layer: int
    method: str
    features: int
    is_fitted: bool
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Sample:
    """One layer on two texts: query, key and value of each."""

    model: str
    layer: int
    is_causal: bool
    fitting: Sequence[Tensor]
    held_out: Sequence[Tensor]


def samples(is_quick: bool) -> Iterator[Sample]:
    """Yield the layers of both models."""
    model, tokenizer = load_encoder()
    sentences = manual()
    half = len(sentences) // 2
    parts = (encoder_texts(tokenizer, part, 10)[1] for part in (sentences[:half], sentences[half:]))
    pair = [capture_encoder(model, text) for text in parts]
    for number, (own, other) in enumerate(zip(*pair, strict=True)):
        if number < (1 if is_quick else 6):
            yield Sample("MiniLM", number, False, own[:3], other[:3])
    model, tokenizer = load_decoder()
    found = decoder_texts(tokenizer, TOKENS)
    layers = LAYERS[:1] if is_quick else LAYERS
    own, other = (capture_decoder(model, found[name], layers) for name in ("manual", "license"))
    for number in layers:
        yield Sample("SmolLM2", number, True, own[number][:3], other[number][:3])


def methods(counts: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """Yield every kind at every number of features, by name."""
    yield "Taylor(2)", Taylor(2)
    kinds = {
        FAVOR: RandomFeatures(),
        "simplex": RandomFeatures(coupling="simplex"),
        "scale for unit variance": RandomFeatures(scale="auto"),
        "hyperbolic": RandomFeatures(kind="hyperbolic"),
        "trigonometric": RandomFeatures(kind="trigonometric"),
    }
    for name, kind in kinds.items():
        yield from ((name, replace(kind, num_features=count)) for count in counts)


def measure(sample: Sample, name: str, method: Any) -> Iterator[Measured]:
    """Yield the errors of a method in one layer, as it is and fitted."""
    exact = attend(sample, None)
    about = sample.model, sample.layer, name, method.size(exact.shape[-1])
    yield Measured(*about, False, errors(sample, method, exact))
    found = fit(method, *sample.fitting, is_causal=sample.is_causal, enable_gqa=True).method
    yield Measured(*about, True, errors(sample, found, exact))
    if isinstance(method, Taylor):
        centered = replace(method, key_shift=sample.fitting[1].double().mean((0, 2)))
        about = (*about[:2], f"{name}, keys centered", about[3])
        yield Measured(*about, False, errors(sample, centered, exact))


def attend(sample: Sample, method: Any) -> Tensor:
    options = {} if method is None else dict(method=method)
    return attention(*sample.held_out, is_causal=sample.is_causal, enable_gqa=True, **options)


def errors(sample: Sample, method: Any, exact: Tensor) -> tuple[float, ...]:
    draws = [method.redraw(seed) for seed in SEEDS] if isinstance(method, RandomFeatures) else [method]
    wrong = torch.stack([attend(sample, each) - exact for each in draws])
    squares, sizes = (x.double().square().mean(0).sum((0, 2, 3)) for x in (wrong, exact[None]))
    return tuple(round(error, 5) for error in (squares / sizes).sqrt().tolist())


def mean(errors: Sequence[float]) -> float:
    """Return the geometric mean."""
    return float(torch.tensor(errors, dtype=torch.float64).log().mean().exp())


def of(rows: Sequence[Measured], **wanted: Any) -> list[float]:
    """Return the errors of all heads, in the order of layers and heads."""
    mine = [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]
    return [error for row in sorted(mine, key=lambda row: (row.model, row.layer)) for error in row.errors]


def table(rows: Sequence[Measured], model: str) -> str:
    lines = [
        "| method | features | error | fitted | fitted / FAVOR+ | heads worse than FAVOR+ | heads <= 0.05, fitted |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, size in dict.fromkeys((row.method, row.features) for row in rows if row.model == model):
        chosen = dict(model=model, method=name, features=size)
        plain, fitted = of(rows, **chosen, is_fitted=False), of(rows, **chosen, is_fitted=True)
        favor = of(rows, model=model, method=FAVOR, features=size, is_fitted=False)
        cells = [name, f"{size:,}", f"{mean(plain):.3f}", "", "", "", ""]
        if fitted:
            cells[3], cells[6] = f"{mean(fitted):.3f}", f"{sum(error <= GOOD for error in fitted)} of {len(fitted)}"
        if fitted and favor:
            ratios = [new / old for new, old in zip(fitted, favor, strict=True)]
            cells[4], cells[5] = f"{mean(ratios):.3f}", f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def good_heads(rows: Sequence[Measured]) -> str:
    """Return the heads with an error of at most 0.05 after fitting, and by which method."""
    found = [
        f"- {row.model}, layer {row.layer}, head {head}: {row.method}, {row.features:,} features, {error:.3f}"
        for row in rows if row.is_fitted for head, error in enumerate(row.errors) if error <= GOOD
    ]  # fmt: skip
    return "\n".join(found) or "None."


def markdown(rows: Sequence[Measured], date: str) -> str:
    about = (__doc__ or "").split("\n\n")
    parts = [f"# fit, {date}", machine(), about[0], about[2].replace("\n", " ")]
    for model in dict.fromkeys(row.model for row in rows):
        layers = sorted({row.layer for row in rows if row.model == model})
        parts += [f"## {model}, layers {', '.join(map(str, layers))}", table(rows, model)]
    return "\n\n".join([*parts, f"## Heads with an error of at most {GOOD} after fitting", good_heads(rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two layers and 64 features; nothing is written")
    is_quick = parser.parse_args().quick
    warnings.simplefilter("ignore")  # Most of these methods are far outside their range.
    rows: list[Measured] = []
    layers = list(samples(is_quick))
    for name, method in methods(COUNTS[:1] if is_quick else COUNTS):
        own = [row for sample in layers for row in measure(sample, name, method)]
        plain, fitted = (mean(of(own, method=name, is_fitted=is_fitted)) for is_fitted in (False, True))
        print(f"{name}, {own[0].features:,} features: {plain:.3f}, fitted {fitted:.3f}", flush=True)
        rows += own
    if is_quick:
        print(markdown(rows, today()))
    else:
        write_page("fit", markdown(rows, today()), [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
