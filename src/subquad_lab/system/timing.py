"""Measurement of one attention call: time, peak memory, and error relative to exact attention.

    relative error = |out - exact| / |exact|,  Frobenius norm over sampled rows

Each measurement runs in its own process (`python -m subquad_lab.system.timing`, with a JSON request on standard input
and a JSON answer on standard output), because memory touched by an earlier call would hide what the next one needs.
Attention is causal, in float32, on normally distributed inputs from a fixed seed.
"""

import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import subquad
from subquad.methods import resolve

Inputs = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Request:
    """One call to measure. `method` is a name as on the command line, such as "taylor:2"."""

    method: str
    length: int
    heads: int
    width: int
    backward: bool = False
    spread: float = 0.5  # standard deviation of queries and keys; the values have 1
    repeats: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Measurement:
    """Seconds of the fastest repeat, peak bytes in addition to the inputs, and relative error of the output."""

    seconds: float
    peak_bytes: int
    relative_error: float


class MeasureError(RuntimeError):
    """Raised if a call cannot be measured."""


def measure(request: Request) -> Measurement:
    """Measure one call in a fresh process."""
    command = [sys.executable, "-P", "-m", "subquad_lab.system.timing"]  # -P: import nothing from the current folder
    done = subprocess.run(command, input=json.dumps(asdict(request)), capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"the process exited with {done.returncode}"])[-1]
        raise MeasureError(f"{request.method} at length {request.length}: {last}")
    return Measurement(**json.loads(done.stdout))


def normal_inputs(request: Request) -> Inputs:
    """Return queries, keys and values of shape (1, heads, length, width)."""
    generator = torch.Generator().manual_seed(request.seed)
    shape = (1, request.heads, request.length, request.width)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    q.mul_(request.spread)
    k.mul_(request.spread)
    for x in (q, k, v):
        x.requires_grad_(request.backward)
    return q, k, v


def high_water_bytes() -> int:
    """Return the peak memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    # ru_maxrss is in kilobytes, except on macOS, where it is in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return by how much a call raises the peak memory of this process, including its result."""
    # On Linux this resets the peak to the current use. Elsewhere the peak so far is the best available baseline.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = high_water_bytes()
    call()
    return high_water_bytes() - before


def best_seconds(call: Callable[[], object], repeats: int, at_least: float = 0.5) -> float:
    """Return the time of the fastest of several calls; other load on the machine can only make a call slower.

    Short calls are repeated for at least `at_least` seconds in total, so that a disturbance does not affect all calls.
    """
    best, total, count = math.inf, 0.0, 0
    while count < repeats or total < at_least:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        best, total, count = min(best, seconds), total + seconds, count + 1
    return best


def in_turn(calls: dict[str, Callable[[], object]], rounds: int, at_least: float, at_most: float) -> dict[str, float]:
    """Return the best time of each call. A round calls each once, so that a disturbance affects all of them equally.

    Rounds last at least `at_least` seconds in total, and none starts after `at_most`.
    """
    best = dict.fromkeys(calls, math.inf)
    begin = time.perf_counter()
    for finished in itertools.count():
        spent = time.perf_counter() - begin
        if finished and (spent > at_most or (finished >= rounds and spent > at_least)):
            break
        for name, function in calls.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def relative_error(output: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: int = 256) -> float:
    """Return the relative error of causal attention on `rows` rows, compared to float64, in O(rows * length).

    The first rows average few values and are therefore large: a quarter of the sampled rows are the first ones, with
    weight 1. The others are spread evenly and weighted by the number of rows that each represents.
    """
    length = q.shape[-2]
    first = min(rows // 4, length)
    others = min(rows - first, length - first)
    picked = torch.cat([torch.arange(first), torch.linspace(first, length - 1, others).long()])
    weight = torch.ones(first + others, 1, dtype=torch.float64)
    weight[first:] = (length - first) / max(1, others)
    hidden = torch.arange(length) > picked[:, None]  # (rows, length)
    difference = norm = 0.0
    for head in range(q.shape[1]):  # one at a time, because the weights of all heads may not fit into memory
        logits = q[0, head, picked].double() @ k[0, head].double().T / math.sqrt(q.shape[-1])
        exact = logits.masked_fill_(hidden, -math.inf).softmax(-1) @ v[0, head].double()
        difference += (weight * (output[0, head, picked].double() - exact).square()).sum().item()
        norm += (weight * exact.square()).sum().item()
    return math.sqrt(difference / norm)


def call(attend: Attend, inputs: Inputs, backward: bool) -> Tensor:
    """Call attention, followed by the backward pass if requested."""
    output = attend(*inputs)
    if backward:
        torch.autograd.grad(output.sum(), inputs)
    return output.detach()


def memory_and_error(attend: Attend, request: Request) -> tuple[int, float]:
    """Return peak bytes and relative error of one call, which must be the first of its size in this process."""
    # A small call first, so that torch's one-time setup is not counted.
    call(attend, normal_inputs(replace(request, length=16)), request.backward)
    inputs = normal_inputs(request)
    outputs: list[Tensor] = []
    peak = peak_bytes(lambda: outputs.append(call(attend, inputs, request.backward)))
    q, k, v = (x.detach() for x in inputs)
    return peak, relative_error(outputs[0], q, k, v)


def run(request: Request) -> Measurement:
    """Measure one call in this process."""
    attend = partial(subquad.attention, is_causal=True, method=resolve(request.method))

    peak, error = memory_and_error(attend, request)
    inputs = normal_inputs(request)
    seconds = best_seconds(lambda: call(attend, inputs, request.backward), request.repeats)
    return Measurement(seconds, peak, error)


if __name__ == "__main__":
    json.dump(asdict(run(Request(**json.load(sys.stdin)))), sys.stdout)
