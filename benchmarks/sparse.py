"""Benchmark Window and BlockSparse against SDPA, FlexAttention and the machine's limit.

    python benchmarks/sparse.py [--quick]

Causal, 8 heads of width 64, float32, all threads. Methods are called in turn on the same tensors, and the best of
several rounds counts.

    share of the peak    FLOPs relative to torch.mm of 1024 x 1024 matrices: 4 d per attended pair forward, and 14 d
                         forward and backward, the minimum for a backward pass without stored weights
    memory               peak memory in addition to the inputs, as a multiple of the bytes of q, k and v
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from native import both, forward, sdpa
from results import machine, today, write_page
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from subquad import BlockSparse, Decoder, Window, attention, native
from subquad_lab.system.timing import in_turn

HEADS, WIDTH = 8, 64
LENGTHS, SIZES = (1024, 4096, 16_384, 65_536), (256, 1024)
BLOCK, BLOCK_LENGTH = 64, 16_384
MAX_MASKED_LENGTH = 4096  # Above it, a dense mask and its gradients take too long.
MAX_GRADIENT_LENGTH = 16_384  # of SDPA
FLEX_LENGTHS = (4096, 16_384)  # Compiling takes most of a minute.


def inputs(length: int, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, WIDTH, generator=generator).requires_grad_(grad) for _ in range(3)]


def masked(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, mask)


def flex(length: int, size: int) -> Callable[..., Tensor]:
    """Return compiled FlexAttention with the block mask of a sliding window."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    sees = lambda b, h, i, j: (j <= i) & (j > i - size)
    blocks = create_block_mask(sees, None, None, length, length, device="cpu")
    return partial(torch.compile(flex_attention), block_mask=blocks)


def peak_call() -> Callable[[], object]:
    a, b = torch.randn(2, 1024, 1024).unbind()
    return lambda: [torch.mm(a, b) for _ in range(5)]


PEAK_FLOPS = 5 * 2 * 1024**3
MEMORY = """
import sys, torch
from subquad import Window, attention
from subquad_lab.system.timing import peak_bytes
length, size, training = map(int, sys.argv[1:])
q, k, v = (torch.randn(1, 8, length, 64).requires_grad_(bool(training)) for _ in range(3))
def call():
    output = attention(q, k, v, is_causal=True, method=Window(size))
    if training:
        torch.autograd.grad(output, (q, k, v), torch.ones_like(output))
print(peak_bytes(call) / (3 * q.nbytes))
"""


def memory(length: int, size: int, training: bool) -> float:
    """Return the peak memory in addition to the inputs, relative to theirs, in a new process."""
    command = [sys.executable, "-c", MEMORY, str(length), str(size), str(int(training))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def pairs(length: int, size: int) -> int:
    return HEADS * sum(min(i + 1, size) for i in range(length))


def window_row(length: int, size: int, seconds: float, with_flex: bool) -> dict[str, Any]:
    """Time all methods at one length and window size."""
    tensors, recorded = inputs(length), inputs(length, grad=True)
    grad, ours = torch.randn(1, HEADS, length, WIDTH), partial(attention, is_causal=True, method=Window(size))
    calls = {"peak": peak_call(), "window": partial(forward, ours, tensors), "sdpa": partial(forward, sdpa, tensors)}
    calls |= {"window, both": partial(both, ours, recorded, grad)}
    if length <= MAX_GRADIENT_LENGTH:
        calls["sdpa, both"] = partial(both, sdpa, recorded, grad)
    if length <= MAX_MASKED_LENGTH:
        near = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - size)
        calls["masked"] = partial(forward, partial(masked, near), tensors)
        calls["masked, both"] = partial(both, partial(masked, near), recorded, grad)
    if with_flex:
        calls["flex"] = partial(forward, flex(length, size), tensors)
    is_long = length > 20_000
    for name, call in calls.items():
        if not is_long or name != "sdpa":
            call()
    best = in_turn(calls, 1 if is_long else 3, seconds, 4 * seconds)
    peak, work = PEAK_FLOPS / best["peak"], pairs(length, size) * 2 * WIDTH
    row = {
        "length": length, "size": size, **{f"{name}, ms": 1e3 * t for name, t in best.items() if name != "peak"},
        "share forward": 2 * work / best["window"] / peak, "share both": 7 * work / best["window, both"] / peak,
    }  # fmt: skip
    if length == LENGTHS[-1]:
        row |= {"memory forward": memory(length, size, False), "memory both": memory(length, size, True)}
    print({name: round(x, 3) for name, x in row.items()}, flush=True)
    return row


def step_row(length: int, size: int, seconds: float) -> dict[str, Any]:
    """Time one decoding step after a context of this length."""
    q, k, v = inputs(length)
    with torch.no_grad():
        _, state = attention(q, k, v, is_causal=True, method=Window(size), return_state=True)
    token = [x[:, :, -1:].contiguous() for x in (q, k, v)]
    exact = partial(scaled_dot_product_attention, token[0], k, v)
    best = in_turn({"window": partial(Decoder(state), *token), "sdpa": exact}, 20, seconds, 4 * seconds)
    row = {"length": length, "size": size, **{f"{name}, us": 1e6 * t for name, t in best.items()}}
    print(row, flush=True)
    return row


def bigbird(length: int, density: float, seed: int = 0) -> Tensor:
    """Return a layout (1, blocks, blocks): the first block, three neighbors, and random blocks, as in BigBird."""
    blocks = length // BLOCK
    place = torch.arange(blocks)
    layout = (place[:, None] - place).abs() <= 1
    layout[:, 0] = layout[0] = True
    missing = max(0.0, density - float(layout.float().mean()))
    layout |= torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed)) < missing
    return layout[None]


def block_row(length: int, density: float, seconds: float) -> dict[str, Any]:
    """Time BlockSparse and SDPA without a mask, both not causal."""
    method = BlockSparse(bigbird(length, density))
    tensors, recorded, grad = inputs(length), inputs(length, grad=True), torch.randn(1, HEADS, length, WIDTH)
    ours, exact = partial(attention, method=method), scaled_dot_product_attention
    calls = {
        "blocks": partial(forward, ours, tensors), "sdpa": partial(forward, exact, tensors),
        "blocks, both": partial(both, ours, recorded, grad), "sdpa, both": partial(both, exact, recorded, grad),
    }  # fmt: skip
    best = in_turn(calls, 2, seconds, 4 * seconds)
    row = {"length": length, "density": method.density, **{f"{name}, ms": 1e3 * t for name, t in best.items()}}
    print(row, flush=True)
    return row


def ratio(row: dict[str, Any], slow: str, fast: str) -> str:
    return f"{row[slow] / row[fast]:.1f}x" if slow in row else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(windows: list[dict[str, Any]], steps: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> str:
    ours, training = "window, ms", "window, both, ms"
    window_table = table(
        ["length", "window", "forward", "against SDPA", "against SDPA with the mask", "against FlexAttention",
         "share of the peak", "both", "against SDPA", "with the mask", "share of the peak"],
        [[f"{r['length']:,}", str(r["size"]), f"{r[ours]:.1f} ms", ratio(r, "sdpa, ms", ours),
          ratio(r, "masked, ms", ours), ratio(r, "flex, ms", ours), f"{r['share forward']:.0%}",
          f"{r[training]:.1f} ms", ratio(r, "sdpa, both, ms", training), ratio(r, "masked, both, ms", training),
          f"{r['share both']:.0%}"] for r in windows],
    )  # fmt: skip
    memories = [f"At {r['length']:,} tokens and a window of {r['size']}, memory beyond the inputs: "
                f"{r['memory forward']:.2f} times the bytes of q, k and v forward, {r['memory both']:.2f} forward and "
                "backward." for r in windows if "memory both" in r]  # fmt: skip
    step_table = table(
        ["length", "window", "one token", "SDPA"],
        [[f"{r['length']:,}", str(r["size"]), f"{r['window, us']:.0f} us", f"{r['sdpa, us']:.0f} us"] for r in steps],
    )
    block_table = table(
        ["length", "density", "forward", "against SDPA", "both", "against SDPA"],
        [[f"{r['length']:,}", f"{r['density']:.1%}", f"{r['blocks, ms']:.0f} ms", ratio(r, "sdpa, ms", "blocks, ms"),
          f"{r['blocks, both, ms']:.0f} ms", ratio(r, "sdpa, both, ms", "blocks, both, ms")] for r in blocks],
    )  # fmt: skip
    return "\n\n".join([
        f"# sparse, {today()}", f"{machine()}, {native.status()}",
        f"{HEADS} heads of width {WIDTH}, float32. `Window` is causal, and so is the SDPA it is compared with; "
        "FlexAttention is compiled, with the mask of the same window, forward only. *Both* is forward and backward. "
        "The share of the peak counts the attended pairs, 4 d forward and 14 d both.",
        "## Window", window_table, *memories, "## One more token", step_table,
        f"## BlockSparse, blocks of {BLOCK}, not causal", block_table,
    ]) + "\n"  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure windows and blocks; write benchmarks/results/sparse_DATE.*.")
    parser.add_argument("--quick", action="store_true", help="512 tokens, without FlexAttention")
    parser.add_argument("--no-flex", action="store_true", help="do not compile FlexAttention")
    options = parser.parse_args(arguments)
    lengths = (512,) if options.quick else LENGTHS
    sizes, seconds = ((64,), 0.01) if options.quick else (SIZES, 1.0)
    with_flex = not (options.quick or options.no_flex)
    windows = [window_row(n, size, seconds, with_flex and n in FLEX_LENGTHS) for n in lengths for size in sizes]
    steps = [step_row(n, size, seconds / 2) for n in lengths for size in sizes]
    blocks = [block_row(512 if options.quick else BLOCK_LENGTH, 0.1, seconds)]
    rows = [{"table": name, **row} for name, part in
            (("window", windows), ("step", steps), ("blocks", blocks)) for row in part]  # fmt: skip
    write_page("sparse", page(windows, steps, blocks), rows)


if __name__ == "__main__":
    main()
