"""Write docs/speed.svg, the figure of the README, from the newest pages in benchmarks/results: `make theory`.

speedup = time of torch's causal SDPA / time of the method     same machine, same process, forward pass
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from subquad_lab.figures.plots import svg

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
WINDOW = 256
FEATURES = {"elu": "Linear, elu + 1 *", "RandomFeatures(256)": "RandomFeatures(256) *", "Taylor(2)": "Taylor(2) *"}
Line = dict[int, float]  # speedup by length


def newest(name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the machine and the rows of the newest result with this name."""
    found = json.loads(max(RESULTS.glob(f"{name}_2*.json")).read_text())
    return found["machine"], found["rows"]


def lines() -> tuple[str, dict[str, Line]]:
    """Return the machine and the speedups by label; raise ValueError if the results are from several machines."""
    pages = {name: newest(name) for name in ("native_amd-epyc", "sparse", "multipole")}
    if len(machines := {machine for machine, _ in pages.values()}) > 1:
        raise ValueError(f"expected results of one machine, got {', '.join(sorted(machines))}")
    windows = [row for row in pages["sparse"][1] if row["table"] == "window" and row["size"] == WINDOW]
    found = {f"Window({WINDOW})": {row["length"]: row["sdpa, ms"] / row["window, ms"] for row in windows}}
    compared = pages["native_amd-epyc"][1][0]["against SDPA"][0]  # 8 heads of width 64
    found |= {label: {row["length"]: row["SDPA"] / row[name] for row in compared} for name, label in FEATURES.items()}
    speeds = [row for row in pages["multipole"][1] if row["table"] == "Speed"]
    found["Multipole(), on SmolLM2's layers"] = {row["length"]: row["times_as_fast"] for row in speeds}
    return machines.pop(), found


def figure() -> bytes:
    """Return the figure as SVG."""
    machine, found = lines()
    drawing = Figure(figsize=(7.5, 3.9), layout="constrained")
    axes = drawing.subplots()
    for label, line in found.items():
        axes.plot(list(line), list(line.values()), marker="o", markersize=3.5, label=label)
    axes.axhline(1, color="gray", linewidth=1)
    axes.text(270, 1.06, "torch's SDPA", color="gray", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = [length for length in sorted({length for line in found.values() for length in line}) if length != 32_768]
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50, 100, 200], ["0.5x", *(f"{n}x" for n in (1, 2, 5, 10, 20, 50, 100, 200))])
    axes.minorticks_off()
    axes.grid(color="0.9")
    axes.set_xlabel("tokens, causal, heads of width 64")
    axes.set_ylabel("speedup over torch's SDPA")
    axes.set_title(", ".join(machine.split(", ")[:2]), fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return svg(drawing)


if __name__ == "__main__":
    (ROOT / "docs/speed.svg").write_bytes(figure())
