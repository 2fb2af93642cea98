"""Subquad's methods against torch's own attention and performer-pytorch: time, memory, error, decoding.

    python benchmarks/attention.py [--lengths 256,1024,4096,16384] [--long]

Attention is causal, in float32, on normal inputs. Times are taken in this process, the rivals in turn on the
same tensors, and the best of several rounds counts: what else the machine does then hurts all of them alike.
Memory and error come from a fresh process for each call. The results go to benchmarks/results/.
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
SHORTEST, LONGEST = 2, 60  # seconds: rounds go on for the first at least, and none begins after the second
PERFORMER_SECONDS, PERFORMER_GIB = 15, 10  # it is skipped where it would take more
CONTEXT, STEPS = 32_768, 32  # tokens before the decoding, and in it


@dataclass(frozen=True)
class Row:
    """One line of the results. `speed`: SDPA's time over this one's; `note`: why a figure is missing."""

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
    """The function that computes causal attention in the named way."""
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
    """For a fresh process: functions do not travel between processes, their names do."""
    return memory_and_error(rival(request.method, request.width), request)


def compare(case: Request, names: tuple[str, ...], earlier: dict[str, Row]) -> list[Row]:
    """All methods at one shape and length. `earlier` holds their rows at the last length; updated here."""
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
        except Exception as failure:  # whatever a rival dies of is its result; out of memory ends the process
            rows[name] = replace(row, note=f"fails: {type(failure).__name__}: {failure}".splitlines()[0])
            continue
        rows[name] = replace(row, peak_bytes=peak, relative_error=error)
        attend = rival(name, case.width)
        calls[name] = lambda attend=attend: call(attend, inputs, case.backward)
    best = in_turn(calls, ROUNDS, SHORTEST, LONGEST)
    for name, seconds in best.items():
        rows[name] = earlier[name] = replace(rows[name], seconds=seconds, speed=best["sdpa"] / seconds)
    return list(rows.values())


def performer_is_too_much(last: Row | None, length: int) -> str:
    """Why performer-pytorch is left out here, judged by its last row: it grows with the length."""
    if last is None:
        return ""
    seconds = last.seconds * length / last.length
    gib = last.peak_bytes * length / last.length / 2**30
    if seconds <= PERFORMER_SECONDS and gib <= PERFORMER_GIB:
        return ""
    return f"skipped: would take about {seconds:.0f} s and {gib:.1f} GiB"


@torch.no_grad()
def decode(case: Request, names: tuple[str, ...]) -> list[Row]:
    """One more token after CONTEXT tokens: SDPA over all the keys and values, ours from the state. Each decodes STEPS
    tokens in its turn, as in use; the time is that of one."""
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
    best = in_turn(calls, ROUNDS, SHORTEST, LONGEST)
    return [
        Row(case.heads, case.width, CONTEXT, "decoding step", name, seconds / STEPS, best["sdpa"] / seconds)
        for name, seconds in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure attention and write benchmarks/results/.")
    parser.add_argument("--lengths", default="256,1024,4096,16384", help="with commas between (%(default)s)")
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
