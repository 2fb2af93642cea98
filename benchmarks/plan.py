"""Are the planner's predictions right on this machine? Crossover lengths, and the choices that follow from them.

    python benchmarks/plan.py [--heads 8]

First: for each width and method, the length from which on it is quicker than exact attention, predicted and measured.
Then: for each length, width and range of logits, what `plan` chooses, against the quickest of all methods that keep the
error, each measured. Attention is causal, forward, in float32.

The machine is calibrated in turn with the measurements, because its speed changes by more than half within minutes:
this checks the model of the costs, and not whether the machine still is as it was when it was calibrated.
"""

import argparse
import math
import os
import tempfile
import time
import warnings
from functools import partial
from itertools import pairwise, product

import torch
from results import machine, today, write_page
from rich.progress import track

import subquad
from subquad import Exact, Linear, Plan, RandomFeatures, Separable, Taylor
from subquad.methods import AnyMethod, label_of
from subquad.planning.calibration import calibrate, fitted, grid, one_turn
from subquad.planning.calibration_file import calibrate_into, file_of
from subquad.planning.calibration_file import machine as machine_of
from subquad.planning.seconds import Calibration
from subquad_lab.system.timing import best_seconds

WIDTHS, LENGTHS, RANGES = (16, 32, 64, 128), (256, 512, 1024, 2048, 4096, 8192), (0.1, 0.5, 1.5)
METHODS = (Taylor(1), Taylor(2), RandomFeatures(64), RandomFeatures(256), Linear("elu"), Separable())
MOST = 2.5  # candidates predicted to take longer than this, relative to the best, are not measured
TURNS = 3
SLOW = 1.3  # the longest time of a choice, relative to the best


Cell = tuple[AnyMethod, int, int]  # method, length, width


def measure(best: dict[Cell, float], cells: set[Cell], heads: int) -> None:
    """Measures each call once more, and keeps its best time."""
    for method, length, width in track(sorted(cells, key=str), "measuring"):
        inputs = torch.randn(3, 1, heads, length, width, generator=torch.Generator().manual_seed(0)) * 0.3
        attend = partial(subquad.attention, *inputs, is_causal=True, method=method)
        cell = method, length, width
        best[cell] = min(best.get(cell, math.inf), best_seconds(attend, repeats=2, at_least=0.03))


def crossover_cells() -> list[tuple[int, AnyMethod]]:
    """Widths and methods whose crossover may lie within the lengths that are measured."""
    return [(d, m) for d, m in product(WIDTHS, METHODS) if not isinstance(m, Taylor) or m.size(d) <= 1000]


def measured_crossover(seconds: dict[Cell, float], method: AnyMethod, width: int) -> float | None:
    """Where the curves of both methods, straight between the measured lengths on logarithmic axes, cross for good."""
    gains = [math.log(seconds[Exact(), n, width] / seconds[method, n, width]) for n in LENGTHS]
    for i, (a, b) in reversed(list(enumerate(pairwise(gains)))):
        if a <= 0 < b:
            return LENGTHS[i] * (LENGTHS[i + 1] / LENGTHS[i]) ** (a / (a - b))
        if b <= 0:
            break
    return None  # Outside of what was measured.


def crossovers(seconds: dict[Cell, float], heads: int) -> list[dict]:
    rows = []
    for width, method in crossover_cells():
        predicted = subquad.crossover(Exact(), method, by="time", head_dim=width, heads=heads, is_causal=True)
        found = measured_crossover(seconds, method, width)
        rows.append(dict(width=width, method=label_of(method), measured=found, predicted=predicted))
    return rows


def rivals(plan: Plan) -> list[AnyMethod]:
    """The methods that keep the error and may be the quickest."""
    able = [c for c in plan.candidates if c.is_acceptable and c.is_chosen_form]
    return [c.method for c in able if c.seconds <= MOST * able[0].seconds or isinstance(c.method, Exact)]


def choices(seconds: dict[Cell, float], plans: dict[tuple[int, int, float], Plan]) -> list[dict]:
    rows = []
    for (length, width, reach), plan in plans.items():
        times = {method: seconds[method, length, width] for method in rivals(plan)}
        best = min(times, key=lambda method: times[method])
        ratio = times[plan.method] / times[best]
        rows.append(dict(length=length, width=width, logit_range=reach, choice=label_of(plan.method),
                         best=label_of(best), ratio=ratio))  # fmt: skip
    return rows


def report(crossed: list[dict], chosen: list[dict]) -> str:
    lines = [
        "## Crossover lengths",
        "",
        "| width | method | measured | predicted | ratio |",
        "|---:|---|---:|---:|---:|",
    ]
    ratios = []
    for row in crossed:
        low, high = LENGTHS[0], LENGTHS[-1]
        if row["measured"] is None:
            measured, ratio = f"not within {low:,} to {high:,}", ""
            if row["predicted"] is not None and low < row["predicted"] < high:
                ratios.append(math.inf)  # a plain miss
        else:
            ratios.append((row["predicted"] or math.inf) / row["measured"])
            measured, ratio = f"{row['measured']:,.0f}", f"{ratios[-1]:.2f}"
        lines.append(f"| {row['width']} | {row['method']} | {measured} | {row['predicted'] or 0:,} | {ratio} |")
    within = sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios)
    lines += ["", f"{within} of {len(ratios)} predictions are within a factor of 1.5.", "", "## Choices", ""]
    lines += [
        "| length | width | logits up to | choice | best measured | times as long |",
        "|---:|---:|---:|---|---|---:|",
    ]
    lines += [
        "| {length:,} | {width} | {logit_range} | {choice} | {best} | {ratio:.2f} |".format(**row) for row in chosen
    ]
    good = sum(row["ratio"] <= SLOW for row in chosen)
    lines += [
        "",
        f"{good} of {len(chosen)} choices ({good / len(chosen):.1%}) take at most {SLOW} times as long as the best.",
    ]
    return "\n".join(lines)


def make_plans(heads: int) -> dict[tuple[int, int, float], Plan]:
    return {
        (n, d, reach): subquad.plan(query_length=n, head_dim=d, heads=heads, is_causal=True, logit_range=reach)
        for n, d, reach in product(LENGTHS, WIDTHS, RANGES)
    }


def wanted(plans: dict[tuple[int, int, float], Plan]) -> set[Cell]:
    """All that must be measured to judge the plans and the crossovers."""
    cells = {(method, n, d) for (n, d, _), plan in plans.items() for method in rivals(plan)}
    crossing = product(LENGTHS, crossover_cells())
    return cells | {(method, n, d) for n, (d, other) in crossing for method in (Exact(), other)}


def use(folder: str, calibration: Calibration) -> None:
    """From now on `plan` predicts by this one."""
    os.environ["SUBQUAD_CACHE"] = folder
    of = machine_of(torch.device("cpu"), torch.float32)
    calibrate_into(file_of(of), of, lambda: calibration)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Check the planner's predictions.")
    parser.add_argument("--heads", type=int, default=8)
    heads = parser.parse_args().heads
    warnings.filterwarnings("ignore", ".*weights can be negative")  # of Taylor(1), which is measured on purpose
    begin = time.perf_counter()
    first = calibrate(torch.device("cpu"))
    print(f"calibration: {time.perf_counter() - begin:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        use(folder, first)
        cells, seconds, best = wanted(make_plans(heads)), {}, [math.inf] * len(list(grid()))
        for _ in range(TURNS):  # The grid and the calls in turn: a machine that slows down slows down both.
            list(one_turn(best, torch.device("cpu"), torch.float32))
            measure(seconds, cells, heads)
        use(folder, fitted(best))
        plans = make_plans(heads)
        measure(seconds, wanted(plans) - cells, heads)
        crossed, chosen = crossovers(seconds, heads), choices(seconds, plans)
    page = f"# Plan, {today()}\n\n{machine()}\n\n{heads} heads, causal, forward, float32.\n\n"
    write_page("plan", page + report(crossed, chosen) + "\n", [*crossed, *chosen])


if __name__ == "__main__":
    main()
