"""Executable claims. A claim is a statement with a formula that is checked numerically and can fail.

The claimed values are computed by small functions and constants next to the claim; the measured values come from the
library, from the lab's models and optimizers, and from counts of torch operations. If there is a common mistake, the
claim checks that too, and holds only if the mistake does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, NamedTuple

from subquad_lab.theory.inputs import ROUNDING


@dataclass(frozen=True)
class Setting:
    """The random seed and the problem size (0, 1 or 2) of a check."""

    seed: int = 0
    size: int = 1

    def of(self, *sizes: int) -> int:
        """Return one of three sizes."""
        return sizes[self.size]


class Check(NamedTuple):
    """A measured value and the claim about it."""

    what: str
    measured: float
    relation: Literal["=", "<=", ">="]
    bound: float
    holds: bool
    is_mistake: bool = False
    within: float = 0.0  # relative tolerance of `=`

    @property
    def claimed(self) -> str:
        """The claim as text, with the tolerance of an equality unless it is only for rounding."""
        within = f" within {100 * self.within:g}%" if self.within > DEFAULT_TOLERANCE else ""
        return f"{self.relation} {figure(self.bound)}{within}"


@dataclass(frozen=True)
class Finding:
    """The checks of a claim, its derivation with the numbers of this run, and a function that draws a plot as SVG."""

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
    """Register a check as a claim, under the subject of its file or folder."""

    def entered(check: Checked) -> Checked:
        subject = check.__module__.removeprefix(f"{__package__}.").partition(".")[0]
        if number in CLAIMS:
            raise ValueError(f"number: expected a new claim number, got {number}, which exists")
        CLAIMS[number] = Claim(number, subject, statement, formula, mistake, check)
        return check

    return entered


# --- Checks -------------------------------------------------------------------------------------------------------

DEFAULT_TOLERANCE = 1e-9  # relative error that rounding may cause in a whole computation
MAX_ROUNDING_BOUND = 1e-5  # Smaller bounds are bounds of rounding errors, in float64 or float32.


def equal(
    what: str, measured: float, claimed: float, within: float = DEFAULT_TOLERANCE, mistake: bool = False
) -> Check:
    """Check equality with a relative tolerance, which is absolute if the claimed value is 0."""
    holds = abs(measured - claimed) <= within * max(abs(claimed), 1.0 if claimed == 0 else 0.0)
    return Check(what, measured, "=", claimed, holds, mistake, within)


def at_most(what: str, measured: float, bound: float, mistake: bool = False) -> Check:
    return Check(what, measured, "<=", bound, isfinite(measured) and measured <= bound, mistake)


def at_least(what: str, measured: float, bound: float, mistake: bool = False) -> Check:
    return Check(what, measured, ">=", bound, measured >= bound, mistake)


def figure(value: float) -> str:
    """Format integers with commas, and other numbers with four digits.

    >>> figure(224892), figure(0.123456), figure(1e-12), figure(3.0)
    ('224,892', '0.1235', '1e-12', '3')
    """
    if value == int(value) and abs(value) < 1e9 if isfinite(value) else False:
        return f"{int(value):,}"
    return f"{value:.4g}"


def shown(check: Check) -> str:
    """Format the measured value; a rounding error only by its bound, because it differs between machines."""
    if check.relation == "<=" and check.holds and check.measured >= 0:
        if check.measured < ROUNDING <= check.bound:
            return f"below {ROUNDING:g}"
        if check.bound < MAX_ROUNDING_BOUND:
            return f"below {check.bound:g}"
    return figure(check.measured)


def small(error: float) -> str:
    """Format an error for a sentence, as an upper bound."""
    return f"{ROUNDING:g}" if error < ROUNDING else f"{error:.1g}"
