"""Are the planner's predictions right on this machine? Crossover lengths, and the choices that follow from them.

    python benchmarks/plan.py [--heads 8]

First: for each width and method, the length from which on it is quicker than exact attention, predicted and measured.
Then: for each length, width and range of logits, what `plan` chooses, against the quickest of all methods that keep the
error, each measured. Attention is causal, forward, in float32.
"""

import argparse
import math
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import torch
from results import machine, today, write_page
from rich.progress import track

import subquad
from subquad import Exact, Linear, RandomFeatures, Separable, Taylor
from subquad._calibration import calibration
from subquad._plan import describe, taylor
from subquad_lab.measure import best_seconds

WIDTHS, LENGTHS, RANGES = (16, 32, 64, 128), (256, 512, 1024, 2048, 4096, 8192), (0.1, 0.5, 1.5)
METHODS = (taylor(1), Taylor(2), RandomFeatures(64), RandomFeatures(256), Linear("elu"), Separable())
MOST = 2.5  # Candidates that are predicted to take more than so many times the best are not measured.
SLOW = 1.3  # A choice may take so many times as long as the best.


@dataclass
class Clock:
    """Seconds of a call, each measured once: the best of several."""

    heads: int

    def __post_init__(self) -> None:
        self.known: dict[tuple[object, int, int], float] = {}

    def seconds(self, method: object, length: int, width: int) -> float:
        key = (method, length, width)
        if key not in self.known:
            inputs = torch.randn(3, 1, self.heads, length, width, generator=torch.Generator().manual_seed(0)) * 0.3
            attend = partial(subquad.attention, *inputs, is_causal=True, method=method)
            self.known[key] = best_seconds(attend, repeats=3, at_least=0.15)
        return self.known[key]


def measured_crossover(clock: Clock, method: object, width: int) -> float | None:
    """Where the curves of both methods, straight between the measured lengths on logarithmic axes, cross for good."""
    gains = [math.log(clock.seconds(Exact(), n, width) / clock.seconds(method, n, width)) for n in LENGTHS]
    for i, (a, b) in reversed(list(enumerate(pairwise(gains)))):
        if a <= 0 < b:
            return LENGTHS[i] * (LENGTHS[i + 1] / LENGTHS[i]) ** (a / (a - b))
        if b <= 0:
            break
    return None  # Outside of what was measured.


def crossovers(clock: Clock) -> list[dict]:
    rows = []
    for width, method in track(list(product(WIDTHS, METHODS)), "crossovers"):
        if isinstance(method, Taylor) and method.size(width) > 1000:
            continue  # Its crossover lies beyond the lengths that are measured.
        found = measured_crossover(clock, method, width)
        predicted = subquad.crossover(Exact(), method, by="time", head_dim=width, heads=clock.heads, is_causal=True)
        rows.append(dict(width=width, method=describe(method), measured=found, predicted=predicted))
    return rows


def choices(clock: Clock) -> list[dict]:
    rows = []
    for length, width, reach in track(list(product(LENGTHS, WIDTHS, RANGES)), "choices"):
        plan = subquad.plan(query_length=length, head_dim=width, heads=clock.heads, is_causal=True, logit_range=reach)
        able = [c for c in plan.candidates if c.is_acceptable and c.is_chosen_form]
        measured = (c.method for c in able if c.seconds <= MOST * able[0].seconds or isinstance(c.method, Exact))
        times = {method: clock.seconds(method, length, width) for method in measured}
        best = min(times, key=lambda method: times[method])
        ratio = times[plan.method] / times[best]
        rows.append(dict(length=length, width=width, logit_range=reach, choice=describe(plan.method),
                         best=describe(best), ratio=ratio))  # fmt: skip
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


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Check the planner's predictions.")
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args()
    begin = time.perf_counter()
    calibration(progress=lambda done, total: print(f"\rcalibrating {done}/{total}", end="", flush=True))
    print(f"\ncalibration: {time.perf_counter() - begin:.1f} s")
    clock = Clock(options.heads)
    crossed, chosen = crossovers(clock), choices(clock)
    page = f"# Plan, {today()}\n\n{machine()}\n\n{options.heads} heads, causal, forward, float32.\n\n"
    write_page("plan", page + report(crossed, chosen) + "\n", [*crossed, *chosen])


if __name__ == "__main__":
    main()
