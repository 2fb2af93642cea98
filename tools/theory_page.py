"""Writes docs/theory.md and its pictures from the claims of `subquad verify`: make docs.

A test compares the page with what would be written now.
"""

from pathlib import Path

from subquad_lab.theory import SUBJECTS, all_claims
from subquad_lab.theory.claims import Check, Claim, Finding, Setting, shown

DOCS = Path(__file__).parents[1] / "docs"
TITLES = {"attention": "Attention", "recurrence": "Recurrent networks", "optimizers": "Optimizers",
          "networks": "Convolutions and graphs"}  # fmt: skip
HEAD = """# The theory, checked

`subquad verify` runs the claims below: each is stated, checked on numbers, and can fail. This page is what it found
with seed 0; `make docs` writes it, and a test keeps it current. `subquad verify 12 --explain` does the same for one
claim here and now."""


def row(check: Check) -> str:
    outcome = "holds" if check.holds else "does not hold"
    what = f"*mistake:* {check.what}" if check.is_mistake else check.what
    cells = what.replace("|", r"\|"), shown(check), check.said, outcome
    return f"| {' | '.join(cells)} |"


def section(claim: Claim, finding: Finding) -> str:
    parts = [f"### {claim.number}. {claim.statement}", f"$$\n{claim.formula}\n$$"]
    if claim.mistake:
        parts.append(f"**Common mistake:** {claim.mistake}")
    parts.append("\n".join(f"- {step}" for step in finding.derivation))
    parts.append("\n".join(["| figure | found | said | |", "|---|---:|---:|---|", *map(row, finding.checks)]))
    parts.append(f"**Verdict:** {finding.verdict}.")
    if finding.picture is not None:
        parts.append(f"![claim {claim.number}]({picture_name(claim)})")
    return "\n\n".join(parts)


def picture_name(claim: Claim) -> str:
    return f"theory/claim-{claim.number:02}.svg"


def page(findings: dict[int, Finding]) -> str:
    parts = [HEAD]
    for subject in SUBJECTS:
        parts.append(f"## {TITLES[subject]}")
        parts += [section(claim, findings[claim.number]) for claim in all_claims() if claim.subject == subject]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    findings = {claim.number: claim.check(Setting()) for claim in all_claims()}
    (DOCS / "theory").mkdir(parents=True, exist_ok=True)
    (DOCS / "theory.md").write_text(page(findings))
    for claim in all_claims():
        picture = findings[claim.number].picture
        if picture is not None:
            (DOCS / picture_name(claim)).write_bytes(picture())


if __name__ == "__main__":
    main()
