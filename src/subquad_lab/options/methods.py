"""Methods named on the command line: "taylor:2" is `subquad.Taylor(degree=2)`."""

from typing import Any

from subquad.methods import FeatureMethod, resolve
from subquad_lab import UsageError

MOST_FEATURES = 1 << 16  # of a model that is trained


def parse_method(spec: str, option: str = "--method") -> Any:
    """Return the method that `spec` names; errors name the option."""
    try:
        return resolve(spec)
    except ValueError as error:
        raise UsageError(f"{option}: {str(error).removeprefix('method: ')}") from error


def refuse_many_features(spec: str, width: int) -> None:
    """A method for heads of a width, before its features fill the memory."""
    method = parse_method(spec)
    size = method.size(width) if isinstance(method, FeatureMethod) else 0
    if size > MOST_FEATURES:
        raise UsageError(f"method: {spec} has {size:,} features at width {width}; expected at most {MOST_FEATURES:,}")
