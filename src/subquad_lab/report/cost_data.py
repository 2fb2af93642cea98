"""What the cost explorer of the page needs: its sliders, a table for one setting, and its formulas as a script."""

from dataclasses import asdict
from typing import Any

import torch

from subquad.planning.calibration import reference_calibration
from subquad.planning.calibration_file import cached
from subquad.planning.seconds import Calibration
from subquad.planning.text import duration, mebibytes, short
from subquad_lab.report import cost_explorer as explorer
from subquad_lab.report.cost_explorer import Settings
from subquad_lab.report.part import Material
from subquad_lab.report.translation.program import Program

START = Settings(
    length=16_384, heads=8, width=16, value_width=16, degree=2, features=256, window=512, logit_range=0.5,
    max_error=0.05, is_causal=True, training=False,
)  # fmt: skip
WIDTHS = [8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256]
POWERS = [1 << power for power in range(4, 14)]
SLIDERS: dict[str, tuple[str, list[float]]] = {
    "length": ("Length, tokens", sorted([*(1 << p for p in range(6, 21)), *(3 << p for p in range(5, 19))])),
    "heads": ("Heads", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
    "width": ("Width of a head", [*WIDTHS]),
    "value_width": ("Width of its values", [*WIDTHS]),
    "degree": ("Degree of Taylor", [*range(9)]),
    "features": ("Random features", [*POWERS]),
    "window": ("Window, keys", [*POWERS]),
    "logit_range": (
        "Logit range, ±",
        [0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20],
    ),
    "max_error": ("Allowed error", [0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5]),
}
SWITCHES = {"is_causal": "Causal", "training": "With backward pass"}
# What the formulas ask about this machine, and what they never need here: tensors, samples, and users' own maps.
FACTS = (
    "subquad.native.available", "subquad._torch_internals.has_open_size", "subquad._torch_internals.in_onnx_export",
    "torch.get_num_threads",
)  # fmt: skip
LEFT_OUT = (
    "torch.Tensor", "subquad._calls.call.Call", "subquad.methods.alignment._summary",
    "subquad.methods.block_sparse.BlockSparse", "subquad.methods.hedgehog.Hedgehog", "subquad.methods.hybrid.Hybrid",
    "subquad.methods.method.UserMap", "subquad.methods.names.method_named", "subquad.planning.plan_result.Plan.__str__",
)  # fmt: skip


def machine() -> Calibration:
    """Return the calibration of this machine if there is one; a report does not stop to measure."""
    return cached(torch.device("cpu")) or reference_calibration()


def data(material: Material) -> dict[str, Any]:
    """Return the sliders, the settings at the start, and the table for them."""
    found, is_calibrated = machine(), cached(torch.device("cpu")) is not None
    plan = explorer.plan_at(START, found)
    exact, *_ = rows = explorer.measures_at(START, found)
    return {
        "sliders": [{"name": name, "label": label, "values": values} for name, (label, values) in SLIDERS.items()],
        "switches": [{"name": name, "label": label} for name, label in SWITCHES.items()],
        "start": asdict(START),
        "calibrated": is_calibrated,
        "rows": [
            [row.name, duration(row.seconds), f"{short(exact.seconds / row.seconds)} x", explorer.length_text(length),
             mebibytes(row.peak_bytes), str(row.error)]
            for row, length in zip(rows, explorer.faster_from(START, found), strict=True)
        ],
        "choice": plan.choice.name,
        "reason": plan.reason.removeprefix(f"{plan.choice.name}: "),
    }  # fmt: skip


def model(calibration: Calibration | None = None) -> str:
    """Return the script that makes `Subquad.costModel`: the functions of `cost_explorer`, on a calibration."""
    roots = {
        "Settings": Settings, "machine": machine() if calibration is None else calibration, "duration": duration,
        "mebibytes": mebibytes, "short": short,
        **{function.__name__: function for function in (
            explorer.measures_at, explorer.errors_by_range, explorer.choice_at, explorer.plan_at, explorer.faster_from,
            explorer.length_text,
        )},
    }  # fmt: skip
    body = Program(FACTS, LEFT_OUT).javascript(roots)
    return f'"use strict";\nSubquad.costModel = (() => {{\nconst py = Subquad.python;\n{body}\n}})();\n'
