"""Checks of plain arguments, so that equal mistakes get equal messages."""

from collections.abc import Sequence
from math import inf


def check_whole(name: str, value: object, least: int, most: float = inf, meaning: str = "") -> None:
    """Raise ValueError unless `value` is an int, not a bool, in least..most."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = f"an integer from {least} to {int(most):,}" if most < inf else f"an integer >= {least}"
        kind = "a positive integer" if (least, most) == (1, inf) else kind
        raise ValueError(f"{name}: expected {kind}{meaning}, got {value!r}")
    if value > most:
        raise ValueError(f"{name}: expected an integer up to {int(most):,}, got {value:,}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
