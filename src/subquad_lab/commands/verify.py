"""`subquad verify`: check the claims of the theory numerically."""

import json
import textwrap
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from subquad_lab import RunError, UsageError
from subquad_lab.figures.tables import Table
from subquad_lab.system.files import write_whole
from subquad_lab.system.text import say
from subquad_lab.theory import SUBJECTS, all_claims
from subquad_lab.theory.claims import Check, Claim, Finding, Setting, shown

COLUMNS = ("", "claim", "measured", "common mistake", "verdict", "s")


def run(which: list[str], as_json: bool, plots: str | None, seed: int, explain: bool) -> None:
    """Check claims and print a table, JSON or derivations.

    Raises:
        RunError: If a claim fails.
    """
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed: expected an integer in [0, 2^32), got {seed}")
    claims = chosen(which)
    folder = None if plots is None else made(plots)
    findings: dict[int, tuple[Finding, float]] = {}
    console = Console()
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for claim in claims:
            if console.is_terminal and not as_json:
                live.update(table(claims, findings).with_lines())
            begin = time.perf_counter()
            finding = claim.check(Setting(seed))
            findings[claim.number] = finding, time.perf_counter() - begin
            if folder is not None and finding.picture is not None:
                keep(folder / f"claim-{claim.number:02}.svg", finding.picture())
    if as_json:
        say(*json.dumps([record(claim, *findings[claim.number]) for claim in claims], indent=1).splitlines())
    elif explain:
        for claim in claims:
            say(*explained(claim, findings[claim.number][0]))
    elif console.is_terminal:
        table(claims, findings).print()
    else:
        for claim in claims:
            say(*line(claim, *findings[claim.number]).splitlines())
    failed = [claim.number for claim in claims if not findings[claim.number][0].holds]
    if failed:
        raise RunError(f"{len(failed)} of {len(claims)} claims fail: {', '.join(map(str, failed))}")


def chosen(which: list[str]) -> list[Claim]:
    """Return the claims with the given subjects or numbers, or all of them."""
    known = all_claims()
    wanted: list[Claim] = []
    for name in which:
        found = [claim for claim in known if name in (claim.subject, str(claim.number))]
        if not found:
            numbers = f"{known[0].number} to {known[-1].number}"
            raise UsageError(f"CLAIMS: expected {', '.join(SUBJECTS)}, or a number from {numbers}, got {name!r}")
        wanted += [claim for claim in found if claim not in wanted]
    return wanted or known


def made(plots: str) -> Path:
    folder = Path(plots)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plots: cannot create {folder}: {error.strerror}") from error
    return folder


def keep(path: Path, picture: bytes) -> None:
    try:
        write_whole(path, picture)
    except OSError as error:
        raise UsageError(f"--plots: cannot write {path}: {error.strerror}") from error


def first(finding: Finding, mistake: bool) -> Check | None:
    """Return the first check with an unexpected outcome, or else the first check, of the claim or of the mistake."""
    checks = [check for check in finding.checks if check.is_mistake == mistake]
    return next((c for c in checks if c.holds == c.is_mistake), checks[0] if checks else None)


def in_words(check: Check | None) -> str:
    return "" if check is None else f"{check.what}: {shown(check)} ({check.claimed})"


def table(claims: list[Claim], findings: dict[int, tuple[Finding, float]]) -> Table:
    rows, styles = [], {}
    for i, claim in enumerate(claims):
        cells = [str(claim.number), claim.statement, "...", "", "", ""]
        if claim.number in findings:
            finding, seconds = findings[claim.number]
            checks = (in_words(first(finding, is_mistake)) for is_mistake in (False, True))
            cells[2:] = [*checks, finding.verdict, f"{seconds:.1f}"]
            if not finding.holds:
                styles[i] = "bold red"
        rows.append(cells)
    return Table(COLUMNS, rows, styles=styles, section=1)


def line(claim: Claim, finding: Finding, seconds: float) -> str:
    """Return the result of a claim as one line, for logs and pipes."""
    mistake = first(finding, True)
    beside = f"; mistake: {in_words(mistake)}" if mistake else ""
    figure = in_words(first(finding, False))
    return f"{claim.number:2} {finding.verdict}  {claim.statement}  [{figure}{beside}]  {seconds:.1f} s"


def explained(claim: Claim, finding: Finding) -> list[str]:
    """Return the derivation with the numbers of this run, as lines."""
    lines = [f"{claim.number}. {claim.statement}", f"   {claim.formula}"]
    if claim.mistake:
        lines.append(f"   Common mistake: {claim.mistake}")
    lines.append("")
    for step in finding.derivation:
        lines += textwrap.wrap(step, 110, initial_indent="   ", subsequent_indent="   ")
    lines.append("")
    for check in finding.checks:
        kind = "mistake, " if check.is_mistake else ""
        lines.append(f"   {kind}{in_words(check)}: {'holds' if check.holds else 'does not hold'}")
    return [*lines, f"   Verdict: {finding.verdict}", ""]


def record(claim: Claim, finding: Finding, seconds: float) -> dict[str, Any]:
    """Return the result of a claim as a JSON object."""
    return {
        "number": claim.number, "subject": claim.subject, "statement": claim.statement, "formula": claim.formula,
        "mistake": claim.mistake, "verdict": finding.verdict, "holds": finding.holds, "seconds": round(seconds, 3),
        "derivation": finding.derivation,
        "checks": [{"what": check.what, "measured": check.measured, "claimed": check.claimed, "holds": check.holds,
                    "is_mistake": check.is_mistake} for check in finding.checks],
    }  # fmt: skip
