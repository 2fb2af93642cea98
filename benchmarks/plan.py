"""Check the planner's predictions on this machine: crossover lengths, and choices.

    python benchmarks/plan.py [--heads 8]

First, for each width and method, the length from which it is faster than exact attention, predicted and measured.
Second, for each length, width and logit range, the choice of `plan` compared to the measured fastest of all methods
within the error budget. Attention is causal, forward, in float32.

Calibration and measurements alternate, because the speed of the machine can change by more than half within minutes:
this checks the cost model, not whether the calibration is still up to date.
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
MAX_PREDICTED_RATIO = 2.5  # Candidates that are predicted to take longer, relative to the best, are not measured.
TURNS = 3
MAX_CHOICE_RATIO = 1.3  # acceptable time of a choice, relative to the best


Cell = tuple[AnyMethod, int, int]  # method, length, width


def measure(best: dict[Cell, float], cells: set[Cell], heads: int) -> None:
    """Measure each call once more, and keep its best time."""
    for method, length, width in track(sorted(cells, key=str), "measuring"):
        inputs = torch.randn(3, 1, heads, length, width, generator=torch.Generator().manual_seed(0)) * 0.3
        attend = partial(subquad.attention, *inputs, is_causal=True, method=method)
        cell = method, length, width
        best[cell] = min(best.get(cell, math.inf), best_seconds(attend, repeats=2, at_least=0.03))


def crossover_cells() -> list[tuple[int, AnyMethod]]:
    """Return widths and methods whose crossover may lie within the measured lengths."""
    return [(d, m) for d, m in product(WIDTHS, METHODS) if not isinstance(m, Taylor) or m.size(d) <= 1000]


def measured_crossover(seconds: dict[Cell, float], method: AnyMethod, width: int) -> float | None:
    """Return the last crossing of both curves, interpolated linearly on logarithmic axes."""
    gains = [math.log(seconds[Exact(), n, width] / seconds[method, n, width]) for n in LENGTHS]
    for i, (a, b) in reversed(list(enumerate(pairwise(gains)))):
        if a <= 0 < b:
            return LENGTHS[i] * (LENGTHS[i + 1] / LENGTHS[i]) ** (a / (a - b))
        if b <= 0:
            break
    return None  # outside the measured lengths


def crossovers(seconds: dict[Cell, float], heads: int) -> list[dict]:
    rows = []
    for width, method in crossover_cells():
        predicted = subquad.crossover(Exact(), method, by="time", head_dim=width, heads=heads, is_causal=True)
        found = measured_crossover(seconds, method, width)
        rows.append(dict(width=width, method=label_of(method), measured=found, predicted=predicted))
    return rows


def rivals(plan: Plan) -> list[AnyMethod]:
    """Return the methods within the error budget that may be the fastest."""
    able = [c for c in plan.candidates if c.is_acceptable and c.is_chosen_form]
    return [c.method for c in able if c.seconds <= MAX_PREDICTED_RATIO * able[0].seconds or isinstance(c.method, Exact)]


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
    good = sum(row["ratio"] <= MAX_CHOICE_RATIO for row in chosen)
    lines += [
        "",
        f"{good} of {len(chosen)} choices ({good / len(chosen):.1%}) take at most {MAX_CHOICE_RATIO} times as long as "
        "the best.",
    ]
    return "\n".join(lines)


def make_plans(heads: int) -> dict[tuple[int, int, float], Plan]:
    return {
        (n, d, reach): subquad.plan(query_length=n, head_dim=d, heads=heads, is_causal=True, logit_range=reach)
        for n, d, reach in product(LENGTHS, WIDTHS, RANGES)
    }


def wanted(plans: dict[tuple[int, int, float], Plan]) -> set[Cell]:
    """Return everything to measure for plans and crossovers."""
    cells = {(method, n, d) for (n, d, _), plan in plans.items() for method in rivals(plan)}
    crossing = product(LENGTHS, crossover_cells())
    return cells | {(method, n, d) for n, (d, other) in crossing for method in (Exact(), other)}


def use(folder: str, calibration: Calibration) -> None:
    """Make `plan` use this calibration."""
    os.environ["SUBQUAD_CACHE"] = folder
    of = machine_of(torch.device("cpu"), torch.float32)
    calibrate_into(file_of(of), of, lambda: calibration)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Check the planner's predictions.")
    parser.add_argument("--heads", type=int, default=8)
    heads = parser.parse_args().heads
    warnings.filterwarnings("ignore", ".*weights can be negative")  # of Taylor(1), whose error is measured
    begin = time.perf_counter()
    first = calibrate(torch.device("cpu"))
    print(f"calibration: {time.perf_counter() - begin:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        use(folder, first)
        cells, seconds, best = wanted(make_plans(heads)), {}, [math.inf] * len(list(grid()))
        for _ in range(TURNS):  # Alternate, so that a change of speed affects both.
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
