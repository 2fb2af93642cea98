"""Stream a million tokens through Taylor(2) in bfloat16, in chunks and single steps, and check memory and error.

    python benchmarks/streaming.py [--tokens 1000000]

On some virtual machines bfloat16 needs ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment. The error is that of the
output before it is rounded to bfloat16, compared to float64. It is taken from a second stream of the same numbers in
float32, which must equal the first after rounding. Exits with 1 if memory grows or the error exceeds its limit.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from subquad import State, Taylor, attention

WIDTH, CHUNK, STEPS = 16, 1000, 50
MAX_ERROR = 1e-3  # relative RMS error of an output, for values of mean 1
MAX_GROWTH_BYTES = 16 << 20  # after the first tenth; a million keys and values would take 61 MiB


class Reference:
    """Taylor(2) in float64 from the moments of the keys: the sums of [v, 1], of k [v, 1] and of k k^T [v, 1]."""

    def __init__(self) -> None:
        shapes = [(1, WIDTH + 1), (WIDTH, WIDTH + 1), (WIDTH * WIDTH, WIDTH + 1)]
        self.moments = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Process the next tokens, (n, d), (n, d), (n, d) -> (n, d), which attend to each other pairwise."""
        q, k, v = (x.double() for x in (q, k, v))
        q = q / WIDTH**0.5
        values = torch.cat([v, torch.ones_like(v[:, :1])], 1)
        x = q @ k.mT
        total = (1 + x + x.square() / 2).tril() @ values
        weights = (1.0, 1.0, 0.5)
        for weight, q_power, moment in zip(weights, powers(q), self.moments, strict=True):
            total = total + weight * (q_power @ moment)
        self.moments = [moment + k_power.mT @ values for k_power, moment in zip(powers(k), self.moments, strict=True)]
        return total[:, :-1] / total[:, -1:]


def powers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(n, d) -> (n, 1), (n, d), (n, d*d)"""
    return torch.ones_like(x[:, :1]), x, (x[:, :, None] * x[:, None, :]).flatten(1)


def resident_bytes() -> int:
    """Return the current memory of the process, not its peak."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def stream(parts: list[tuple[Tensor, ...]], state: State | None) -> tuple[Tensor, State]:
    outputs = []
    for part in parts:
        output, state = attention(
            *(x[None, None] for x in part), is_causal=True, method=Taylor(2), state=state, return_state=True
        )
        outputs.append(output[0, 0])
    assert state is not None
    return torch.cat(outputs), state


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description="Stream tokens through Taylor(2), and print memory and error.")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="minimum number of tokens (default: %(default)s)")
    options = parser.parse_args()
    block = CHUNK + STEPS
    blocks = -(-options.tokens // block)
    generator, reference, begin = torch.Generator().manual_seed(0), Reference(), time.perf_counter()
    narrow_state = wide_state = None
    memory: list[int] = []
    squares = torch.zeros(2, dtype=torch.float64)  # of the errors, and of the outputs, since the last line
    worst, equal = 0.0, True
    print(f"width {WIDTH}, blocks of a chunk of {CHUNK} and {STEPS} steps, {torch.get_num_threads()} threads")
    print("    tokens   seconds   memory MiB   state bytes   relative error")
    for done in range(1, blocks + 1):
        q, k, v = (torch.randn(block, WIDTH, generator=generator) for _ in range(3))
        inputs = [x.bfloat16() for x in (q, k, v + 1)]
        parts = list(zip(*(x.split([CHUNK] + [1] * STEPS) for x in inputs), strict=True))
        narrow, narrow_state = stream(parts, narrow_state)
        wide, wide_state = stream([tuple(x.float() for x in part) for part in parts], wide_state)
        equal = equal and torch.equal(narrow, wide.bfloat16())
        expected = reference(*inputs)
        squares += torch.stack([(wide - expected).square().sum(), expected.square().sum()])
        if done % max(1, blocks // 10) == 0 or done == blocks:
            error = (squares[0] / squares[1]).sqrt().item()
            worst = max(worst, error)
            squares.zero_()
            memory.append(resident_bytes())
            seconds = time.perf_counter() - begin
            figures = f"{memory[-1] / 2**20:>13.1f}{narrow_state.nbytes:>14,}{error:>17.2e}"
            print(f"{done * block:>10,}{seconds:>10.1f}{figures}", flush=True)
    growth = max(memory) - memory[0]
    print(f"memory after the first line: {growth / 2**20:+.1f} MiB; largest error {worst:.2e}, limit {MAX_ERROR:.0e}")
    print(f"the bfloat16 output equals the rounded float32 output: {equal}")
    return int(growth > MAX_GROWTH_BYTES or worst > MAX_ERROR or not equal)


if __name__ == "__main__":
    sys.exit(main())
