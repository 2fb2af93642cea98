"""The cost explorer: what methods cost at the reader's settings, how wrong they are, and what the planner would choose.

Python uses this module for the table of a page without scripts, and `cost_data` translates it, with everything that it
uses of the library, for the page itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import subquad.native as native
from subquad import (
    Candidate,
    ErrorEstimate,
    Exact,
    Linear,
    Multipole,
    Plan,
    RandomFeatures,
    Separable,
    Taylor,
    Window,
    error,
    optimal_scale,
)
from subquad.methods import label_of
from subquad.planning import Shape
from subquad.planning.cost import cost_of
from subquad.planning.crossover import find_crossover
from subquad.planning.plan import best_of, candidates_in, planned
from subquad.planning.reason import Situation
from subquad.planning.seconds import Calibration
from subquad.planning.text import rounded

MAX_LENGTH = 1 << 24
SINKS = 4  # first keys that the window keeps, as the planner's do


@dataclass(frozen=True)
class Settings:
    """What the reader chooses."""

    length: int
    heads: int
    width: int
    value_width: int
    degree: int
    features: int
    window: int
    logit_range: float
    max_error: float
    is_causal: bool
    training: bool


@dataclass(frozen=True)
class Measures:
    """A method at some settings."""

    name: str
    form: str
    seconds: float
    peak_bytes: int
    error: ErrorEstimate
    verdict: str  # on the error: "within", "above" or "measure"


def methods_at(settings: Settings) -> list[Any]:
    """Return one of each kind of method; Window and Multipole only where the native kernels compute them."""
    scale = optimal_scale(settings.width, 2 * settings.logit_range)
    methods = [
        Exact(),
        Taylor(settings.degree),
        RandomFeatures(settings.features),
        RandomFeatures(settings.features, "hyperbolic", scale=scale),
        Linear("elu"),
        Separable(),
    ]
    return [*methods, Window(settings.window, SINKS), Multipole()] if native.available() else methods


def shape_at(settings: Settings) -> Shape:
    return Shape(
        query_length=settings.length, key_length=settings.length, head_dim=settings.width,
        value_dim=settings.value_width, heads=settings.heads, key_heads=settings.heads, is_causal=settings.is_causal,
        training=settings.training,
    )  # fmt: skip


def measures_at(settings: Settings, machine: Calibration) -> list[Measures]:
    """Return every method's time, memory and error."""
    shape = shape_at(settings)
    return [measures_of(method, shape, settings, machine) for method in methods_at(settings)]


def measures_of(method: Any, shape: Shape, settings: Settings, machine: Calibration) -> Measures:
    form, price, wrong = machine.form_of(method, shape), cost_of(method, shape), error_of(method, settings)
    verdict = "measure" if wrong.relative is None else "within" if wrong.is_within(settings.max_error) else "above"
    return Measures(label_of(method), form, machine.seconds(method, shape, form), price.peak_bytes, wrong, verdict)


def error_of(method: Any, settings: Settings) -> ErrorEstimate:
    return error(method, logit_range=settings.logit_range, head_dim=settings.width)


def faster_from(settings: Settings, machine: Calibration) -> list[int | None]:
    """Return the length from which each method is faster than exact attention, to two digits; None if there is none."""

    def seconds(method: Any) -> Callable[[int], float]:
        return lambda length: machine.seconds(method, replace(shape, query_length=length, key_length=length))

    exact, *others = methods_at(settings)
    shape, exact_seconds = shape_at(settings), cache(seconds(exact))
    return [None, *(rounded(find_crossover(exact_seconds, seconds(other), MAX_LENGTH)) for other in others)]


def length_text(length: int | None) -> str:
    """Return a length from which a method is faster as the table shows it."""
    return "" if length is None else "any length" if length == 1 else f"{length:,} tokens"


def errors_by_range(settings: Settings, ranges: list[float]) -> list[list[float | None]]:
    """Return the error of every method for each logit range; None where only a sample could tell."""
    return [
        [error_of(method, own).relative for method in methods_at(own)]
        for own in (replace(settings, logit_range=bound) for bound in ranges)
    ]


def situation_at(settings: Settings, machine: Calibration) -> Situation:
    shape, bound = shape_at(settings), settings.logit_range
    return Situation(shape, machine, "swap", settings.max_error, bound, None, torch.float32)


def choice_at(settings: Settings, machine: Calibration) -> Candidate:
    """Return what `subquad.plan` would choose, among its own candidates."""
    return best_of(candidates_in(situation_at(settings, machine)))


def plan_at(settings: Settings, machine: Calibration) -> Plan:
    """Return the plan with its reason, which takes longer: it may compare all lengths."""
    return planned(situation_at(settings, machine))
