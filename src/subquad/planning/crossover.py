"""The length from which one method costs less than another."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from subquad.methods import AnyMethod, BlockSparse, MethodLike
from subquad.methods.checks import check_choice, check_whole
from subquad.planning.calibration_file import predicted_seconds
from subquad.planning.cost import cost_of, fixed_method
from subquad.planning.shape import Shape, as_int

__all__ = ["crossover", "find_crossover"]

SEARCH_STEP = 64  # lengths are tried in steps of this fraction
MAX_SINGLE_STEPS = 1024  # lengths that are tried one by one


def crossover(
    a: MethodLike, b: MethodLike, *, by: Literal["flops", "memory", "time"] = "flops", head_dim: int,
    value_dim: int | None = None, heads: int = 1, key_heads: int | None = None, batch: int = 1, is_causal: bool = False,
    training: bool = False, max_length: int = 1 << 24, seconds: Callable[[Any, Shape], float] | None = None,
) -> int | None:  # fmt: skip
    """Return the smallest length, of queries and keys, from which on `b` costs less than `a`; None if there is none.

    "From which on" means up to `max_length`: a short range where `b` happens to be cheaper does not count. Each length
    is priced in the form that `attention` takes for it. Calls are not causal by default, and the length depends on
    that: by operations, at width 64, it is 597 for Multipole if calls are causal, and 324 if they are not.

    Args:
        a: A method or its name.
        b: Another one.
        by: What to compare; "time" uses this machine's calibration, for float32 on the CPU.
        head_dim, value_dim, heads, key_heads, batch, is_causal, training: As for `cost`.
        max_length: The longest length to consider.
        seconds: With by="time", what to use instead of the calibration: seconds(method, shape).

    Example:
        >>> crossover("exact", "linear", head_dim=64)
        66
        >>> [crossover("exact", "taylor", head_dim=64, heads=8, is_causal=causal) for causal in (True, False)]
        [4486, 2179]
    """
    first, second = _comparable("a", a), _comparable("b", b)
    max_length = as_int(max_length)
    check_whole("max_length", max_length, 1)
    check_choice("by", by, ("flops", "memory", "time"))
    time = seconds or predicted_seconds

    def price(method: Any, n: int) -> float:
        shape = Shape.of(query_length=n, head_dim=head_dim, value_dim=value_dim, heads=heads, key_heads=key_heads,
                         batch=batch, is_causal=is_causal, training=training)  # fmt: skip
        if by == "time":
            return time(method, shape)
        found = cost_of(method, shape)
        return found.flops if by == "flops" else found.peak_bytes

    return find_crossover(partial(price, first), partial(price, second), max_length)


def _comparable(name: str, method: Any) -> AnyMethod:
    """Return the method of an argument, or raise an error that names the argument."""
    try:
        found = fixed_method(method)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}{str(error).removeprefix('method')}") from None
    if isinstance(found, BlockSparse):
        raise ValueError(f"{name}: the layout of a BlockSparse fits some lengths only; compare costs with cost()")
    return found


def find_crossover(price_a: Callable[[int], float], price_b: Callable[[int], float], max_length: int) -> int | None:
    """Return the smallest length from which on, up to `max_length`, b costs less than a.

    Prices change their form with the length, and have teeth where a chunk or a wave is not full. So the search looks
    for the last failure, from above: in steps of a 64th, then length by length inside the step. Where that step is wide
    it bisects first, which is right up to a tooth.
    """

    def is_dearer(n: int) -> bool:
        return not price_b(n) < price_a(n)

    if is_dearer(max_length):
        return None
    good, bad = max_length, max_length
    while bad > 1:
        bad = max(1, bad - max(1, bad // SEARCH_STEP))
        if is_dearer(bad):
            break
        good = bad
    else:
        return 1
    while good - bad > MAX_SINGLE_STEPS:
        middle = (good + bad) // 2
        good, bad = (good, middle) if is_dearer(middle) else (middle, bad)
    while not is_dearer(good - 1):
        good -= 1
    return good
