"""Benchmark Subquad's methods against torch's attention and performer-pytorch: time, memory, error, decoding.

    python benchmarks/attention.py [--lengths 256,1024,4096,16384] [--long]

Attention is causal, in float32, on normally distributed inputs. Methods are timed in turn in this process on the same
tensors, and the best of several rounds counts, so that other load affects all of them equally. Memory and error are
measured in a new process for each call. The results are written to benchmarks/results/.
"""

import argparse
import contextlib
import io
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch
from results import write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import subquad
from subquad_lab.options.methods import parse_method
from subquad_lab.system.timing import Request, call, in_turn, memory_and_error, normal_inputs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# heads, width, rivals of SDPA
CASES = (
    (8, 64, ("taylor:2", "random:256", "linear:elu", "separable", "performer-pytorch")),
    (32, 16, ("taylor:2",)),
)
ROUNDS = 5
MIN_SECONDS, MAX_SECONDS = 2, 60  # minimum total time of the rounds, and time after which none starts
PERFORMER_SECONDS, PERFORMER_GIB = 15, 10  # limits above which it is skipped
CONTEXT, STEPS = 32_768, 32  # tokens before the decoding, and in it


@dataclass(frozen=True)
class Row:
    """One line of the results. `speed` is SDPA's time divided by this time; `note` says why a value is missing."""

    heads: int
    width: int
    length: int
    task: str
    method: str
    seconds: float | None = None
    speed: float | None = None
    peak_bytes: int | None = None
    relative_error: float | None = None
    note: str = ""


def rival(name: str, width: int) -> Attend:
    """Return the function that computes causal attention with the named method."""
    if name == "sdpa":
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)
    if name == "performer-pytorch":
        from performer_pytorch import FastAttention

        torch.manual_seed(0)  # it draws its features from torch's global generator
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it has no CUDA code
            return FastAttention(dim_heads=width, nb_features=256, causal=True)
    method = parse_method(name)
    return lambda q, k, v: subquad.attention(q, k, v, is_causal=True, method=method)


def memory_and_error_of(request: Request) -> tuple[int, float]:
    """Measure in a new process, which receives the name of the method because functions cannot be pickled."""
    return memory_and_error(rival(request.method, request.width), request)


def compare(case: Request, names: tuple[str, ...], earlier: dict[str, Row]) -> list[Row]:
    """Measure all methods at one shape and length. `earlier` holds their previous rows and is updated."""
    task = "forward+backward" if case.backward else "forward"
    rows = {name: Row(case.heads, case.width, case.length, task, name) for name in ("sdpa", *names)}
    calls: dict[str, Callable[[], object]] = {}
    inputs = normal_inputs(case)
    for name, row in rows.items():
        if name == "performer-pytorch" and (note := performer_is_too_much(earlier.get(name), case.length)):
            rows[name] = replace(row, note=note)
            continue
        try:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                peak, error = fresh.submit(memory_and_error_of, replace(case, method=name)).result()
        except Exception as failure:  # A failure is a result too; running out of memory ends the process.
            rows[name] = replace(row, note=f"fails: {type(failure).__name__}: {failure}".splitlines()[0])
            continue
        rows[name] = replace(row, peak_bytes=peak, relative_error=error)
        attend = rival(name, case.width)
        calls[name] = lambda attend=attend: call(attend, inputs, case.backward)
    best = in_turn(calls, ROUNDS, MIN_SECONDS, MAX_SECONDS)
    for name, seconds in best.items():
        rows[name] = earlier[name] = replace(rows[name], seconds=seconds, speed=best["sdpa"] / seconds)
    return list(rows.values())


def performer_is_too_much(last: Row | None, length: int) -> str:
    """Return why performer-pytorch is skipped, extrapolated from its previous row, or an empty string."""
    if last is None:
        return ""
    seconds = last.seconds * length / last.length
    gib = last.peak_bytes * length / last.length / 2**30
    if seconds <= PERFORMER_SECONDS and gib <= PERFORMER_GIB:
        return ""
    return f"skipped: would take about {seconds:.0f} s and {gib:.1f} GiB"


@torch.no_grad()
def decode(case: Request, names: tuple[str, ...]) -> list[Row]:
    """Time one decoding step after CONTEXT tokens: SDPA over all keys and values, other methods from their state.

    Each method decodes STEPS tokens in turn; the time is that of one token.
    """
    q, k, v = normal_inputs(replace(case, length=CONTEXT + 1))
    before = [x[..., :-1, :] for x in (q, k, v)]
    token = [x[..., -1:, :].contiguous() for x in (q, k, v)]

    def steps(method: object, state: subquad.State) -> None:
        for _ in range(STEPS):
            _, state = subquad.attention(*token, is_causal=True, method=method, state=state, return_state=True)

    calls: dict[str, Callable[[], object]] = {
        "sdpa": lambda: [scaled_dot_product_attention(token[0], k, v) for _ in range(STEPS)]
    }
    for name in names:
        method = parse_method(name)
        _, state = subquad.attention(*before, is_causal=True, method=method, return_state=True)
        calls[name] = partial(steps, method, state)
    best = in_turn(calls, ROUNDS, MIN_SECONDS, MAX_SECONDS)
    return [
        Row(case.heads, case.width, CONTEXT, "decoding step", name, seconds / STEPS, best["sdpa"] / seconds)
        for name, seconds in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure attention and write benchmarks/results/.")
    parser.add_argument(
        "--lengths", default="256,1024,4096,16384", help="comma-separated lengths (default: %(default)s)"
    )
    parser.add_argument("--long", action="store_true", help="add length 65536")
    options = parser.parse_args()
    lengths = [int(text) for text in options.lengths.split(",")] + [65_536] * options.long

    rows: list[Row] = []
    for heads, width, names in CASES:
        for backward in (False, True):
            earlier: dict[str, Row] = {}
            for length in sorted(lengths):
                print(f"{heads} heads of width {width}, length {length}, backward: {backward}", flush=True)
                rows += compare(Request("sdpa", length, heads, width, backward), names, earlier)
        print(f"{heads} heads of width {width}, decoding step", flush=True)
        ours = tuple(name for name in names if name != "performer-pytorch")
        rows += decode(Request("sdpa", CONTEXT, heads, width), ours)
    write("attention", rows)


if __name__ == "__main__":
    main()
