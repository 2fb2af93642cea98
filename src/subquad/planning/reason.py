"""Why a plan chose its method, in a sentence or two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import comb, inf
from typing import Any

import torch

from subquad._engines import engine_of
from subquad.methods.error_estimate import LogitRange, as_range
from subquad.methods.random_features import optimal_scale
from subquad.planning.crossover import find_crossover
from subquad.planning.error import MAX_DEGREE, needed_degree, needed_features
from subquad.planning.measured_error import SAMPLE_MARGIN
from subquad.planning.plan_result import Candidate, Purpose
from subquad.planning.recall import recalls_all
from subquad.planning.seconds import Calibration
from subquad.planning.shape import Shape
from subquad.planning.text import duration, many, mebibytes, rounded, short

__all__ = ["Situation"]

MAX_USEFUL_FEATURES = 1 << 26  # More features than a sequence has tokens: then no distribution of logits helps.
MAX_LENGTH = 1 << 24


@dataclass(frozen=True)
class Situation:
    """What a plan is for."""

    shape: Shape
    machine: Calibration
    purpose: Purpose
    max_error: float
    logit_range: LogitRange | None
    sample_length: int | None  # keys of the sample, if there is one
    dtype: torch.dtype


def reason_for(best: Candidate, candidates: Sequence[Candidate], situation: Situation) -> str:
    """Return why `best` was chosen from the candidates, which are sorted by time."""
    exact = next(c for c in candidates if engine_of(c.method) == "exact")
    if situation.purpose == "train":
        reason = _fastest_to_train(best, exact, candidates, situation)
    else:
        reason = _swapped(best, exact, candidates, situation)
        if situation.sample_length is None:
            reason += _from_a_sample(best, exact, candidates)
    return reason + situation.machine.note


def _swapped(best: Candidate, exact: Candidate, candidates: Sequence[Candidate], situation: Situation) -> str:
    if best is not exact:
        return _faster(best, exact, situation)
    others = [c for c in candidates if c is not exact and c.is_acceptable and c.is_chosen_form]
    if others:
        return _fastest_is_exact(exact, others, situation)
    budget = f"{situation.max_error:g}"
    if situation.sample_length is not None:
        closest = min(
            (c for c in candidates if c is not exact),
            key=lambda c: inf if c.error.relative is None else c.error.relative,
        )
        return (
            f"Exact(): no approximation stays within {budget} on the sample, with a safety margin of "
            f"{SAMPLE_MARGIN:g}; the closest, {closest.name}, has a relative error of {closest.error}."
        )
    if situation.logit_range is None:
        return (
            f"Exact(): nothing is known about the logits, so no approximation can promise {budget}; pass "
            "logit_range= or sample=."
        )
    return _needs(situation, situation.logit_range)


def _from_a_sample(best: Candidate, exact: Candidate, candidates: Sequence[Candidate]) -> str:
    """Describe what a sample would change: it measures errors that are unknown without it."""
    unknown = [c for c in candidates if c.error.relative is None and c.is_chosen_form]
    faster = [c for c in unknown if c.seconds < best.seconds]
    if not faster:
        return " A sample would not change that: nothing else is faster here." if best is exact and unknown else ""
    # The slowest of each kind, such as the widest window: the most accurate one that would still help.
    kinds = {type(c.method): c for c in faster if engine_of(c.method) != "features"}
    shown = list(kinds.values()) or faster[:1]
    listed = " and ".join(f"{c.name} ({_speed(c, exact)})" for c in shown)
    return f" A sample of your queries, keys and values (sample=) would measure the error of {listed} too."


def _fastest_to_train(best: Candidate, exact: Candidate, candidates: Sequence[Candidate], situation: Situation) -> str:
    """Describe the fastest method, and the fastest one that can recall any token."""
    steps = "forward and backward" if situation.shape.training else "forward"
    first = f"{best.name}: the fastest to train with at this length, {duration(best.seconds)} {steps}"
    if best is exact:
        return f"{first}. It can recall all tokens."
    whole = next(c for c in candidates if recalls_all(c.method))
    other = f"{whole.name} is the fastest that can recall any token, {duration(whole.seconds)}"
    if whole is not exact:
        other += f", {_speed(whole, exact)}"
    return (
        f"{first}, {_speed(best, exact)}. It can recall {best.recall}, with a state of {mebibytes(best.state_bytes)}. "
        f"{other}. Only training can show which one learns your task."
    )


def _faster(best: Any, exact: Any, situation: Situation) -> str:
    times = f"{_speed(best, exact)} ({duration(best.seconds)} vs. {duration(exact.seconds)})"
    given, sample = "", situation.sample_length
    margin = "" if sample is None else f" with a safety margin of {SAMPLE_MARGIN:g}"
    if best.error.known_by == "prediction" and sample is None and hasattr(best.method, "num_features"):
        given = ", if queries and keys have similar norms (a sample would show)"
    elif sample is not None and sample < situation.shape.key_length:
        given = f" of a sample of {sample:,} tokens"
        if engine_of(best.method) == "sparse":
            given += " (a window sees a smaller part of a longer sequence)"
    return (
        f"{best.name}: {times}, with a relative error of {best.error}{given}, within {situation.max_error:g}{margin}."
    )


def _speed(one: Candidate, exact: Candidate) -> str:
    return f"{short(exact.seconds / one.seconds)} times as fast as exact attention"


def _fastest_is_exact(exact: Any, others: list[Any], situation: Situation) -> str:
    shape, first = situation.shape, f"Exact(): the fastest at this length, {duration(exact.seconds)}."
    fastest = others[0]
    slower = (
        f"{fastest.name}, the fastest approximation within {situation.max_error:g}, takes {duration(fastest.seconds)}"
    )
    if shape.query_length != shape.key_length:
        return f"{first} {slower}."
    exact_seconds = cache(_by_length(exact.method, situation))  # asked for the same lengths again and again
    lengths = {c: rounded(find_crossover(exact_seconds, _by_length(c.method, situation), MAX_LENGTH)) for c in others}
    earliest = min(others, key=lambda c: lengths[c] or inf)
    if lengths[earliest] is None:
        return f"{first} {slower}."
    winner = "it" if earliest is fastest else earliest.name
    return f"{first} {slower}; {winner} wins from about {lengths[earliest]:,} tokens on."


def _by_length(method: Any, situation: Situation) -> Callable[[int], float]:
    """Return the time of a method as a function of the length."""
    return lambda n: situation.machine.seconds(method, replace(situation.shape, query_length=n, key_length=n))


def _needs(situation: Situation, logit_range: LogitRange) -> str:
    """Say what a feature map would need to stay within the budget."""
    max_error, width = situation.max_error, situation.shape.head_dim
    degree, reach = needed_degree(max_error, logit_range), max(map(abs, as_range(logit_range)))
    scale, power = optimal_scale(width, 2 * reach), int(min(degree, MAX_DEGREE))
    random = needed_features(max_error, 2 * reach, "hyperbolic", scale=scale, head_dim=width)
    series = f"of a degree above {MAX_DEGREE}"
    if degree < inf:
        series = f"of degree {degree}, {many(comb(width + power, power))} features at width {width}"
    needs = (
        f"With logits up to {reach:g}, a relative error of {max_error:g} needs a Taylor series {series}, or "
        f"{many(random)} random features"
    )
    if min(comb(width + power, power), random) > MAX_USEFUL_FEATURES:
        return f"Exact(): no feature map is accurate enough. {needs}."
    return (
        f"Exact(): no approximation can promise {max_error:g} from the range alone. {needs}; a sample may show that "
        "fewer suffice."
    )
