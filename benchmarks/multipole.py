"""Benchmark Multipole on activations of a trained decoder: time and memory compared to SDPA, and error by cost.

    python benchmarks/multipole.py [--longest N] [--quick]

Queries, keys and values come from some layers of SmolLM2 (`decoder.py`) on texts of 8,192 tokens, its maximum; longer
inputs concatenate several of them. Causal, float32, all threads.

    share    keys and pseudo-keys that a query reads, as a fraction of those that exact attention reads
    error    |out - exact| / |exact| over sampled rows of all heads

Axes: h heads, n tokens, d width.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from statistics import geometric_mean, mean
from typing import Any

import results
import torch
from decoder import capture, corpus, load
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import subquad
from subquad import Decoder, Multipole
from subquad.planning.multipole_cost import met
from subquad.planning.shape import Shape
from subquad_lab.system.timing import in_turn

LAYERS, PIECE = (3, 11, 19), 8192
LENGTHS, CURVE = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536), 4096  # tokens
SETTINGS = [replace(Multipole(), **changed) for changed in (
    {}, {"top": 0}, {"top": 4}, {"top": 8}, {"top": 24}, {"top": 32}, {"top": 64}, {"window": 16}, {"window": 128},
    {"window": 256}, {"block": 8}, {"block": 8, "top": 32}, {"block": 8, "top": 64},
)]  # fmt: skip

Inputs = tuple[Tensor, Tensor, Tensor]  # (1, 9, n, d), (1, 3, n, d), (1, 3, n, d)


@dataclass(frozen=True)
class Speed:
    """Means over the layers, geometric for the factors; bytes in addition to the inputs."""

    length: int
    sdpa_ms: float
    multipole_ms: float
    times_as_fast: float
    error: float
    multipole_bytes: int


@dataclass(frozen=True)
class Step:
    """One decoding step after a context of this length."""

    length: int
    sdpa_us: float
    multipole_us: float
    times_as_fast: float


@dataclass(frozen=True)
class Setting:
    """Mean error over the layers."""

    method: str
    share: float
    error: float


def captured(longest: int) -> dict[int, Inputs]:
    """Return `longest` tokens of each layer."""
    model, tokenizer = load()
    model.model.layers = model.model.layers[: max(LAYERS) + 1]  # Later layers are not used.
    tokens = corpus(tokenizer, longest)
    pieces = []
    for number, piece in enumerate(tokens.split(PIECE, 1)):
        print(f"reading, {number * PIECE:,} of {longest:,} tokens", flush=True)
        pieces.append(capture(model, piece, LAYERS))
    joined = lambda layer, i: torch.cat([piece[layer][i] for piece in pieces], 2)
    return {layer: (joined(layer, 0), joined(layer, 1), joined(layer, 2)) for layer in LAYERS}


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def by(method: Multipole, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return subquad.attention(q, k, v, is_causal=True, enable_gqa=True, method=method)


def error(method: Multipole, inputs: Inputs) -> float:
    found = subquad.measure_error(*inputs, is_causal=True, enable_gqa=True, method=method, rows=64).relative
    return float("nan") if found is None else found


MEMORY = """
import sys, torch, subquad
from subquad_lab.system.timing import peak_bytes
q, k, v = (torch.randn(1, heads, int(sys.argv[1]), 64) for heads in (9, 3, 3))
with torch.no_grad():
    print(peak_bytes(lambda: subquad.attention(q, k, v, is_causal=True, enable_gqa=True, method="multipole")))
"""


def memory(length: int) -> int:
    """Return the peak bytes in addition to the inputs, in a new process."""
    command = [sys.executable, "-c", MEMORY, str(length)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def timed(calls: dict[str, Callable[[], object]], rounds: int, at_most: float) -> tuple[float, float]:
    times = in_turn(calls, rounds, 0.3, at_most)
    return times["sdpa"], times["multipole"]


@torch.no_grad()
def speed(layers: dict[int, Inputs], length: int) -> Speed:
    times, errors = [], []
    for whole in layers.values():
        q, k, v = (x[:, :, :length].contiguous() for x in whole)
        calls = {"sdpa": partial(sdpa, q, k, v), "multipole": partial(by, Multipole(), q, k, v)}
        times.append(timed(calls, 3 if length < 20_000 else 1, 60.0))
        errors.append(error(Multipole(), (q, k, v)))
    exact, ours = (1e3 * mean(column) for column in zip(*times, strict=True))
    factor = geometric_mean(a / b for a, b in times)
    found = Speed(length, exact, ours, factor, mean(errors), memory(length))
    print(found, flush=True)
    return found


@torch.no_grad()
def step(layers: dict[int, Inputs], length: int) -> Step:
    times = []
    for whole in layers.values():
        q, k, v = (x[:, :, :length].contiguous() for x in whole)
        _, state = subquad.attention(q, k, v, is_causal=True, enable_gqa=True, method=Multipole(), return_state=True)
        token = [x[:, :, -1:].contiguous() for x in (q, k, v)]
        exact = partial(scaled_dot_product_attention, token[0], k, v, enable_gqa=True)
        times.append(timed({"sdpa": exact, "multipole": partial(Decoder(state, enable_gqa=True), *token)}, 20, 5.0))
    exact_us, ours = (1e6 * mean(column) for column in zip(*times, strict=True))
    found = Step(length, exact_us, ours, geometric_mean(a / b for a, b in times))
    print(found, flush=True)
    return found


def share(method: Multipole, inputs: Inputs) -> float:
    n, width = inputs[0].shape[-2:]
    return met(method, Shape(n, n, width, width, is_causal=True)) / (n * (n + 1) / 2)


def curve(layers: dict[int, Inputs]) -> list[Setting]:
    found = []
    for method in SETTINGS:
        print(method, flush=True)
        parts = [tuple(x[:, :, :CURVE].contiguous() for x in whole) for whole in layers.values()]
        found.append(Setting(str(method), share(method, parts[0]), mean(error(method, part) for part in parts)))
    return found


def drawn(settings: Sequence[Setting]) -> bytes:
    from subquad_lab.figures.plots import axes_of, svg

    figure, (axes,) = axes_of(1)
    axes.plot([x.share for x in settings], [x.error for x in settings], "o", color="0.6")
    axes.plot([settings[0].share], [settings[0].error], "o", color="C3", label="the default")
    pairs = zip(SETTINGS, settings, strict=True)
    tops = sorted((x.share, x.error) for method, x in pairs if replace(method, top=Multipole().top) == Multipole())
    axes.plot(*zip(*tops, strict=True), "-", color="0.6", label="more blocks read")
    axes.set(xlabel="share of the cost of exact attention", ylabel="relative error", ylim=(0, None), xlim=(0, None))
    axes.legend()
    return svg(figure)


def cells(rows: Sequence[Any]) -> str:
    """Return a Markdown table with a column for each field."""
    names = [field.name for field in fields(rows[0])]
    lines = [[name.replace("_", " ") for name in names], ["---:"] * len(names)]
    for row in rows:
        lines.append([f"{x:,}" if isinstance(x, int) else x if isinstance(x, str) else f"{x:.3g}" for x in
                      (getattr(row, name) for name in names)])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure Multipole on real activations and write benchmarks/results/.")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens only, and no curve")
    options = parser.parse_args(arguments)
    longest = LENGTHS[0] if options.quick else options.longest
    layers = captured(longest)
    lengths = [n for n in LENGTHS if n <= longest]
    speeds = [speed(layers, n) for n in lengths]
    steps = [step(layers, n) for n in lengths if n >= 4096 or options.quick]
    settings = [] if options.quick else curve(layers)
    parts = [
        f"# multipole, {results.today()}",
        f"{results.machine()}, {subquad.native.status()}",
        f"{Multipole()} on layers {', '.join(map(str, LAYERS))} of SmolLM2-135M (9 heads of width 64, 3 key heads), "
        "causal, float32; times are the best of several rounds, averaged over the layers.",
        "## Compared to SDPA", cells(speeds), "## One more token", cells(steps),
    ]  # fmt: skip
    if settings:
        name = f"multipole_{results.today()}.svg"
        (results.FOLDER / name).write_bytes(drawn(settings))
        parts += [f"## Error by cost, {CURVE:,} tokens", f"![error by cost]({name})", cells(settings)]
    rows = [{"table": type(x).__name__, **asdict(x)} for x in (*speeds, *steps, *settings)]
    results.write_page("multipole", "\n\n".join(parts) + "\n", rows)


if __name__ == "__main__":
    main()
