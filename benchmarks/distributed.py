"""Attention over several processes of one thread each: strong and weak scaling, bytes sent, and a very long sequence.

    python benchmarks/distributed.py [--quick]

Time is that of the slowest rank, the best of several rounds; one process computes the same sequence by plain
`subquad.attention`. Bytes are counted where a rank hands them to torch.distributed. Processes share this machine, so
there are never more of them than cores in a timing that is called a scaling; with more, it says so.
"""

import argparse
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results import machine, today, write_page

import subquad
from subquad import Exact, RandomFeatures, Taylor, Window
from subquad import distributed as over_ranks

ROUNDS = 3
SENT = dict(all_gather=1, isend=0, all_to_all_single=1, broadcast=0)  # the place of the tensor among the arguments


class Case(NamedTuple):
    """One call over all ranks."""

    method: Any
    heads: int
    width: int
    tokens: int  # of all ranks
    is_causal: bool = True
    trains: bool = False

    @property
    def label(self) -> str:
        return f"{self.method.label}, {self.heads} x {self.width}{'' if self.is_causal else ', not causal'}"


def inputs_of(case: Case, rank: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (1, case.heads, case.tokens // size, case.width)
    return [(0.3 * torch.randn(shape, generator=generator)).requires_grad_(case.trains) for _ in range(3)]


def compute(case: Case, tokens: list[torch.Tensor], size: int) -> None:
    attend = subquad.attention if size == 1 else over_ranks.attention
    with torch.set_grad_enabled(case.trains):
        output = attend(*tokens, is_causal=case.is_causal, method=case.method)
        if case.trains:
            torch.autograd.grad(output, tokens, torch.ones_like(output))


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count what this rank hands to torch.distributed."""
    total, before = [0], {name: getattr(dist, name) for name in SENT}

    def counting(name: str, *arguments: Any, **options: Any) -> Any:
        total[0] += arguments[SENT[name]].nbytes
        return before[name](*arguments, **options)

    for name in SENT:
        setattr(dist, name, partial(counting, name))
    try:
        yield total
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


# --- What a rank measures ---------------------------------------------------------------------------------------------


def seconds_of(rank: int, size: int, cases: Sequence[Case], rounds: int) -> list[float]:
    """Return the best time of each case on this rank, all ranks beginning together."""
    best = [float("inf")] * len(cases)
    for _ in range(rounds):
        for i, case in enumerate(cases):
            tokens = inputs_of(case, rank, size)
            dist.barrier()
            begin = time.perf_counter()
            compute(case, tokens, size)
            dist.barrier()  # The slowest rank counts.
            best[i] = min(best[i], time.perf_counter() - begin)
    return best


def bytes_of(rank: int, size: int, cases: Sequence[Case]) -> list[int]:
    found = []
    for case in cases:
        tokens = inputs_of(case, rank, size)
        with counted_bytes() as total:
            compute(case, tokens, size)
        found.append(total[0])
    return found


def peak_of(rank: int, size: int, case: Case) -> tuple[float, float]:
    """Return seconds, and the peak memory of this rank in bytes beyond what it had before its inputs."""
    before = resident_peak()
    tokens = inputs_of(case, rank, size)
    dist.barrier()
    begin = time.perf_counter()
    compute(case, tokens, size)
    dist.barrier()
    return time.perf_counter() - begin, resident_peak() - before


def resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return function(rank, size, *arguments) of each rank, in processes of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (size, folder, function, arguments), nprocs=size)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]  # our own files


def _run(rank: int, size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(rank, size, *arguments)))
    dist.barrier()
    dist.destroy_process_group()


# --- What a cluster would take ----------------------------------------------------------------------------------------


class Cluster(NamedTuple):
    """A network of equal machines, and the speed of one of them."""

    ranks: int = 64
    bytes_per_second: float = 1.25e9  # 10 Gbit/s
    latency: float = 5e-5  # seconds per message


def predicted(case: Case, cluster: Cluster, seconds_per_token: float, state_bytes: int) -> dict[str, float]:
    """Return the predicted seconds of a forward pass: arithmetic as measured on one thread here, network by its model.

    Feature methods in turn or gathered, whichever is faster; the ring passes all keys and values on P - 1 times, while
    the rank computes.
    """
    ranks, rate, latency = cluster
    own = seconds_per_token * case.tokens / ranks
    message = latency + state_bytes / case.heads / rate
    in_turn = own * (1 + (ranks - 1) / case.heads) + (ranks - 1 + case.heads) * message
    gathered = own * 1.45 + (ranks - 1) * (latency + state_bytes / rate)
    keys = 2 * case.heads * case.width * 4 * case.tokens / ranks
    return {
        "in turn, s": in_turn, "gathered, s": gathered, "bytes of the state": state_bytes,
        "ring, network alone, s": (ranks - 1) * (latency + keys / rate), "bytes of the ring": (ranks - 1) * keys,
    }  # fmt: skip


# --- The page ---------------------------------------------------------------------------------------------------------


def scaling_rows(cases: Sequence[Case], sizes: Sequence[int], rounds: int, weak: bool) -> list[dict[str, Any]]:
    """Return a row for each case: seconds by number of processes; in weak scaling each has as many tokens."""
    by_size = {}
    for size in sizes:
        own = [case._replace(tokens=case.tokens * size) for case in cases] if weak else list(cases)
        times = on_ranks(size, seconds_of, own, rounds)
        by_size[size] = [max(rank[i] for rank in times) for i in range(len(cases))]
        print(f"{'weak' if weak else 'strong'} scaling, {size} processes: {by_size[size]}", flush=True)
    return [
        {"case": case.label, "tokens": case.tokens, "task": "both" if case.trains else "forward",
         **{f"{size} processes, s": by_size[size][i] for size in sizes}}
        for i, case in enumerate(cases)
    ]  # fmt: skip


def volume_rows(lengths: Sequence[int], size: int) -> list[dict[str, Any]]:
    methods = [(Taylor(2), True), (RandomFeatures(256), True), (RandomFeatures(256), False), (Window(256), True)]
    cases = [Case(method, 2, 16, n, is_causal, True) for method, is_causal in methods for n in lengths]
    cases += [Case(Exact(), 2, 16, n, True, True) for n in lengths if n <= 16384]
    found = on_ranks(size, bytes_of, cases)
    return [
        {"method": case.label, "tokens": case.tokens, "bytes": max(rank[i] for rank in found)}
        for i, case in enumerate(cases)
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def scaling_table(rows: Sequence[dict[str, Any]], sizes: Sequence[int], weak: bool) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        times = [row[f"{size} processes, s"] for size in sizes]
        shown = [f"{x:.2f} s ({times[0] / x:.2f}x)" for x in times]
        return [row["case"], row["task"], f"{row['tokens']:,}", *shown]

    tokens = "tokens of each" if weak else "tokens"
    return table(
        ["call", "pass", tokens, *(f"{size} process{'es' * (size > 1)}" for size in sizes)], list(map(cells, rows))
    )


def volume_table(rows: Sequence[dict[str, Any]]) -> str:
    lengths = sorted({row["tokens"] for row in rows})
    by_method: dict[str, dict[int, int]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["tokens"]] = row["bytes"]
    lines = [[name, *(f"{found[n]:,}" if n in found else "" for n in lengths)] for name, found in by_method.items()]
    return table(["method", *(f"{n:,} tokens" for n in lengths)], lines)


def page(strong: list[dict[str, Any]], weak: list[dict[str, Any]], volumes: list[dict[str, Any]], long: dict[str, Any],
         clusters: list[dict[str, Any]], sizes: Sequence[int]) -> str:  # fmt: skip
    cores = os.cpu_count() or 1
    crowded = f" With more than {cores} processes they share {cores} cores." if max(sizes) > cores else ""
    cluster_table = table(
        ["call", "in turn", "gathered", "sent by a rank", "ring, network alone", "sent by a rank"],
        [[row["case"], f"{row['in turn, s']:.2f} s", f"{row['gathered, s']:.2f} s",
          f"{row['bytes of the state'] / 1e6:.2f} MB", f"{row['ring, network alone, s']:.1f} s",
          f"{row['bytes of the ring'] / 1e9:.1f} GB"] for row in clusters],
    )  # fmt: skip
    return "\n\n".join([
        f"# distributed, {today()}", machine(),
        f"Processes of one thread, gloo, float32. One process runs plain `subquad.attention`.{crowded}",
        "## Strong scaling", scaling_table(strong, sizes, weak=False),
        "## Weak scaling", "The work of feature methods grows with the number of tokens, so equal times are ideal.",
        scaling_table(weak, sizes, weak=True),
        "## Bytes that a rank sends", "Forward and backward, 2 heads of width 16, 2 processes; counted.",
        volume_table(volumes),
        "## A very long sequence",
        f"{long['case']}, {long['tokens']:,} tokens, forward and backward, {long['processes']} processes: "
        f"{long['seconds']:.0f} s; peak memory of each rank beyond its start, inputs included: "
        f"{', '.join(f'{x / 2**20:,.0f} MiB' for x in long['peak bytes'])}. {long['one process']}",
        "## Predicted: 64 machines, 10 million tokens",
        "**Not measured.** A forward pass on 64 ranks of one thread each as fast as this one, with 10 Gbit/s and 50 us "
        "per message, from the time per token above and the counted bytes of the state. *Ring* is the time that keys "
        "and values of exact attention need on the network alone.",
        cluster_table,
    ]) + "\n"  # fmt: skip


def cases_of(tokens: int) -> list[Case]:
    calls = [(Taylor(2), 32, 16), (RandomFeatures(256), 8, 64)]
    return [
        Case(*call, tokens, is_causal, trains)
        for call in calls
        for is_causal in (True, False)
        for trains in (False, True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Measure attention over several processes; write benchmarks/results/distributed_DATE.*."
    )
    parser.add_argument("--quick", action="store_true", help="few tokens, two processes, one round")
    parser.add_argument("--tokens", type=int, default=65536, help="of strong scaling (default: %(default)s)")
    parser.add_argument("--long", type=int, default=4_194_304, help="of the long sequence (default: %(default)s)")
    options = parser.parse_args(arguments)
    quick = options.quick
    sizes, rounds = ((1, 2), 1) if quick else ((1, 2, 4), ROUNDS)
    strong_cases = cases_of(512 if quick else options.tokens)
    strong_cases += [] if quick else [Case(Exact(), 8, 64, 8192, True, trains) for trains in (False, True)]
    strong = scaling_rows(strong_cases, sizes, rounds, weak=False)
    weak = scaling_rows([x for x in cases_of(256 if quick else 16384) if x.is_causal], sizes, rounds, weak=True)
    volumes = volume_rows((128, 256) if quick else (4096, 16384, 65536, 262144), 2)
    long_case = Case(Taylor(2), 4, 16, 2048 if quick else options.long, True, True)
    found = on_ranks(sizes[-1], peak_of, long_case)
    predicted_bytes = subquad.cost(
        long_case.method, query_length=long_case.tokens, heads=4, head_dim=16, is_causal=True, training=True
    ).peak_bytes
    inputs = 3 * 4 * 16 * 4 * long_case.tokens
    long = {
        "case": long_case.label, "tokens": long_case.tokens, "processes": sizes[-1],
        "seconds": max(x for x, _ in found), "peak bytes": [x for _, x in found],
        "one process": f"One process would need {(predicted_bytes + inputs) / 2**20:,.0f} MiB by `subquad.cost`, with "
        "its inputs.",
    }  # fmt: skip
    clusters = [cluster_row(row, case) for row, case in zip(strong, strong_cases, strict=True)
                if case.is_causal and not case.trains and case.method != Exact()]  # fmt: skip
    rows = [{"table": name, **row} for name, part in (("strong", strong), ("weak", weak), ("bytes", volumes),
            ("long", [long]), ("cluster", clusters)) for row in part]  # fmt: skip
    write_page("distributed", page(strong, weak, volumes, long, clusters, sizes), rows)


def cluster_row(row: dict[str, Any], case: Case) -> dict[str, Any]:
    per_token = row["1 processes, s"] / case.tokens
    state_bytes = subquad.cost(
        case.method, query_length=case.tokens, heads=case.heads, head_dim=case.width, is_causal=True
    ).state_bytes
    return {"case": case.label} | predicted(case._replace(tokens=10_000_000), Cluster(), per_token, state_bytes)


if __name__ == "__main__":
    main()
