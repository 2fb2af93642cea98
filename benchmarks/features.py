"""Compare random features at an equal number: FAVOR+, hyperbolic pairs, the optimal scale, and simplex draws.

    python benchmarks/features.py

The error is the relative RMS error of the estimate of exp(q.k) over many draws, at several |q+k|. The prediction is for
independent draws. The optimal scale is the one for the |q+k|^2 of the row.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from results import machine, today, write_page
from torch import Tensor

from subquad import RandomFeatures, error, optimal_scale

DRAWS, COUNT, WIDTH = 2000, 64, 16
NORMS = (0.5, 1.0, math.sqrt(2), 2.0, math.sqrt(8))
MAPS = {
    "positive (FAVOR+)": ("positive", False), "hyperbolic": ("hyperbolic", False),
    "positive, optimal scale": ("positive", True), "hyperbolic, optimal scale": ("hyperbolic", True),
}  # fmt: skip
COUPLINGS = ("independent", "orthogonal", "simplex")


def measured(method: RandomFeatures, matrices: Tensor, q: Tensor, k: Tensor) -> float:
    """Return the relative RMS error over matrices (draws, rows, width)."""
    (a, log_a), (b, log_b) = (method.features(x, matrices) for x in (q, k))
    estimates = (a * b).sum(-1) * (log_a + log_b - (q * k).sum(-1)).exp()
    return float((estimates - 1).square().mean().sqrt())


def rows_of(norm: float) -> list[dict[str, Any]]:
    """Return a row of the table for each map."""
    q, k = torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k = (x * norm / (q + k).norm() for x in (q, k))
    rows = []
    for name, (kind, is_scaled) in MAPS.items():
        method = RandomFeatures(COUNT, kind, scale=optimal_scale(WIDTH, norm**2) if is_scaled else 0.0)
        found: dict[str, Any] = dict(features=name, norm=norm, scale=method.scale)
        found["predicted"] = error(method, logit_range=0, squared_norm=norm**2, head_dim=WIDTH).relative
        for coupling in COUPLINGS:
            drawn = RandomFeatures(DRAWS * method.rows, coupling=coupling).draw(WIDTH)
            found[coupling] = measured(method, drawn.view(DRAWS, method.rows, WIDTH), q, k)
        rows.append(found)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the error of random features; write benchmarks/results/.")
    parser.parse_args(arguments)
    rows = [row for norm in NORMS for row in rows_of(norm)]
    lines = [
        "| norm of q+k | features | scale | predicted | independent | orthogonal | simplex |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        "| {norm:.2f} | {features} | {scale:.4f} | {predicted:.4f} | {independent:.4f} | {orthogonal:.4f} "
        "| {simplex:.4f} |".format(**row)
        for row in rows
    ]
    title = f"# Random features, {today()}\n\n{machine()}\n\n"
    text = (
        f"{COUNT} features at width {WIDTH}, {DRAWS:,} draws each. The square of a feature is heavy-tailed. From a "
        f"norm of 2 on, {DRAWS:,} draws understate the error of FAVOR+ and its pairs, at 2.83 by more than a factor "
        "of 3. The prediction is right, as tests/subquad/test_feature_variance.py verifies by importance sampling. "
        "With the optimal scale, measured errors at 2.83 are off by up to 20 %, in both directions.\n\n"
    )
    write_page("features", title + text + "\n".join(lines) + "\n", rows)


if __name__ == "__main__":
    main()
