"""Methods named on the command line: "taylor:2" is `subquad.Taylor(degree=2)`."""

from typing import Any

from subquad.methods import BUILT_IN, FeatureMethod
from subquad_lab import UsageError

METHODS: dict[str, Any] = {kind.name: kind for kind in BUILT_IN}

MOST_FEATURES = 1 << 16  # of a model that is trained


def parse_method(spec: str, option: str = "--method") -> Any:
    """Return the method that `spec` names; without a colon, the method with its defaults. Errors name the option."""
    name, colon, text = spec.partition(":")
    if name not in METHODS:
        raise UsageError(f"{option}: {spec!r} is unknown; expected one of {', '.join(METHODS)}")
    kind = METHODS[name]
    if not colon:
        return kind()
    argument = kind.argument
    if argument is None:
        raise UsageError(f"{option}: {spec!r}: {name} takes nothing after the colon")
    try:
        value = type(getattr(kind(), argument))(text)  # read as the type of the default
    except ValueError:
        raise UsageError(f"{option}: {spec!r}: {argument} must be a whole number, not {text!r}") from None
    try:
        return kind(**{argument: value})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option}: {spec!r}: {error}") from error


def refuse_many_features(spec: str, width: int) -> None:
    """A method for heads of a width, before its features fill the memory."""
    method = parse_method(spec)
    size = method.size(width) if isinstance(method, FeatureMethod) else 0
    if size > MOST_FEATURES:
        raise UsageError(f"method: {spec} has {size:,} features at width {width}; expected at most {MOST_FEATURES:,}")
