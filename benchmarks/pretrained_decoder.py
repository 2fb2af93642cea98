"""Measure the perplexity of a trained decoder with the attention of all layers replaced.

    python benchmarks/pretrained_decoder.py [--texts NAME,NAME] [--transcripts metadata.csv] [--length N] [--quick]

The decoder is SmolLM2-135M-Instruct (`decoder.py`), trained with exact attention; nothing is trained here. Texts of
different kinds come from Python and from installed packages; nothing is downloaded. Each method replaces exact
attention in all 30 layers, so that errors add up. The baseline is a window:

    window and sinks     exact attention to the last 64 keys and the first 4 only

Axes: h heads, n queries of a block, m keys that they attend to, d width.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import exp, inf, log
from pathlib import Path

import results
import torch
from decoder import PACKAGE, Attend, load, perplexity, swapped, texts
from pretrained import finite, grid
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import subquad
from subquad import Exact, Linear, Multipole, RandomFeatures, Separable, Taylor
from subquad_lab.system.timing import peak_bytes

LENGTH, QUICK_LENGTH = 4096, 512  # tokens, without and with --quick
LAST, SINKS, BLOCK = 64, 4, 128  # last keys, first keys, and queries per block
EXACT, WINDOW = "Exact()", f"window of {LAST} and {SINKS} sinks"


def window(query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int) -> Tensor:
    """Attend block by block, so that memory is linear in the length."""
    outputs = []
    for start in range(0, query.shape[-2], BLOCK):
        rows = torch.arange(start, min(start + BLOCK, query.shape[-2]))[:, None]  # (n, 1)
        first = max(0, start - LAST + 1)
        keys = torch.cat([torch.arange(min(SINKS, first)), torch.arange(first, int(rows[-1]) + 1)])  # (m,)
        seen = (keys <= rows) & ((rows - keys < LAST) | (keys < SINKS))
        outputs.append(
            scaled_dot_product_attention(
                query[..., rows[:, 0], :], key[..., keys, :], value[..., keys, :], seen, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(outputs, -2)


def by(method: object) -> Attend:
    return lambda query, key, value, scale, layer: subquad.attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True, method=method
    )


# The compared methods.
METHODS: dict[str, Attend] = {
    EXACT: by(Exact()),
    WINDOW: window,
    "Taylor(2)": by(Taylor(2)),
    "RandomFeatures(256)": by(RandomFeatures(256)),
    "Linear('elu')": by(Linear("elu")),
    "Separable()": by(Separable()),
    "Multipole()": by(Multipole()),
}


@dataclass(frozen=True)
class Row:
    """One text with one method. The seconds of attention are those of all layers together."""

    text: str
    length: int
    method: str
    perplexity: float
    attention_seconds: float
    seconds: float
    peak_bytes: int


def measure(model: nn.Module, name: str, tokens: Tensor) -> Iterator[Row]:
    """Yield a row for each method."""
    for method, attend in METHODS.items():
        spent, found = [0.0], []

        def timed(*inputs: Tensor, attend: Attend = attend, spent: list[float] = spent) -> Tensor:
            begin = time.perf_counter()
            output = attend(*inputs)
            spent[0] += time.perf_counter() - begin
            return output

        with swapped(model, timed):
            begin = time.perf_counter()
            peak = peak_bytes(lambda found=found: found.append(perplexity(model, tokens)))
            seconds = time.perf_counter() - begin
        # Print immediately, because an interrupted run does not write the page.
        print(f"{name}, all layers by {method}: perplexity {found[0]:,.2f}, {seconds:.1f} s", flush=True)
        yield Row(name, tokens.shape[1], method, found[0], spent[0], seconds, peak)


def conclusion(rows: Sequence[Row]) -> str:
    """Return a summary: the factors of the perplexity, as geometric means over the texts."""
    exact = {row.text: row.perplexity for row in rows if row.method == EXACT}
    factors = {
        method: _mean_factor([row.perplexity / exact[row.text] for row in rows if row.method == method])
        for method in dict.fromkeys(row.method for row in rows)
        if method != EXACT
    }
    best = min((method for method in factors if method != WINDOW), key=factors.__getitem__)
    verdict = "which it beats" if factors[best] < factors[WINDOW] else "which it does not beat"
    return (
        f"Without training, the best approximation is {best}: it multiplies the perplexity by {factors[best]:,.3f}, "
        f"the geometric mean over the texts. The window with its sinks, {verdict}, multiplies it by "
        f"{factors[WINDOW]:,.3f}."
    )


def _mean_factor(factors: Sequence[float]) -> float:
    return exp(sum(map(log, factors)) / len(factors)) if all(factor < inf for factor in factors) else inf


def markdown(rows: Sequence[Row]) -> str:
    """Return the whole page."""
    exact = {row.text: row.perplexity for row in rows if row.method == EXACT}
    perplexities: dict[str, list[str]] = {}
    costs: dict[str, list[str]] = {}
    for method in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == method]
        lost = [row.perplexity / exact[row.text] - 1 for row in mine]
        perplexities[method] = [*(f"{row.perplexity:,.2f}" for row in mine), f"{sum(lost) / len(lost):+,.2%}",
                                f"{max(lost):+,.2%}"]  # fmt: skip
        costs[method] = [f"{min(row.attention_seconds for row in mine):.2f} s",
                         f"{min(row.seconds for row in mine):.2f} s",
                         f"{max(row.peak_bytes for row in mine) / 2**20:,.0f} MiB"]  # fmt: skip
    parts = [
        f"# pretrained decoder, {results.today()}",
        f"{results.machine()}, transformers {version('transformers')}, {PACKAGE} {version(PACKAGE)}",
        "SmolLM2-135M-Instruct, 4-bit weights converted to float32, trained with exact attention; nothing is trained "
        f"here. Perplexity of {rows[0].length:,} tokens of each text with all 30 layers replaced.",
        "## Perplexity",
        grid("method", [*exact, "more, on average", "at worst"], perplexities),
        "## Time and memory of one text",
        grid("method", ["attention, all layers", "whole pass", "peak memory"], costs),
        "Best time over the texts, which have the same length; peak memory of a pass in addition to the model, "
        "including the logits of a few hundred tokens. Memory that an earlier pass left to the process does not count.",
        "## Conclusion",
        conclusion(rows),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Swap the attention of SmolLM2 and write benchmarks/results/.")
    parser.add_argument("--texts", metavar="NAMES", help="comma-separated names of texts (default: all)")
    parser.add_argument("--transcripts", type=Path, metavar="FILE", help="LJSpeech's metadata.csv, as one more text")
    parser.add_argument(
        "--length", type=int, default=LENGTH, metavar="N", help=f"tokens of each text (default: {LENGTH})"
    )
    parser.add_argument("--quick", action="store_true", help=f"one text of {QUICK_LENGTH} tokens")
    options = parser.parse_args(arguments)

    model, tokenizer = load()
    found = texts(tokenizer, QUICK_LENGTH if options.quick else options.length, options.transcripts)
    if not found:
        parser.error(f"--length: no text has {options.length:,} tokens")
    names = list(found) if options.texts is None else options.texts.split(",")
    if not found.keys() >= set(names):
        parser.error(f"--texts: expected some of {', '.join(found)}, got {options.texts}")
    rows = [row for name in (names[:1] if options.quick else names) for row in measure(model, name, found[name])]
    results.write_page("pretrained_decoder", markdown(rows), [finite(asdict(row)) for row in rows])


if __name__ == "__main__":
    main()
