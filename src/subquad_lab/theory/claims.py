"""Claims that run. A claim states something in words and as a formula, checks it on numbers, and can fail.

What a claim says is computed by small functions and constants that stand before it; what it finds comes from the
library, from the lab's own models and optimizers, and from counts of what torch did. Where a mistake is common, the
claim checks that too, and holds only if the mistake does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, NamedTuple

from subquad_lab.theory.inputs import ROUNDING


@dataclass(frozen=True)
class Setting:
    """Of a check: where its random numbers begin, and how large its problems are, 0, 1 or 2."""

    seed: int = 0
    size: int = 1

    def of(self, *sizes: int) -> int:
        """One of three sizes."""
        return sizes[self.size]


class Check(NamedTuple):
    """What was found, beside what is said of it."""

    what: str
    found: float
    relation: Literal["=", "<=", ">="]
    bound: float
    holds: bool
    is_mistake: bool = False
    within: float = 0.0  # what `=` allows, as a part of the bound

    @property
    def said(self) -> str:
        """The tolerance of an equality too, unless it is that of rounding."""
        within = f" within {100 * self.within:g}%" if self.within > SAME else ""
        return f"{self.relation} {figure(self.bound)}{within}"


@dataclass(frozen=True)
class Finding:
    """Checks; the derivation, with the numbers of this run; and what draws a picture, as SVG."""

    checks: list[Check]
    derivation: list[str]
    picture: Callable[[], bytes] | None = None

    @property
    def holds(self) -> bool:
        return all(check.holds != check.is_mistake for check in self.checks)

    @property
    def verdict(self) -> str:
        if not self.holds:
            return "fails"
        return "holds, and the common mistake does not" if any(c.is_mistake for c in self.checks) else "holds"


@dataclass(frozen=True)
class Claim:
    number: int
    subject: str
    statement: str
    formula: str
    mistake: str | None
    check: Callable[[Setting], Finding] = field(repr=False)


CLAIMS: dict[int, Claim] = {}
Checked = Callable[[Setting], Finding]


def claim(number: int, statement: str, formula: str, mistake: str | None = None) -> Callable[[Checked], Checked]:
    """Enter a check into the list of claims, under the subject of its file or folder."""

    def entered(check: Checked) -> Checked:
        subject = check.__module__.removeprefix(f"{__package__}.").partition(".")[0]
        if number in CLAIMS:
            raise ValueError(f"number: {number} is that of another claim")
        CLAIMS[number] = Claim(number, subject, statement, formula, mistake, check)
        return check

    return entered


# --- Checks -------------------------------------------------------------------------------------------------------

SAME = 1e-9  # parts of a figure that rounding may change on its way through a whole computation
SMALL = 1e-5  # Bounds of errors below it are bounds of rounding, of float64 or of float32.


def equal(what: str, found: float, said: float, within: float = SAME, mistake: bool = False) -> Check:
    """To a part of what is said, or to that itself around 0."""
    holds = abs(found - said) <= within * max(abs(said), 1.0 if said == 0 else 0.0)
    return Check(what, found, "=", said, holds, mistake, within)


def at_most(what: str, found: float, bound: float, mistake: bool = False) -> Check:
    return Check(what, found, "<=", bound, isfinite(found) and found <= bound, mistake)


def at_least(what: str, found: float, bound: float, mistake: bool = False) -> Check:
    return Check(what, found, ">=", bound, found >= bound, mistake)


def figure(value: float) -> str:
    """Whole numbers whole, others with four digits.

    >>> figure(224892), figure(0.123456), figure(1e-12), figure(3.0)
    ('224,892', '0.1235', '1e-12', '3')
    """
    if value == int(value) and abs(value) < 1e9 if isfinite(value) else False:
        return f"{int(value):,}"
    return f"{value:.4g}"


def shown(check: Check) -> str:
    """What was found; a rounding error only by its bound, for it is another on another machine."""
    if check.relation == "<=" and check.holds and check.found >= 0:
        if check.found < ROUNDING <= check.bound:
            return f"below {ROUNDING:g}"
        if check.bound < SMALL:
            return f"below {check.bound:g}"
    return figure(check.found)


def small(error: float) -> str:
    """An error in a sentence, as what it does not exceed."""
    return f"{ROUNDING:g}" if error < ROUNDING else f"{error:.1g}"
