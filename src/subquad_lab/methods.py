"""Methods named on the command line: "taylor:2" is `subquad.Taylor(degree=2)`."""

from collections.abc import Callable
from typing import Any

import subquad
from subquad_lab import UsageError

# name: the method's class, the argument that may follow the colon, and how to read it.
METHODS: dict[str, tuple[Callable[..., Any], str | None, type]] = {
    "exact": (subquad.Exact, None, str),
    "taylor": (subquad.Taylor, "degree", int),
    "random": (subquad.RandomFeatures, "num_features", int),
    "linear": (subquad.Linear, "activation", str),
    "separable": (subquad.Separable, None, str),
    "multipole": (subquad.Multipole, "top", int),
}

MOST_FEATURES = 1 << 16  # of a model that is trained


def parse_method(spec: str, option: str = "--method") -> Any:
    """Return the method that `spec` names; without a colon, the method with its defaults. Errors name the option."""
    name, colon, text = spec.partition(":")
    if name not in METHODS:
        raise UsageError(f"{option}: {spec!r} is unknown; expected one of {', '.join(METHODS)}")
    make, argument, read = METHODS[name]
    if not colon:
        return make()
    if argument is None:
        raise UsageError(f"{option}: {spec!r}: {name} takes nothing after the colon")
    try:
        value = read(text)
    except ValueError:
        raise UsageError(f"{option}: {spec!r}: {argument} must be a whole number, not {text!r}") from None
    try:
        return make(**{argument: value})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option}: {spec!r}: {error}") from error


def refuse_many_features(spec: str, width: int) -> None:
    """A method for heads of a width, before its features fill the memory."""
    method = parse_method(spec)
    size = method.size(width) if hasattr(method, "size") else 0
    if size > MOST_FEATURES:
        raise UsageError(f"method: {spec} has {size:,} features at width {width}; expected at most {MOST_FEATURES:,}")
