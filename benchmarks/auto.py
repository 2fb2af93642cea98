"""Check whether `Auto` stays within its error budget, and what its choice costs, on many inputs.

    python benchmarks/auto.py [--inputs 250] [--activations FILE.safetensors] [--layers FILE.pt]

Inputs are normally distributed with scales 0.01 to 10, clustered, with outliers among queries, keys or values, with a
common mean, with values of little spread, or with rare rows that match a large key; also the activations of a trained
encoder, from a file written by benchmarks/pretrained.py --save. Each input is used 8 times: causal and not, with four
error budgets. The error is computed over all rows. The cost of the choice is not limited to a tenth of the call here,
because such short calls would then all be exact.

--layers reads the activations of a trained decoder, {layer: (query, key, value)} as written by torch.save, and times
exact attention, `Auto`, and `Auto(remember=True)` in turn, with the error of each.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from results import machine, today, write_page
from rich.progress import track
from torch import Tensor
from torch.nn.functional import normalize

from subquad import Auto, Exact, attention
from subquad.methods import label_of
from subquad.planning import auto as planning_auto

PROMISES = (0.5, 0.1, 0.01, 0.001)
WIDTHS, LENGTHS = (4, 8, 16), (512, 1024, 2048)


@dataclass(frozen=True)
class Outcome:
    kind: str
    is_causal: bool
    promise: float
    method: str
    known_by: str
    error: float


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def inputs(seed: int) -> tuple[str, Tensor, Tensor, Tensor]:
    """Draw one input from the seed."""
    generator = torch.Generator().manual_seed(seed)

    def pick(choices: tuple) -> object:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    n, d = pick(LENGTHS), pick(WIDTHS)
    kind = ("normal", "clustered", "outliers", "common mean", "small spread", "rare rows")[seed % 6]
    scale = math.exp(float(torch.rand(1, generator=generator)) * math.log(1000)) / 100  # 0.01 to 10
    q, k, v = (normal(1, 2, n, d, generator=generator) for _ in range(3))
    q, k = q * scale**0.5, k * scale**0.5
    if kind == "clustered":
        centers = normal(1, 2, 8, d, generator=generator) * (2 * scale) ** 0.5
        for x, spread in ((q, 0.2), (k, 0.2)):
            x.mul_(spread).add_(centers[:, :, torch.randint(8, (n,), generator=generator)])
        v = v * 0.3 + normal(1, 2, 8, d, generator=generator)[:, :, torch.randint(8, (n,), generator=generator)]
    elif kind == "outliers":
        count = int(torch.randint(1, 6, (1,), generator=generator))
        for x in (q, k, v)[: int(torch.randint(1, 4, (1,), generator=generator))]:
            x[:, :, torch.randint(n, (count,), generator=generator)] *= float(pick((5.0, 20.0, 100.0)))
    elif kind == "common mean":
        k = k + normal(1, 2, 1, d, generator=generator) * float(pick((0.5, 2.0, 8.0)))
        v = v + normal(1, 2, 1, d, generator=generator)
    elif kind == "small spread":  # Any average is close to the mean, unless the normalizer vanishes.
        k, v = k + float(pick((0.5, 2.0, 8.0))), 10 + 0.1 * v
        q = q * float(pick((0.0, 0.1, 1.0))) + q[:, :, :1]
    elif kind == "rare rows":  # equal norms; one row in a hundred is parallel to the one large key
        loud = normalize(k[:, :, 5:6], dim=-1)
        q, k[:, :, 5:6] = 3 * normalize(q, dim=-1), float(pick((5.0, 20.0))) * loud
        q[:, :, 50::100] = 3 * loud
    return kind, q, k, v


def activations(path: Path) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Return layers of a trained encoder, whole and repeated, so that they are long enough for a choice."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    for layer in sorted({name.partition(".")[0] for name in tensors}):
        q, k, v = (tensors[f"{layer}.{part}"].float() for part in ("query", "key", "value"))
        for head in range(q.shape[1]):
            for factor in (1.0, 0.3, 0.1, 0.03):
                parts = [x[:, head : head + 1].repeat(1, 1, 4, 1) for x in (q * factor, k, v)]
                yield f"{layer}", *parts


@torch.no_grad()
def outcomes(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Outcome]:
    for is_causal in (True, False):
        exact = attention(q.double(), k.double(), v.double(), is_causal=is_causal)
        for promise in PROMISES:
            choice = Auto(max_error=promise).choose(q, k, v, is_causal=is_causal)
            output = attention(q, k, v, is_causal=is_causal, method=choice.method).double()
            error = float((output - exact).norm() / exact.norm())
            method = type(choice.method).__name__ + str(getattr(choice.method, "degree", ""))
            yield Outcome(kind, is_causal, promise, method, choice.error.known_by, error)


@dataclass(frozen=True)
class Timing:
    layer: str
    length: int
    promise: float
    method: str
    exact_ms: float
    auto_ms: float
    remembering_ms: float
    error: float


@torch.no_grad()
def timings(path: Path, lengths: list[int], turns: int) -> Iterator[Timing]:
    """Time the causal attention of one layer; the best of several rounds counts."""
    layers = torch.load(path, mmap=True, weights_only=True)
    for layer, length in ((layer, n) for n in lengths for layer in layers):
        q, k, v = (x[:, :, :length].float().contiguous() for x in layers[layer])
        options = dict(is_causal=True, enable_gqa=True)
        for promise in (0.2, 0.1, 0.05):
            remembering = Auto(promise, remember=True)
            methods = {"exact": Exact(), "auto": Auto(promise), "remembering": remembering}
            best = dict.fromkeys(methods, math.inf)
            for _ in range(turns):
                for name, method in methods.items():
                    begin = time.perf_counter()
                    attention(q, k, v, method=method, **options)
                    best[name] = min(best[name], time.perf_counter() - begin)
            exact, output = (attention(q, k, v, method=method, **options) for method in (Exact(), Auto(promise)))
            error = float((output - exact).norm() / exact.norm())
            chosen = label_of(Auto(promise).choose(q, k, v, **options).method)
            yield Timing(str(layer), length, promise, chosen, *(1000 * x for x in best.values()), error)


def timing_report(found: list[Timing]) -> str:
    lines = [
        "| layer | tokens | budget | choice | exact | auto | remembering | auto/exact | remembering/exact | error |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for t in found:
        lines.append(
            f"| {t.layer} | {t.length:,} | {t.promise:g} | {t.method} | {t.exact_ms:.0f} ms | {t.auto_ms:.0f} ms | "
            f"{t.remembering_ms:.0f} ms | {t.auto_ms / t.exact_ms:.2f} | {t.remembering_ms / t.exact_ms:.2f} | "
            f"{t.error:.3f} |"
        )
    faster = sum(t.method != "Exact()" for t in found)
    worst = max((t.auto_ms / t.exact_ms for t in found if t.method == "Exact()"), default=math.nan)
    lines.append(
        f"\nA faster method was chosen in {faster} of {len(found)} calls. If the choice was exact, Auto took at most "
        f"{worst:.2f} times as long as exact attention. Error budgets exceeded: "
        f"{sum(t.error > t.promise for t in found)}."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the error budget of subquad.Auto, and time it.")
    parser.add_argument("--layers", type=Path, help="activations of a trained decoder, to time")
    parser.add_argument(
        "--lengths", default="8192,16384", help="comma-separated numbers of tokens to use (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=5, help="number of timings of each call (default: %(default)s)")
    parser.add_argument("--inputs", type=int, default=250, help="number of random inputs (default: %(default)s)")
    parser.add_argument("--activations", type=Path, help="file written by benchmarks/pretrained.py --save")
    options = parser.parse_args()
    timed: list[Timing] = []
    if options.layers:
        lengths = [int(text) for text in options.lengths.split(",")]
        timed = list(timings(options.layers, lengths, options.turns))
    planning_auto.MAX_ASKING_SHARE = math.inf
    found: list[Outcome] = []
    for seed in track(range(options.inputs), "drawn inputs"):
        found += outcomes(*inputs(seed))
    if options.activations:
        for case in track(list(activations(options.activations)), "activations"):
            found += outcomes(*case)
    write_page(
        "auto",
        f"# Auto, {today()}\n\n{machine()}\n\n{timing_report(timed)}\n\n{report(found)}\n",
        {"timings": [asdict(t) for t in timed], "broken": [asdict(o) for o in found if not o.error <= o.promise]},
    )


def report(found: list[Outcome]) -> str:
    lines = [
        "| inputs | budget | calls | approximated | violations | largest error / budget | methods |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    kinds = sorted({o.kind for o in found})
    for kind in kinds:
        for promise in PROMISES:
            own = [o for o in found if o.kind == kind and o.promise == promise]
            linear = [o for o in own if o.method != "Exact"]
            broken = sum(not o.error <= promise for o in own)
            worst = max((o.error / promise for o in linear), default=0.0)
            methods = ", ".join(f"{name} {count}" for name, count in Counter(o.method for o in linear).most_common())
            share = len(linear) / len(own)
            lines.append(f"| {kind} | {promise:g} | {len(own)} | {share:.1%} | {broken} | {worst:.2f} | {methods} |")
    broken = sum(not o.error <= o.promise for o in found)
    lines.append(f"\n{len(found)} calls in total; the error budget was exceeded in {broken} of them.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
