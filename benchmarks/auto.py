"""Does `Auto` keep its promise? Many inputs, causal and not, and the true error of what it chose, over all rows.

    python benchmarks/auto.py [--inputs 2000] [--activations FILE.safetensors]

Inputs are normal ones of scales 0.01 to 10, clustered ones, ones with outliers among queries, keys or values, those
with a common mean, with values of little spread, and with rare rows that meet a loud key; also, from a file that
benchmarks/pretrained.py --save writes, the activations of a trained encoder.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from results import machine, today, write_page
from rich.progress import track
from torch import Tensor
from torch.nn.functional import normalize

from subquad import Auto, attention

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
    """One input, all of it drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)

    def pick(choices: tuple) -> object:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    n, d = pick(LENGTHS), pick(WIDTHS)
    kind = ("normal", "clustered", "outliers", "common mean", "small spread", "rare rows")[seed % 6]
    scale = math.exp(float(torch.rand(1, generator=generator)) * math.log(1000)) / 100  # 0.01 to 10
    q, k, v = (normal(1, 2, n, d, generator=generator) for _ in range(3))
    q, k = q * scale**0.5, k * scale**0.5
    if kind == "clustered":
        centres = normal(1, 2, 8, d, generator=generator) * (2 * scale) ** 0.5
        for x, spread in ((q, 0.2), (k, 0.2)):
            x.mul_(spread).add_(centres[:, :, torch.randint(8, (n,), generator=generator)])
        v = v * 0.3 + normal(1, 2, 8, d, generator=generator)[:, :, torch.randint(8, (n,), generator=generator)]
    elif kind == "outliers":
        count = int(torch.randint(1, 6, (1,), generator=generator))
        for x in (q, k, v)[: int(torch.randint(1, 4, (1,), generator=generator))]:
            x[:, :, torch.randint(n, (count,), generator=generator)] *= float(pick((5.0, 20.0, 100.0)))
    elif kind == "common mean":
        k = k + normal(1, 2, 1, d, generator=generator) * float(pick((0.5, 2.0, 8.0)))
        v = v + normal(1, 2, 1, d, generator=generator)
    elif kind == "small spread":  # any average is near the mean; a vanishing normaliser is not
        k, v = k + float(pick((0.5, 2.0, 8.0))), 10 + 0.1 * v
        q = q * float(pick((0.0, 0.1, 1.0))) + q[:, :, :1]
    elif kind == "rare rows":  # all of one norm; one in a hundred meets the one loud key head on
        loud = normalize(k[:, :, 5:6], dim=-1)
        q, k[:, :, 5:6] = 3 * normalize(q, dim=-1), float(pick((5.0, 20.0))) * loud
        q[:, :, 50::100] = 3 * loud
    return kind, q, k, v


def activations(path: Path) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Layers of a trained encoder, whole and repeated, so that they are long enough for a choice."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the promise of subquad.Auto.")
    parser.add_argument("--inputs", type=int, default=2000, help="how many drawn inputs (%(default)s)")
    parser.add_argument("--activations", type=Path, help="a file of benchmarks/pretrained.py --save")
    options = parser.parse_args()
    found: list[Outcome] = []
    for seed in track(range(options.inputs), "drawn inputs"):
        found += outcomes(*inputs(seed))
    if options.activations:
        for case in track(list(activations(options.activations)), "activations"):
            found += outcomes(*case)
    write_page(
        "auto",
        f"# Auto, {today()}\n\n{machine()}\n\n{report(found)}\n",
        [asdict(o) for o in found if not o.error <= o.promise],
    )  # the broken ones


def report(found: list[Outcome]) -> str:
    lines = [
        "| inputs | promise | calls | linear | broken | nearest to the promise | methods |",
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
    lines.append(f"\n{len(found)} calls in all; the promise was broken in {broken} of them.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
