"""Write the results of a benchmark as Markdown, JSON and SVG, with the date in the file names."""

import datetime
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import subquad

FOLDER = Path(__file__).parent / "results"


def machine() -> str:
    """Return the processor, the threads and the versions, without the host name."""
    processor = platform.machine()
    with_model = Path("/proc/cpuinfo")
    if with_model.exists():
        models = [line for line in with_model.read_text().splitlines() if line.startswith("model name")]
        processor = models[0].partition(":")[2].strip() if models else processor
    return (
        f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}, subquad {subquad.__version__}"
    )


def table(rows: Iterable[Any]) -> str:
    """Return a Markdown table; a method without results has a note."""
    lines = [
        "| length | method | time | speed against SDPA | peak memory | relative error |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [f"{row.length:,}", row.method, row.note, "", "", ""]
        if row.seconds is not None:
            cells[2:4] = f"{row.seconds * 1000:,.2f} ms", f"{row.speed:.2f}x"
        if row.peak_bytes is not None:
            cells[4:] = f"{row.peak_bytes / 2**20:,.1f} MiB", f"{row.relative_error:.2g}"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown(name: str, date: str, rows: Sequence[Any]) -> str:
    """Return the whole page, with a section for each shape and task."""
    parts = [
        f"# {name}, {date}",
        machine(),
        "Causal, float32, batch 1; normally distributed inputs, queries and keys with standard deviation 0.5. A speed "
        "above 1 is faster than SDPA on the same tensors. Peak memory is in addition to the inputs. Relative error is "
        "|out - exact| / |exact|: above 1 the output is worse than zeros.",
        f"![time against length]({name}_{date}.svg)",
    ]
    for (heads, width, task), group in groupby(rows, key=lambda row: (row.heads, row.width, row.task)):
        parts += [f"## {heads} heads of width {width}, {task}", table(group)]
    return "\n\n".join(parts) + "\n"


def draw(path: Path, rows: Sequence[Any]) -> None:
    """Plot time by length, with a panel for each shape and task."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "subquad"  # reproducible files
    from matplotlib import pyplot

    timed = [row for row in rows if row.seconds is not None and row.task != "decoding step"]
    panels = list(dict.fromkeys((row.heads, row.width, row.task) for row in timed))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 4), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        mine = [row for row in timed if (row.heads, row.width, row.task) == panel]
        for method in dict.fromkeys(row.method for row in mine):
            points = [(row.length, row.seconds) for row in mine if row.method == method]
            axis.loglog(*zip(*points, strict=True), marker="o", label=method)
        axis.set(title="{} heads of width {}\n{}".format(*panel), xlabel="length", ylabel="seconds")
        axis.set_xticks(lengths := sorted({row.length for row in mine}), [str(length) for length in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write(name: str, rows: Sequence[Any]) -> None:
    """Print the page, and write it with its data and plot under today's date."""
    write_page(name, markdown(name, today(), rows), [asdict(row) for row in rows])
    draw(FOLDER / f"{name}_{today()}.svg", rows)


def write_page(name: str, page: str, rows: Sequence[Any]) -> None:
    """Print a finished page, and write it with its data under today's date."""
    FOLDER.mkdir(exist_ok=True)
    stem = FOLDER / f"{name}_{today()}"
    stem.with_suffix(".md").write_text(page)
    data = {"date": today(), "machine": machine(), "rows": list(rows)}
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    print(page)
