"""Methods named on the command line: "taylor:2" is `subquad.Taylor(degree=2)`.

"window:64+hedgehog" is `subquad.Hybrid(Window(64), Hedgehog())`, of which each layer makes its own.
"""

from typing import Any

from subquad.methods import FeatureMap, FeatureMethod, Hybrid, resolve
from subquad_lab import UsageError

MAX_FEATURES = 1 << 16  # of a method in a model that is trained


def parse_method(spec: str, option: str = "--method") -> Any:
    """Return the method named by `spec`; errors name the option."""
    try:
        return resolve(spec)
    except ValueError as error:
        raise UsageError(f"{option}: {str(error).removeprefix('method: ')}") from error


def parse_methods(specs: str, option: str = "--method") -> tuple[Any, ...]:
    """Return the methods named by a list such as "window:16,taylor:2", one for each layer in turn."""
    return tuple(parse_method(spec.strip(), option) for spec in specs.split(","))


def refuse_many_features(spec: str, width: int, option: str = "--method") -> None:
    """Raise if a method has too many features at this head width to fit into memory."""
    method = parse_method(spec, option)
    method = method.far if isinstance(method, Hybrid) else method
    size = method.size(width) if isinstance(method, FeatureMethod | FeatureMap) else 0
    if size > MAX_FEATURES:
        raise UsageError(
            f"{option}: expected at most {MAX_FEATURES:,} features, got {size:,} for {spec} at width {width}"
        )
