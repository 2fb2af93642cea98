"""`subquad plan --model`: which layers of a trained model can use which method, measured on a text.

Each layer's queries, keys and values are a sample for `subquad.plan`. Every method that it measures then runs on the
whole layer, head by head:

    relative error = |out - exact| / |exact|     of all heads of a layer together, and of each head

A layer can use a method whose error, times a safety margin for unseen texts, is within the error budget. Errors are
those of one layer while the others are exact; if several layers change, their errors add up.

Axes: h query heads, n tokens, d width.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import subquad
from subquad import Exact
from subquad.methods import label_of
from subquad.methods.error_estimate import check_max_error
from subquad.planning import DEFAULT_MAX_ERROR, SAMPLE_MARGIN, Shape, predicted_seconds
from subquad.planning.calibration_file import calibration
from subquad_lab import UsageError
from subquad_lab.commands.plan import calibration_shown, in_options
from subquad_lab.figures.tables import Table
from subquad_lab.models.pretrained import Layer, load, read, tokenized, watch
from subquad_lab.system.text import say

LENGTHS = (4096, 16_384, 65_536)  # at which speeds are predicted
SAMPLED_ROWS = 256  # per head, for the range of its logits
MAX_ROUNDING_ERROR = 1e-3  # relative difference that another order of operations may cause
NAMES = [f"{length // 1024}k" for length in LENGTHS]
COLUMNS = ("layer", "logits", "approximation", "error", "within budget", "heads within", *NAMES)
NOTE = """\
logits: range of the scaled logits on sampled rows. error: |out - exact| / |exact| on this text; above 1, the output is
worse than zeros.
approximation: the fastest method whose error, times a safety margin of {margin:g}, is within {max_error:g}, or else the
most accurate one.
{names}: predicted speed of the layer's attention relative to exact attention, assuming that longer texts have similar
logits. A window covers a smaller part of a longer text, so measure it at that length too."""
STRICT = """\
An error of {max_error:g} in each layer is stricter than perplexity requires: with Multipole() in all 30 layers of
SmolLM2-135M, each with an error of about 0.03 (too large for 0.05 with the safety margin), the perplexity of 4,096
tokens rises by 0.8 %. Try --max-error 0.1, and measure the perplexity of your own model."""


@dataclass(frozen=True)
class Finding:
    """For a layer or a head: the fastest method within the error budget, or else the most accurate one."""

    logits: tuple[float, float]
    method: Any
    error: float
    is_kept: bool


@dataclass(frozen=True)
class LayerPlan:
    """The findings for a layer. `whole` is None if it is not plain attention, such as one with a window or a bias."""

    whole: Finding | None
    heads: tuple[Finding, ...] = ()
    seconds: tuple[tuple[float, float], ...] = ()  # at LENGTHS: exact, and the method if it is within budget


def run(model: str | None, text: str | None, tokens: int | None, max_error: float | None, show_all: bool) -> None:
    """Plan, then print a row for each layer, and with `show_all` one for each head."""
    if model is None or text is None:
        missing = "--text FILE" if text is None else "--model PATH"
        raise UsageError(f"--model: expected a model and a text for it to read, got no {missing}")
    max_error = DEFAULT_MAX_ERROR if max_error is None else max_error
    try:
        check_max_error(max_error)
    except ValueError as error:
        raise UsageError(in_options(str(error))) from error
    content = read(text)
    loaded, tokenizer = load(model)
    sequence = tokenized(content, loaded, tokenizer, tokens)
    try:
        with calibration_shown() as progress:
            machine = calibration(progress=progress)
    except PermissionError as error:  # The cache folder is not writable.
        raise UsageError(error) from error
    layers = plans(loaded, sequence, max_error)
    report(layers, sequence.shape[1], max_error, show_all)
    if machine.note:
        say(*machine.note.strip().splitlines())


def plans(model: Any, tokens: Tensor, max_error: float) -> list[LayerPlan]:
    """Plan all layers, with a progress bar on a terminal."""
    found: list[LayerPlan] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring the layers", total=getattr(model.config, "num_hidden_layers", None))

        def see(layer: Layer) -> None:
            found.append(plan_layer(layer, max_error))
            bar.advance(task)

        watch(model, tokens, see)
    if not found:
        raise UsageError(f"--model: {type(model).__name__} does not use the transformers attention interface, so "
                         "nothing "
                         "can be measured")  # fmt: skip
    return found


def plan_layer(layer: Layer, max_error: float) -> LayerPlan:
    """Plan one layer."""
    query, key, value = layer[:3]
    call = partial(subquad.attention, query, key, value, is_causal=layer.is_causal, scale=layer.scale, enable_gqa=True)
    exact = call(method=Exact())
    if not torch.dist(exact, layer.output) <= MAX_ROUNDING_ERROR * exact.norm():
        return LayerPlan(None)
    made = subquad.plan(
        query_length=LENGTHS[-1], sample=(query, key, value), is_causal=layer.is_causal, scale=layer.scale,
        max_error=max_error,
    )  # fmt: skip
    # Fastest first. Errors that `plan` only infers for other numbers of features are left out, except of its choice.
    methods = [c.method for c in made.candidates if c.is_chosen_form and c.error.known_by == "sample"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*weights can be negative")  # The errors are measured here.
        squares = torch.stack([_squares(call(method=method) - exact) for method in methods])  # (methods, h)
    norms = _squares(exact)
    allowed = max_error / SAMPLE_MARGIN

    def judge(errors: Tensor, logits: tuple[float, float]) -> Finding:
        kept = [i for i, error in enumerate(errors.tolist()) if error <= allowed]
        first = kept[0] if kept else int(errors.nan_to_num(torch.inf).argmin())
        return Finding(logits, methods[first], float(errors[first]), bool(kept))

    ranges = [*_ranges(layer)]
    heads = tuple(judge((squares[:, h] / norms[h]).sqrt(), ranges[h]) for h in range(len(ranges)))
    lows, highs = zip(*ranges, strict=True)
    whole = judge((squares.sum(1) / norms.sum()).sqrt(), (min(lows), max(highs)))
    shapes = [
        Shape.of(query_length=n, head_dim=query.shape[-1], value_dim=value.shape[-1], heads=query.shape[-3],
                 key_heads=key.shape[-3], is_causal=layer.is_causal)
        for n in LENGTHS
    ]  # fmt: skip
    taken = whole.method if whole.is_kept else Exact()
    return LayerPlan(whole, heads, tuple((predicted_seconds(Exact(), s), predicted_seconds(taken, s)) for s in shapes))


def _squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each head, (h,)."""
    return x.double().square().sum((0, 2, 3))


def _ranges(layer: Layer) -> Iterator[tuple[float, float]]:
    """Yield the range of the logits of each head."""
    group = layer.query.shape[-3] // layer.key.shape[-3]
    for h in range(layer.query.shape[-3]):
        query, key = layer.query[:, h : h + 1], layer.key[:, h // group : h // group + 1]
        yield subquad.logit_range(query, key, is_causal=layer.is_causal, scale=layer.scale, rows=SAMPLED_ROWS)


def rows(layers: Sequence[LayerPlan], show_all: bool) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    for number, layer in enumerate(layers):
        if layer.whole is None:
            yield str(number), "", "not plain attention", "", "no", *[""] * (1 + len(LENGTHS))
            continue
        speeds = [speed(exact / taken) if layer.whole.is_kept else "" for exact, taken in layer.seconds]
        able = f"{sum(head.is_kept for head in layer.heads)} of {len(layer.heads)}"
        yield str(number), *cells(layer.whole), able, *speeds
        if show_all:
            for h, head in enumerate(layer.heads):
                yield f"{number}.{h}", *cells(head), *[""] * (1 + len(LENGTHS))


def cells(found: Finding) -> tuple[str, ...]:
    low, high = found.logits
    return f"{low:.1f} .. {high:.1f}", label_of(found.method), f"{found.error:.2g}", "yes" if found.is_kept else "no"


def speed(ratio: float) -> str:
    """Format a ratio with two digits, never in scientific notation."""
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def conclusion(layers: Sequence[LayerPlan], max_error: float) -> str:
    """Return a one- or two-sentence summary of the findings."""
    plain = [layer for layer in layers if layer.whole is not None]
    kept = [layer for layer in plain if layer.whole is not None and layer.whole.is_kept]
    heads = [head.is_kept for layer in plain for head in layer.heads]
    first = (
        f"{len(kept)} of {len(layers)} layers have an approximation within {max_error:g}; considered separately, "
        f"{sum(heads)} of {len(heads)} heads do."
    )
    if not kept:
        return f"{first} Keep exact attention."
    together = [
        sum(exact for exact, _ in of) / sum(min(both) for both in of)  # A layer stays exact where that is faster.
        for of in zip(*(layer.seconds for layer in plain), strict=True)
    ]
    speeds = ", ".join(f"{speed(ratio)} at {name}" for ratio, name in zip(together, NAMES, strict=True))
    return f"{first} With them, the attention of all layers together runs at {speeds} the speed of exact attention."


def report(layers: Sequence[LayerPlan], length: int, max_error: float, show_all: bool) -> None:
    """Print a table, a note and a conclusion."""
    title = f"{len(layers)} layers on a text of {length:,} tokens"
    note = NOTE.format(margin=SAMPLE_MARGIN, max_error=max_error, names=", ".join(NAMES))
    lines = list(rows(layers, show_all))
    Table(COLUMNS, lines, title, {i: "bold" for i, line in enumerate(lines) if line[4] == "yes"}).print()
    say(*note.splitlines(), *conclusion(layers, max_error).splitlines())
    if max_error <= DEFAULT_MAX_ERROR and any(layer.whole is not None and not layer.whole.is_kept for layer in layers):
        say(*STRICT.format(max_error=max_error).splitlines())
