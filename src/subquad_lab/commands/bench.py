"""`subquad bench`: benchmark methods against torch's own attention, and against peak matrix-multiplication speed.

    speed           seconds of torch's attention / seconds
    share of peak   (FLOPs of the method's matrix products / seconds) / (FLOPs / seconds of one large product)
    relative error  |out - exact| / |exact|, exact by torch's attention

The methods run in turn, in one process and on the same tensors, and the best of several rounds counts, so that other
load on the machine affects all of them equally.
"""

import io
import json
import math
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch.nn.functional import scaled_dot_product_attention

import subquad
from subquad_lab import UsageError
from subquad_lab.figures.tables import Table
from subquad_lab.options.limits import positive
from subquad_lab.options.methods import parse_method
from subquad_lab.system.files import write_whole
from subquad_lab.system.memory import memory
from subquad_lab.system.text import say
from subquad_lab.system.timing import Request, call, in_turn, normal_inputs

BASELINE = "torch"  # scaled_dot_product_attention
COLUMNS = ("length", "method", "time", "speed", "share of peak", "peak memory", "relative error")
NOTE = """\
speed: relative to torch's attention at the same length.
share of peak: fraction of the FLOP/s of a large matrix product, {peak:.1f} GFLOP/s on this machine.
peak memory: predicted, in addition to the inputs.
relative error: |out - exact| / |exact| for normally distributed queries and keys with standard deviation 0.5. Above 1
(marked !) the output is worse than zeros."""
ROUNDS = 5
MIN_SECONDS, MAX_SECONDS = 1, 30  # per length: minimum total time of the rounds, and time after which none starts
HEAP_FACTOR = 2  # The C library's heap can take this many times what a call holds.
PRODUCT_SIZE = 2048  # rows and columns of the matrices that measure the peak


@dataclass(frozen=True)
class Case:
    """Settings shared by all measurements."""

    heads: int
    head_dim: int
    causal: bool
    backward: bool


@dataclass(frozen=True)
class Row:
    """One measurement. The share of the peak is filled in once the fastest matrix product is known."""

    length: int
    method: str
    seconds: float
    speed: float
    flops: int
    peak_bytes: int
    relative_error: float
    share: float = math.nan

    def cells(self) -> tuple[str, ...]:
        mebibytes = f"{self.peak_bytes / 2**20:,.1f} MiB"
        return (f"{self.length:,}", self.method, f"{self.seconds * 1000:,.1f} ms", f"{self.speed:.2f}x",
                f"{self.share:.0%}", mebibytes,
                f"{self.relative_error:.2g}{' !' if self.relative_error > 1 else ''}")  # fmt: skip


def run(
    methods: str, lengths: str, heads: int, head_dim: int, causal: bool, backward: bool, out: str | None
) -> None:  # fmt: skip
    """Measure, print a table, and write the results if a folder is given."""
    names = dict.fromkeys(methods.split(","))
    named = {name: parse_method(name, "--methods") for name in names}
    sizes = sorted({positive("lengths", text) for text in lengths.split(",")})
    case = Case(positive("heads", heads), positive("head-dim", head_dim), causal, backward)
    refuse_more_than_fits(named, sizes, case)
    folder = None if out is None else Path(out)
    if folder is not None:  # Fail before the measurements if the results cannot be written.
        import matplotlib.figure  # noqa: F401

        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()

    try:
        rows, peak = measured(named, sizes, case)
    except ValueError as error:  # A method does not fit these sizes.
        raise UsageError(f"--methods: {error}") from error
    title = (
        f"{'Causal attention' if causal else 'Attention'}, {'forward and backward' if backward else 'forward'}, "
        f"float32, {heads} heads of width {head_dim}, threads: {torch.get_num_threads()}"
    )
    Table(COLUMNS, [row.cells() for row in rows], title, section=len(named) + 1).print()
    say(*NOTE.format(peak=peak / 1e9).splitlines())
    if folder is not None:
        with writing(folder):
            write_whole(folder / "bench.json", as_json(rows, peak, case))
            write_whole(folder / "bench.svg", as_svg(rows, title))


def predicted(method: Any, length: int, case: Case) -> subquad.Cost:
    return subquad.cost(method, query_length=length, head_dim=case.head_dim, heads=case.heads, is_causal=case.causal,
                        training=case.backward)  # fmt: skip


def refuse_more_than_fits(named: dict[str, Any], sizes: list[int], case: Case) -> None:
    """Raise if a call would exceed the memory, before the system kills this process or another one."""
    length = sizes[-1]
    inputs = 3 * 4 * case.heads * length * case.head_dim
    for name, method in {"exact": subquad.Exact(), **named}.items():
        needed = inputs
        if needed <= memory():  # Otherwise the prediction itself could take long.
            needed += HEAP_FACTOR * predicted(method, length, case).peak_bytes
        if needed > memory():
            raise UsageError(
                f"--lengths: {name} at length {length:,} can need {needed / 2**30:,.1f} GiB, but this machine has "
                f"{memory() / 2**30:,.1f} GiB; use shorter lengths"
            )


def measured(named: dict[str, Any], sizes: list[int], case: Case) -> tuple[list[Row], float]:
    """Return all rows and the best FLOP/s of a matrix product; show progress on standard error."""
    console = Console(stderr=True)
    rows: list[Row] = []
    peak = 0.0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=len(sizes) * (len(named) + 1))
        for length in sizes:
            bar.update(task, description=f"measuring, length {length:,}")
            found, product = compare(named, length, case)
            peak = max(peak, product)
            rows += found
            bar.advance(task, len(found))
            if not console.is_terminal:
                for row in found:
                    say(f"length {row.length:,}, {row.method}: {row.seconds * 1000:,.1f} ms", to_error=True)
    return [replace(row, share=row.flops / row.seconds / peak) for row in rows], peak


def compare(named: dict[str, Any], length: int, case: Case) -> tuple[list[Row], float]:
    """Return a row for each method at one length, torch first, and the FLOP/s of a matrix product."""
    inputs = normal_inputs(Request(BASELINE, length, case.heads, case.head_dim, case.backward))
    attends = {BASELINE: partial(scaled_dot_product_attention, is_causal=case.causal)}
    for name, method in named.items():
        attends[name] = partial(subquad.attention, is_causal=case.causal, method=method)
    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    calls = {name: partial(call, attend, inputs, case.backward) for name, attend in attends.items()}
    best = in_turn({"product": lambda: matrix @ matrix, **calls}, ROUNDS, MIN_SECONDS, MAX_SECONDS)
    product = 2 * PRODUCT_SIZE**3 / best.pop("product")
    rows = []
    exact = calls[BASELINE]()
    for name, seconds in best.items():
        price = predicted(named.get(name, subquad.Exact()), length, case)
        error = float((calls[name]() - exact).norm() / exact.norm())
        rows.append(Row(length, name, seconds, best[BASELINE] / seconds, price.flops, price.peak_bytes, error))
    return rows, product


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out: cannot write to {error.filename or folder}: {error.strerror}") from error


def as_json(rows: list[Row], peak: float, case: Case) -> bytes:
    content = {
        "machine": f"{platform.machine()} {platform.system()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **asdict(case),
        "dtype": "float32",
        "product_flops_per_second": peak,
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(content, indent=1).encode()


def as_svg(rows: list[Row], title: str) -> bytes:
    """Plot time against length, with a line for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == name]
        axes.loglog([row.length for row in mine], [row.seconds for row in mine], "o-", label=name)
    axes.set_title(title, fontsize="small")
    axes.set(xlabel="length", ylabel="seconds")
    lengths = sorted({row.length for row in rows})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
