"""Compare the peak memory predicted by `subquad.cost` with that of a new process.

    python benchmarks/cost.py

Each call is measured twice, each time in a new single-threaded process, as the increase of its peak resident memory:
with the default heap of the C library, and with a heap that returns every larger block to the system when it is freed,
which shows what the call holds. Needs Linux and glibc. Exits with 1 if a prediction is off by more than 15 % on the
default heap. The table is written to benchmarks/results/.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from results import FOLDER, machine

from subquad import attention, cost
from subquad_lab.options.methods import parse_method
from subquad_lab.system.timing import peak_bytes

LIMIT = 0.15
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # bytes above which a block is not part of the heap


@dataclass(frozen=True)
class Case:
    """One call, as on the command line."""

    method: str
    length: int
    heads: int
    width: int
    is_causal: bool
    training: bool
    value_width: int = 0  # the width, if 0
    key_heads: int = 0  # the heads, if 0


@dataclass(frozen=True)
class Row:
    """A case with its form, and bytes: predicted, held, and taken from the system by the default heap."""

    case: Case
    form: str
    predicted: int
    held: int
    heap: int


SHAPES = {  # method: (length, heads, width)
    "exact": ((8192, 8, 64),),
    "taylor:2": ((4096, 8, 64), (16_384, 8, 64), (16_384, 32, 16)),
    "random:256": ((16_384, 8, 64), (16_384, 32, 16)),
    "linear:elu": ((32_768, 8, 64),),
    "separable": ((32_768, 8, 64),),
}
CASES = [
    Case(method, *shape, is_causal, training)
    for method, shapes in SHAPES.items()
    for shape in shapes
    for is_causal in (True, False)
    for training in (False, True)
] + [
    Case("exact", 2048, 4, 64, True, False, value_width=32),  # torch then materializes the weights
    Case("exact", 2048, 4, 64, True, True, value_width=32),
    Case("taylor:2", 8192, 8, 32, True, True, value_width=64, key_heads=2),
    Case("random:256", 8192, 8, 64, True, False, value_width=32, key_heads=2),
    Case("linear:elu", 16_384, 12, 64, True, True, key_heads=4),
    Case("separable", 16_384, 12, 64, True, True, key_heads=4),
]


def predict(case: Case) -> tuple[str, int]:
    torch.set_num_threads(1)  # as in the measured process
    found = cost(
        parse_method(case.method), query_length=case.length, head_dim=case.width, value_dim=case.value_width or None,
        heads=case.heads, key_heads=case.key_heads or None, is_causal=case.is_causal, training=case.training,
    )  # fmt: skip
    return found.form, found.peak_bytes


def measured(case: Case, environment: dict[str, str]) -> int:
    """Return the increase of the peak resident memory of a new process."""
    done = subprocess.run([sys.executable, __file__, "one"], input=json.dumps(asdict(case)), capture_output=True,
                          text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{case}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return int(done.stdout)


def measure_here(case: Case) -> int:
    method, generator = parse_method(case.method), torch.Generator().manual_seed(0)
    key_heads, e = case.key_heads or case.heads, case.value_width or case.width

    def inputs(length: int) -> list[torch.Tensor]:
        shapes = (case.heads, length, case.width), (key_heads, length, case.width), (key_heads, length, e)
        return [torch.randn(1, *shape, generator=generator).requires_grad_(case.training) for shape in shapes]

    def call(tensors: list[torch.Tensor]) -> object:
        output = attention(*tensors, is_causal=case.is_causal, enable_gqa=True, method=method)
        return output, torch.autograd.grad(output.sum(), tensors) if case.training else ()

    call(inputs(16))  # Exclude torch's one-time setup.
    tensors, results = inputs(case.length), []
    return peak_bytes(lambda: results.append(call(tensors)))


def table(rows: list[Row]) -> str:
    lines = [
        "| method | form | length | heads | width | causal | backward | predicted | held | ratio | heap | ratio |",
        "|---|---|---:|---:|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        c = row.case
        heads = f"{c.heads}" + (f" of {c.key_heads}" if c.key_heads else "")
        width = f"{c.width}" + (f", values {c.value_width}" if c.value_width else "")
        mib = [f"{x / 2**20:,.1f} MiB" for x in (row.predicted, row.held, row.heap)]
        yes = ["yes" if x else "no" for x in (c.is_causal, c.training)]
        cells = [c.method, row.form, f"{c.length:,}", heads, width, *yes, mib[0], mib[1],
                 f"{row.predicted / row.held:.2f}", mib[2], f"{row.predicted / row.heap:.2f}"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(date: str, rows: list[Row]) -> str:
    ratios = [row.predicted / row.held for row in rows]
    heap = [row.predicted / row.heap for row in rows]
    return "\n\n".join(
        [
            f"# cost, {date}",
            machine(),
            "Peak memory of one call in addition to its inputs, including the result; float32, batch 1. Held: the "
            "increase of the peak resident memory of a new process whose heap returns freed blocks. Heap: the same "
            "with the default settings of the C library, where gaps between blocks stay with the process.",
            f"{len(rows)} calls: predicted over held {min(ratios):.2f} to {max(ratios):.2f}; "
            f"over the default heap {min(heap):.2f} to {max(heap):.2f}.",
            table(rows),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check predicted peak memory; write benchmarks/results/cost_DATE.*.")
    parser.parse_args(arguments)
    if not Path("/proc/self/status").exists():
        sys.exit("this benchmark reads /proc, which only Linux has")
    rows = []
    for case in CASES:
        form, predicted = predict(case)
        rows.append(Row(case, form, predicted, measured(case, RETURNED), measured(case, {})))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = page(date, rows)
    (FOLDER / f"cost_{date}.md").write_text(text + "\n")
    data = {"date": date, "machine": machine(), "rows": [asdict(row) for row in rows]}
    (FOLDER / f"cost_{date}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(text.split("\n\n")[3])
    return int(any(abs(row.predicted / row.heap - 1) > LIMIT for row in rows))


if __name__ == "__main__":
    if sys.argv[1:] == ["one"]:
        print(measure_here(Case(**json.load(sys.stdin))))
    else:
        sys.exit(main())
