"""The theory as executable claims: a file or a folder per subject. To add a subject, add it to `SUBJECTS`."""

from subquad_lab.theory import attention, networks, optimizers, recurrence
from subquad_lab.theory.claims import CLAIMS, Claim

SUBJECTS = tuple(
    module.__name__.removeprefix(f"{__name__}.") for module in (attention, recurrence, optimizers, networks)
)


def all_claims() -> list[Claim]:
    """Return all claims, ordered by number."""
    return [CLAIMS[number] for number in sorted(CLAIMS)]
