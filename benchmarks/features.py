"""Compare the error of independent and orthogonal random features with the prediction for independent ones.

    python benchmarks/features.py

The error is the relative RMS error of the estimate of exp(q.k) over many draws, at several |q+k|.
"""

import argparse
import math
from collections.abc import Sequence

import torch
from results import machine, today, write_page

from subquad import RandomFeatures, error

DRAWS, COUNT, WIDTH = 2000, 64, 16


def measured(kind: str, orthogonal: bool, q: torch.Tensor, k: torch.Tensor) -> float:
    """Return the errors of several draws, each with its own seed."""
    total, exact = 0.0, math.exp(float(q @ k.mT))
    for seed in range(DRAWS):
        (a, log_a), (b, log_b) = (RandomFeatures(COUNT, kind, orthogonal, seed)(x) for x in (q, k))
        total += (float(a @ b.mT) * math.exp(float(log_a + log_b)) / exact - 1) ** 2
    return math.sqrt(total / DRAWS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the error of random features; write benchmarks/results/.")
    parser.parse_args(arguments)
    rows = []
    for kind in ("positive", "hyperbolic"):
        for norm in (0.5, 1.0, math.sqrt(2), 2.0):
            q, k = torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            q, k = (x * norm / (q + k).norm() for x in (q, k))
            iid, orthogonal = (measured(kind, flag, q, k) for flag in (False, True))
            predicted = error(RandomFeatures(COUNT, kind), logit_range=0, squared_norm=norm**2).relative
            rows.append(dict(kind=kind, norm=norm, predicted=predicted, independent=iid, orthogonal=orthogonal))
    lines = ["| kind | norm of q+k | predicted | independent | orthogonal | gain |", "|---|---:|---:|---:|---:|---:|"]
    lines += [
        "| {kind} | {norm:.2f} | {predicted:.4f} | {independent:.4f} | {orthogonal:.4f} | {gain:.2f}x |".format(
            **row, gain=row["independent"] / row["orthogonal"]
        )
        for row in rows
    ]
    title = f"# Random features, {today()}\n\n{machine()}\n\n{COUNT} features at width {WIDTH}, {DRAWS} draws each.\n\n"
    write_page("features", title + "\n".join(lines) + "\n", rows)


if __name__ == "__main__":
    main()
