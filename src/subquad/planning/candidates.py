"""The methods that a plan considers, and their errors: predicted from the logit range, or measured on a sample.

Each method says itself which of its values are worth considering (`Method.candidates`). Without a sample the number of
random features that just meets the budget is added, with the best scale for the range; with one, methods that are
fitted to it. Multipole and Window are added where the native kernels compute them: a sample tells their errors, a range
of logits does not.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil, sqrt
from typing import Any

from subquad._calls.call import Call
from subquad.methods import BUILT_IN, Exact, Linear, Multipole, RandomFeatures, Separable, Taylor, Window
from subquad.methods.error_estimate import NO_ERROR, UNKNOWN_ERROR, ErrorEstimate, LogitRange, as_range
from subquad.methods.random_features import CANDIDATE_COUNTS, Kind, optimal_scale
from subquad.planning.error import error, needed_features
from subquad.planning.fit import MIN_FIT_ROWS, fit_call
from subquad.planning.shape import Shape
from subquad.planning.sparse_pairs import has_places

MEASURED_COUNT = 256  # random features that are measured; the error of other numbers is inferred
FITTED_KINDS: tuple[Kind, ...] = ("positive", "hyperbolic")
MULTIPOLES = tuple(Multipole(top=top) for top in (12, 24, 48))
Errors = dict[Any, ErrorEstimate]


def predicted_errors(
    logit_range: LogitRange | None, width: int, max_error: float, offered: tuple[Any, ...] = ()
) -> Errors:
    """Return candidates and their errors, from the logit range alone."""
    methods: list[Any] = _feature_methods(width)
    if logit_range is not None:
        reach = 2 * max(map(abs, as_range(logit_range)))
        for kind in ("positive", "hyperbolic"):
            scale = optimal_scale(width, reach)
            needed = needed_features(max_error, reach, kind, scale=scale, head_dim=width)
            if needed <= CANDIDATE_COUNTS[-1]:
                methods.append(RandomFeatures(16 * ceil(needed / 16), kind, scale=scale))
    if logit_range is None:
        found = dict.fromkeys(methods, UNKNOWN_ERROR)
    else:
        found = {method: error(method, logit_range=logit_range, head_dim=width) for method in methods}
    return {Exact(): NO_ERROR, **found, **dict.fromkeys(offered, UNKNOWN_ERROR)}


def _feature_methods(width: int) -> list[Any]:
    return [method for kind in BUILT_IN if kind.engine == "features" for method in kind.candidates(width)]


def offered_methods(call: Call | None, shape: Shape) -> tuple[Any, ...]:
    """Return what only a sample can judge, where the native kernels compute it.

    A window that holds the keys of the sample would make no error there. Where the plan is for more keys than the
    sample has, at least half of the rows must look back farther than the window.
    """
    keys, lengths = shape.key_length, [(shape.query_length, shape.key_length)]
    longest = keys - 1
    if call is not None:
        sample = call.layout.keys
        longest = min(longest, sample // 2 if keys > sample else sample - 1)
        lengths.append((call.layout.queries, sample))
    windows = (w for w in Window.candidates(shape.head_dim) if w.reach <= longest)
    fitting = (w for w in windows if all(has_places(w, n, m, shape.is_causal) for n, m in lengths))
    return *(MULTIPOLES if call is not None else MULTIPOLES[:1]), *fitting


def trained_methods(offered: tuple[Any, ...]) -> Errors:
    """Return the positive methods, with usual settings, that a model can be trained with from scratch."""
    methods = (Exact(), Linear("elu"), Linear("relu"), Taylor(2), RandomFeatures(MEASURED_COUNT), Separable(), *offered)
    return dict.fromkeys(methods, UNKNOWN_ERROR) | {Exact(): NO_ERROR}


def measured_errors(
    call: Call, width: int, measure: Callable[[Any], ErrorEstimate], offered: tuple[Any, ...]
) -> Errors:
    """Return candidates and their errors on a sample, as they are and fitted to it."""
    found: Errors = {Exact(): NO_ERROR}
    plain: list[Any] = _feature_methods(width)
    for method in (*plain, *_fitted(call, plain)):
        if not isinstance(method, RandomFeatures):
            found[method] = measure(method)
        elif method.num_features == MEASURED_COUNT:
            # The error should fall with the root of the number of features; where the weights are far off it does not,
            # so no candidate is taken for that alone.
            own = found[method] = measure(method)
            for count in CANDIDATE_COUNTS:
                inferred = ErrorEstimate((own.relative or 0.0) * sqrt(MEASURED_COUNT / count), "prediction")
                found.setdefault(replace(method, num_features=count), inferred)
    return found | {method: measure(method) for method in offered}


def _fitted(call: Call, methods: list[Any]) -> list[Any]:
    """Return the methods that have something to fit, each kind fitted once: coordinates do not depend on the size."""
    if call.layout.queries < MIN_FIT_ROWS:
        return []
    examples: list[Any] = [Taylor(2), *(RandomFeatures(MEASURED_COUNT, kind) for kind in FITTED_KINDS)]
    fitted = {_kind(example): fit_call(example, call).method for example in examples}
    sizes = {"taylor": "degree", "random": "num_features"}
    found = [
        replace(fitted[_kind(method)], **{sizes[method.name]: getattr(method, sizes[method.name])})
        for method in methods
        if _kind(method) in fitted and method.degree > 0
    ]
    return [method for method in found if method not in methods]


def _kind(method: Any) -> tuple[str, str]:
    return method.name, getattr(method, "kind", "")
