"""Benchmark the native kernels against the machine's limit, against SDPA, and one thread against two.

    python benchmarks/native.py [--quick]

The limit is torch.mm of 1024 x 1024 matrices in the same round. Useful FLOPs are those of the products with features: 4
M Dv per token and head forward, 12 M Dv forward and backward, with M features and values of width Dv; for random
features also the projections. Methods are called in turn on the same tensors, and the best of several rounds counts.
"""

import argparse
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from results import FOLDER, machine, today, write_page
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from subquad import Decoder, Linear, RandomFeatures, Separable, Taylor, attention, native
from subquad_lab.figures.plots import axes_of, svg
from subquad_lab.system.timing import in_turn

# method, heads, length, width, value width, wanted share of the peak: forward, forward and backward
SHARES = [
    (Taylor(2), 8, 4096, 64, 64, 65, 45), (Taylor(2), 8, 8192, 32, 64, 60, 40), (Taylor(2), 8, 16384, 16, 64, 40, 28),
    (Taylor(3), 8, 4096, 16, 64, 55, None), (RandomFeatures(256), 8, 8192, 64, 64, 50, 40),
]  # fmt: skip
RIVALS = {
    "Taylor(2)": Taylor(2), "RandomFeatures(256)": RandomFeatures(256), "elu": Linear("elu"), "Separable": Separable(),
}  # fmt: skip
# heads, length, width, value width: of fitted methods against plain ones
FITTED_SIZES = [(8, 4096, 64, 64), (8, 16384, 16, 64), (32, 1024, 16, 16)]
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
CONTEXT = 32_768


def inputs(heads: int, length: int, width: int, values: int, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, w) for w in (width, width, values)]
    return [torch.randn(s, generator=generator).mul_(0.5).requires_grad_(grad) for s in shapes]


def forward(attend: Callable[..., Tensor], tensors: list[Tensor]) -> object:
    with torch.no_grad():
        return attend(*tensors)


def both(attend: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> object:
    return torch.autograd.grad(attend(*tensors), tensors, grad)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def by(method: Any) -> Callable[..., Tensor]:
    return partial(attention, is_causal=True, method=method)


def short(method: Any) -> str:
    return str(method).split(", ")[0].rstrip(")") + ")"


def useful(method: Any, heads: int, length: int, width: int, values: int) -> float:
    projected = 4 * method.size(width) * width if isinstance(method, RandomFeatures) else 0
    return heads * length * (4 * method.size(width) * values + projected)


def shares(rounds: float) -> list[dict[str, Any]]:
    a, b = torch.randn(2, 1024, 1024).unbind()
    rows = []
    for threads, (method, heads, length, width, values, *wanted) in product((1, 2), SHARES):
        torch.set_num_threads(threads)
        tensors, grad = inputs(heads, length, width, values, grad=True), torch.randn(1, heads, length, values)
        best = in_turn({
            "peak": lambda: [torch.mm(a, b) for _ in range(5)],
            "forward": partial(forward, by(method), tensors),
            "both": partial(both, by(method), tensors, grad),
        }, 3, rounds, 4 * rounds)  # fmt: skip
        peak, work = 5 * 2 * 1024**3 / best["peak"], useful(method, heads, length, width, values)
        rows.append({
            "method": short(method), "width": width, "length": length, "threads": threads,
            "peak": peak / 1e9, "forward": 100 * work / best["forward"] / peak, "wanted": wanted[0],
            "both": 300 * work / best["both"] / peak, "wanted both": wanted[1],
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def against_sdpa(heads: int, width: int, rounds: float, longest: int) -> list[dict[str, Any]]:
    torch.set_num_threads(2)
    rows = []
    for length in (n for n in LENGTHS if n <= longest):
        tensors = inputs(heads, length, width, width)
        calls = {"SDPA": partial(forward, sdpa, tensors)}
        calls |= {name: partial(forward, by(method), tensors) for name, method in RIVALS.items()}
        long = length > 16384  # A call of SDPA then takes a minute.
        for call in () if long else calls.values():
            call()
        best = in_turn(calls, 1 if long else 3, rounds, 4 * rounds)
        rows.append({"heads": heads, "width": width, "length": length, **best})
        print({name: round(best["SDPA"] / t, 2) for name, t in best.items()}, length, flush=True)
    return rows


def steps(rounds: float) -> list[dict[str, Any]]:
    torch.set_num_threads(2)
    rows = []
    for method, heads, width in (
        (RandomFeatures(256), 8, 64),
        (Taylor(2), 32, 16),
        (Linear("elu"), 8, 64),
        (Taylor(2), 8, 64),
    ):
        q, k, v = inputs(heads, CONTEXT, width, width)
        _, state = attention(
            q[:, :, :100], k[:, :, :100], v[:, :, :100], is_causal=True, method=method, return_state=True
        )
        decoder, tokens = Decoder(state), [[x[:, :, i : i + 1].contiguous() for x in (q, k, v)] for i in range(32)]
        best = in_turn({
            "SDPA": lambda q=tokens, k=k, v=v: [scaled_dot_product_attention(token[0], k, v) for token in q],
            "step": lambda q=tokens, decoder=decoder: [decoder(*token) for token in q],
        }, 5, rounds, 4 * rounds)  # fmt: skip
        rows.append({"method": short(method), "heads": heads, "width": width,
                     "SDPA": best["SDPA"] / 32, "step": best["step"] / 32})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def with_vectors(method: Any, heads: int, width: int) -> Any:
    """Return the method with coordinates for each head, as `subquad.fit` sets them."""
    first, second = torch.randn(2, heads, width, generator=torch.Generator().manual_seed(1)).mul_(0.3).unbind()
    if isinstance(method, Taylor):
        return replace(method, key_shift=first, query_shift=second)
    return replace(method, key_shift=first, balance=second.exp(), scale=-0.03)


def fitted(rounds: float) -> list[dict[str, Any]]:
    torch.set_num_threads(2)
    rows = []
    for method, (heads, length, width, values) in product((Taylor(2), RandomFeatures(256)), FITTED_SIZES):
        tensors, grad = inputs(heads, length, width, values, grad=True), torch.randn(1, heads, length, values)
        pair = {"plain": method, "fitted": with_vectors(method, heads, width)}
        calls: dict[str, Callable[[], object]] = {}
        for name, each in pair.items():
            calls[name] = partial(forward, by(each), tensors)
            calls[f"{name} both"] = partial(both, by(each), tensors, grad)
        best = in_turn(calls, 5, rounds, 4 * rounds)
        rows.append({"method": short(method), "heads": heads, "length": length, "width": width, **best})
        print(rows[-1], flush=True)
    return rows


def two_threads(rounds: float) -> list[dict[str, Any]]:
    rows = []
    for heads, length, width in ((8, 8192, 64), (1, 65536, 64), (8, 8192, 16), (1, 65536, 16)):
        tensors, best = inputs(heads, length, width, 64), {}

        def call(threads: int, tensors: list[Tensor] = tensors) -> None:
            torch.set_num_threads(threads)
            forward(by(Taylor(2)), tensors)

        best = in_turn({"1": partial(call, 1), "2": partial(call, 2)}, 3, rounds, 4 * rounds)
        rows.append({"heads": heads, "length": length, "width": width, **best})
        print(rows[-1], flush=True)
    return rows


def drawn(rows: list[dict[str, Any]]) -> bytes:
    figure, (axes,) = axes_of(1)
    for name in ("SDPA", *RIVALS):
        style = "k--" if name == "SDPA" else "o-"
        axes.loglog([r["length"] for r in rows], [1000 * r[name] for r in rows], style, markersize=3, label=name)
    axes.set(xlabel="length in tokens", ylabel="time of a call in milliseconds",
             title=f"causal, {rows[0]['heads']} heads of width {rows[0]['width']}, float32, two threads")  # fmt: skip
    axes.legend()
    return svg(figure)


def page(found: dict[str, Any], picture: str) -> str:
    percent = lambda share, wanted: f"{share:.0f} %" + ("" if wanted is None else f" (wanted {wanted} %)")
    lines = [
        f"# Native kernels, {today()}", machine(), str(native.status()),
        "## Share of the matrix-multiply peak", "",
        "| method | width | length | threads | peak, GFLOP/s | forward | forward and backward |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(f"| {r['method']} | {r['width']} | {r['length']:,} | {r['threads']} | {r['peak']:.0f} | "
          f"{percent(r['forward'], r['wanted'])} | {percent(r['both'], r['wanted both'])} |" for r in found["shares"]),
    ]  # fmt: skip
    for rows in found["against SDPA"]:
        lines += [
            "",
            f"## Against SDPA: {rows[0]['heads']} heads of width {rows[0]['width']}, causal, forward, two threads",
            "",
        ]
        lines += [f"![time against length]({picture})", ""] if rows[0]["width"] == 64 else []
        lines += [f"| length | SDPA | {' | '.join(RIVALS)} |", f"|---:|---:|{'---:|' * len(RIVALS)}"]
        for r in rows:
            cells = [f"{1000 * r[name]:,.2f} ms ({r['SDPA'] / r[name]:.2f}x)" for name in RIVALS]
            lines.append(f"| {r['length']:,} | {1000 * r['SDPA']:,.2f} ms | {' | '.join(cells)} |")
    lines += [
        "",
        f"## A decoding step after {CONTEXT:,} tokens, in place",
        "",
        "| method | heads x width | SDPA | step | |",
        "|---|---|---:|---:|---:|",
    ]
    lines += [f"| {r['method']} | {r['heads']} x {r['width']} | {1e6 * r['SDPA']:,.0f} us | {1e6 * r['step']:.0f} us | "
              f"{r['SDPA'] / r['step']:.0f}x |" for r in found["steps"]]  # fmt: skip
    lines += [
        "",
        "## Fitted methods, causal, two threads: speed over that of the plain method",
        "",
        "| method | heads x length x width | forward | forward and backward |",
        "|---|---|---:|---:|",
    ]
    lines += [f"| {r['method']} | {r['heads']} x {r['length']:,} x {r['width']} | {r['plain'] / r['fitted']:.2f} | "
              f"{r['plain both'] / r['fitted both']:.2f} |" for r in found["fitted"]]  # fmt: skip
    lines += [
        "",
        "## Two threads against one, Taylor(2), values of width 64",
        "",
        "| heads x length x width | one | two | |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {r['heads']} x {r['length']:,} x {r['width']} | {r['1']:.3f} s | {r['2']:.3f} s | "
              f"{r['1'] / r['2']:.2f}x |" for r in found["two threads"]]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="The native kernels against the machine's limit.")
    parser.add_argument("--quick", action="store_true", help="short lengths and few rounds")
    quick = parser.parse_args().quick
    if not native.status().available:
        parser.exit(2, f"native: expected compiled kernels, got {native.status()}\n")
    rounds, longest = (0.5, 2048) if quick else (2.0, LENGTHS[-1])
    found = {
        "shares": shares(rounds),
        "against SDPA": [against_sdpa(8, 64, rounds, longest), against_sdpa(32, 16, rounds, min(longest, 16384))],
        "steps": steps(rounds),
        "fitted": fitted(rounds),
        "two threads": two_threads(rounds),
    }
    hardware = re.sub(r"\W+", "-", machine().split(",")[0] or platform.machine()).strip("-").lower()
    name = f"native_{hardware}"
    picture = f"{name}_{today()}.svg"
    (FOLDER / picture).write_bytes(drawn(found["against SDPA"][0]))
    write_page(name, page(found, picture), [found])


if __name__ == "__main__":
    main()
