"""Which method to use: the fastest within an error budget, and the reason in a sentence.

time      from the calibration of this machine (`seconds`)
memory    counted (`cost`)
error     from the logit range (`error`), or measured on a sample (`measured_error`)

A model that is trained from scratch replaces no exact attention, so errors do not matter: all methods compete, and the
plan lists what they can recall (`recall`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from subquad import native
from subquad._calls.call import Call
from subquad._engines import engine_of
from subquad.methods.checks import check_choice
from subquad.methods.error_estimate import ErrorEstimate, LogitRange, check_max_error
from subquad.methods.method import feature_method
from subquad.planning.calibration_file import calibration
from subquad.planning.candidates import Errors, measured_errors, offered_methods, predicted_errors, trained_methods
from subquad.planning.cost import cost_of
from subquad.planning.measured_error import SAMPLE_MARGIN, error_meter
from subquad.planning.plan_result import Candidate, Plan, Purpose
from subquad.planning.progress import Progress
from subquad.planning.reason import Situation, reason_for
from subquad.planning.recall import recall_of
from subquad.planning.rows import sampled_call
from subquad.planning.shape import Shape, as_int, check_dtype

__all__ = ["best_of", "candidates_in", "plan", "planned"]

MAX_SIZE = 1 << 28  # of any size of a plan
DEFAULT_MAX_ERROR = 0.05


def plan(
    *, query_length: int | None = None, key_length: int | None = None, head_dim: int | None = None,
    value_dim: int | None = None, heads: int | None = None, key_heads: int | None = None, batch: int | None = None,
    is_causal: bool = False, training: bool | None = None, purpose: Purpose = "swap", max_error: float | None = None,
    logit_range: LogitRange | None = None, sample: tuple[Tensor, Tensor, Tensor] | None = None,
    scale: float | None = None, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """Return the fastest method for a shape whose relative error is at most `max_error`.

    Errors that are measured on a sample must stay within half of it, because rows that were not sampled may be worse.

    The machine is benchmarked on first use, in at most 30 s. If it is busy then, the reason says that times are rough,
    and a later plan benchmarks it again.

    Args:
        query_length, key_length, head_dim, value_dim, heads, key_heads, batch, is_causal: As for `cost`; sizes that are
            not given are taken from the sample.
        training: Whether to include the backward pass; by default only with purpose="train".
        purpose: "swap" to replace exact attention in a trained model. "train" for a model that is trained with the
            method from scratch: nothing is approximated, so neither an error nor a sample matters, and the plan lists
            the fastest methods with the size of their states and what they can recall.
        max_error: The largest acceptable relative error, 0.05 by default; None with purpose="train".
        logit_range: The range of the scaled logits, (low, high), or one number for both signs. Errors are then
            predicted, for values that do not depend on the logits, and for queries and keys of similar norm.
        sample: Query, key and value, as for `attention`. Errors are then measured, also those of Multipole and Window,
            which cannot be predicted, and methods that are fitted to the sample are candidates. The result applies to
            inputs of the same kind and length: a window covers a smaller part of a longer sequence.
        scale: With a sample, as for `attention`.
        device: Where to compute.
        dtype: Dtype of the inputs.
        progress: Called with (calls measured, total calls) while the machine is benchmarked.

    Example:
        >>> found = plan(query_length=1_000_000, head_dim=16, logit_range=0.5)
        >>> found.method
        Taylor(degree=2, basis='symmetric', key_shift=None, query_shift=None)
        >>> print(found.reason.partition(":")[0], found.choice.error, sep=": ")
        Taylor(2): up to about 0.022
        >>> print(plan(query_length=4096, head_dim=64, logit_range=20).reason)  # doctest: +ELLIPSIS
        Exact(): no feature map is accurate enough. With logits ... random features. A sample ...
        >>> print(plan(query_length=16_384, head_dim=64, heads=8, is_causal=True, purpose="train").reason)
        ... # doctest: +ELLIPSIS
        Linear('elu'): the fastest to train with at this length, ...
    """
    check_dtype(dtype)
    check_choice("purpose", purpose, ("swap", "train"))
    _check_knowledge(purpose, max_error, logit_range, sample, scale)
    max_error = DEFAULT_MAX_ERROR if max_error is None else max_error
    check_max_error(max_error)
    call = None if sample is None else _checked_sample(sample, is_causal, scale)
    sizes = dict(query_length=query_length, key_length=key_length, head_dim=head_dim, value_dim=value_dim, heads=heads,
                 key_heads=key_heads, batch=batch)  # fmt: skip
    sizes = {name: as_int(size) for name, size in sizes.items()}
    sizes = sizes if call is None else _completed(call, sizes)
    for name in ("query_length", "head_dim"):
        if sizes[name] is None:
            raise ValueError(f"{name}: expected an integer, or a sample to take it from, got None")
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    training = purpose == "train" if training is None else training
    shape = Shape.of(**given, is_causal=is_causal, training=training, least_length=1, most=MAX_SIZE)
    machine = calibration(device, dtype, progress)
    sample_length = None if call is None else call.layout.keys
    return planned(Situation(shape, machine, purpose, max_error, logit_range, sample_length, dtype), call)


def planned(situation: Situation, call: Call | None = None) -> Plan:
    """Return the plan for a situation, with a sample if there is one; arguments are not checked."""
    candidates = candidates_in(situation, call)
    best = best_of(candidates)
    reason = reason_for(best, candidates, situation)
    return Plan(best.method, reason, tuple(candidates), situation.max_error, situation.purpose)


def _check_knowledge(purpose: Purpose, max_error: Any, logit_range: Any, sample: Any, scale: float | None) -> None:
    """Raise ValueError if what is said about the inputs is contradictory, or not for this purpose."""
    for name, given in {"max_error": max_error, "logit_range": logit_range, "sample": sample}.items():
        if purpose == "train" and given is not None:
            raise ValueError(
                f"{name}: leave it out with purpose='train', which replaces no exact attention; got {given!r}"
            )
    if logit_range is not None and sample is not None:
        raise ValueError("sample: expected either logit_range or a sample, got both")
    if sample is None and scale is not None:
        raise ValueError(f"scale: expected None without a sample, because logit_range is already scaled, got {scale!r}")


def _checked_sample(sample: Any, is_causal: bool, scale: float | None) -> Call:
    if not isinstance(sample, tuple | list) or len(sample) != 3 or not all(isinstance(x, Tensor) for x in sample):
        kinds = [type(x).__name__ for x in sample] if isinstance(sample, tuple | list) else type(sample).__name__
        raise ValueError(f"sample: expected three tensors, a query, a key and a value, got {kinds}")
    call = sampled_call(*sample, is_causal=is_causal, scale=scale, enable_gqa=True)
    if not all(bool(x.isfinite().all()) for x in sample):
        raise ValueError("sample: expected finite numbers, got NaN or infinity among them")
    if call.is_empty or not bool(call.value.any()):
        raise ValueError("sample: expected queries, keys and values that are not all 0, got none")
    return call


def _completed(call: Call, sizes: dict[str, int | None]) -> dict[str, int | None]:
    """Return the given sizes, completed from the sample's."""
    layout = call.layout
    found: dict[str, int | None] = {
        "query_length": layout.queries, "key_length": layout.keys, "head_dim": layout.width,
        "value_dim": layout.value_width, "heads": layout.key_heads * layout.group, "key_heads": layout.key_heads,
        "batch": layout.rows // max(1, layout.key_heads),
    }  # fmt: skip
    name = "heads" if sizes["key_heads"] is None else "key_heads"
    if sizes[name] is not None and sizes[name] != layout.key_heads:
        raise ValueError(f"{name}: expected {layout.key_heads} key heads, like the sample's, got {sizes[name]}")
    if sizes["head_dim"] not in (None, layout.width):
        raise ValueError(f"sample: expected width {sizes['head_dim']}, as head_dim, got {layout.width}")
    if sizes["query_length"] is not None:  # Keys then follow the queries, not the sample,
        found["key_length"] = None
    if sizes["heads"] is not None:  # and key heads the heads.
        found["key_heads"] = None
    return {name: found[name] if size is None else size for name, size in sizes.items()}


def candidates_in(situation: Situation, call: Call | None = None) -> list[Candidate]:
    """Return all candidates, the fastest first."""
    shape = situation.shape
    # Without the kernels, Multipole is slower than exact attention, and neither it nor Window is timed.
    is_fast = native.available() and situation.machine.device == "cpu"
    offered = offered_methods(call, shape) if is_fast else ()
    if situation.purpose == "train":
        return _all_candidates(trained_methods(offered), situation)
    if call is None:
        errors = predicted_errors(situation.logit_range, shape.head_dim, situation.max_error, offered)
        return _all_candidates(errors, situation)
    measure = error_meter(call)
    errors = measured_errors(call, shape.head_dim, measure, offered)
    while True:  # The error of the best one is never just inferred.
        candidates = _all_candidates(errors, situation)
        best = best_of(candidates)
        if engine_of(best.method) == "exact" or best.error.known_by != "prediction":
            return candidates
        errors[best.method] = measure(best.method)


def best_of(candidates: list[Candidate]) -> Candidate:
    """Return the fastest candidate that is acceptable, in the form that `attention` takes."""
    return next(c for c in candidates if c.is_acceptable and c.is_chosen_form)


def _all_candidates(errors: Errors, situation: Situation) -> list[Candidate]:
    """Return every method in each of its forms, the fastest first."""
    found = (c for method, error in errors.items() for c in _in_forms(method, error, situation))
    return sorted(found, key=lambda c: c.seconds)


def _in_forms(method: Any, error: ErrorEstimate, situation: Situation) -> Iterator[Candidate]:
    machine, shape, is_trained = situation.machine, situation.shape, situation.purpose == "train"
    margin = 1.0 if situation.sample_length is None else SAMPLE_MARGIN  # also if inferred from what was measured
    is_acceptable = is_trained or error.is_within(situation.max_error / margin)
    chosen = machine.form_of(method, shape, situation.dtype)
    forms = [chosen]
    if engine_of(method) == "features" and chosen != "fused" and feature_method(method).normalizer != "feature":
        forms = [chosen] if is_trained else ["dense", "chunked" if shape.is_causal else "linear"]
    for form in forms:
        price = cost_of(method, shape, form, situation.dtype)
        yield Candidate(method, form, machine.seconds(method, shape, form), price.peak_bytes, price.state_bytes, error,
                        recall_of(method, shape), form == chosen, is_acceptable)  # fmt: skip
