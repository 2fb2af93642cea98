"""The summary at the top of the page: the machine, what was run, and up to four results as sentences with a number.

Each sentence comes from records or from the planner, and names the command that produces its number.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import subquad
from subquad.native import status
from subquad.planning.calibration_file import cached, machine
from subquad_lab.report.experiments import goodness
from subquad_lab.report.part import Material

MAX_HEADLINES = 4
LENGTH, HEADS, WIDTH, LOGIT_RANGE = 32_768, 8, 16, 0.5  # of the call that is planned


@dataclass(frozen=True)
class Headline:
    """A result: its number, the sentence about it, the command that produces it, and the section that shows more."""

    number: str
    text: str
    command: str
    section: str


def headlines(material: Material) -> list[Headline]:
    """Return the results to begin with: speed, theory, and the first experiments."""
    found = [*planned(), *checked(material.claims), *map(measured, material.sections)]
    return found[:MAX_HEADLINES]


def planned() -> list[Headline]:
    """Return the planner's choice for a long sequence, if this machine was calibrated: that takes half a minute."""
    if cached(torch.device("cpu"), torch.float32) is None:
        return []
    plan = subquad.plan(query_length=LENGTH, heads=HEADS, head_dim=WIDTH, logit_range=LOGIT_RANGE, is_causal=True)
    command = f"subquad plan --length {LENGTH} --heads {HEADS} --head-dim {WIDTH} --logit-range {LOGIT_RANGE}"
    text = (
        f"For {LENGTH:,} tokens, {HEADS} heads of width {WIDTH} and logits within ±{LOGIT_RANGE}, the planner chooses "
        f"{plan.reason}"
    )
    exact = next(candidate for candidate in plan.candidates if candidate.form == "exact")
    ratio = exact.seconds / plan.choice.seconds
    return [Headline(f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times", text, command, "cost")]


def checked(claims: Sequence[dict[str, Any]]) -> list[Headline]:
    if not claims:
        return []
    held = sum(claim["verdict"] != "fails" for claim in claims)
    mistakes = sum(any(check["is_mistake"] for check in claim["checks"]) for claim in claims)
    text = f"{held} of {len(claims)} claims of the theory hold when they are checked numerically."
    if mistakes:
        text += f" For {mistakes} of them a common mistake is checked too; where the claim holds, the mistake does not."
    return [Headline(f"{held} of {len(claims)}", text, "subquad verify", "claims")]


def measured(section: dict[str, Any]) -> Headline:
    """Return the best finished row of an experiment by validation result, or how far the first one is."""
    measure, rows = section["measure"], section["rows"]
    finished = [row for row in rows if row["score"] is not None]
    place = f"experiment-{section['name']}"
    if not finished:
        text = f"{section['name']}: not finished; {rows[0]['label']} has trained for {rows[0]['steps']:,} steps."
        return Headline(f"{rows[0]['steps']:,} steps", text, rows[0]["command"], place)
    best = max(finished, key=lambda row: goodness(row["score"], section["better"] == "higher"))
    others = f", the best of {len(finished)} by validation {measure}," if len(finished) > 1 else ""
    seeds = f" (mean over {best['seeds']} seeds, 95 % confidence)" if best["seeds"] > 1 else ""
    text = (
        f"{section['name']}: {best['label']}{others} has a test {measure} of {best['test']}{seeds} on {best['data']}."
    )
    return Headline(best["test"].partition(" ")[0], text, best["command"], place)


def environment() -> dict[str, str]:
    """Return what this machine is. The page shows it next to the versions that the runs recorded."""
    return {
        "processor": f"{str(machine(torch.device('cpu'), torch.float32)['device']).removeprefix('cpu: ')}, "
        f"{os.cpu_count()} cores",
        "software": f"subquad {subquad.__version__}, torch {torch.__version__}",
        "kernels": re.sub(r" \(_kernels.*\)", "", str(status())),
    }


def what_was_run(material: Material) -> list[dict[str, str]]:
    """Return for each experiment how much was run, and with which versions."""
    lines = []
    for section in material.sections:
        entries = [entry for group in section["groups"].values() for entry in group["entries"]]
        versions = sorted({_recorded(entry["versions"]) for entry in entries})
        rows = len(section["rows"])
        runs = f"{len(entries)} run{'s' if len(entries) > 1 else ''}"
        models = f" of {rows} configurations" if rows > 1 else ""
        lines.append({"name": section["name"], "what": f"{runs}{models}", "with": "; ".join(versions)})
    return lines


def _recorded(versions: dict[str, Any]) -> str:
    names = (("subquad", "subquad"), ("torch", "torch"), ("machine", ""), ("threads", "threads"))
    return ", ".join(f"{label} {versions[name]}".strip() for name, label in names if name in versions)
