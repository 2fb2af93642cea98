"""What is asked about functions and classes of Python."""

import dataclasses
import inspect
from typing import Any

from subquad_lab.report.translation.expressions import Untranslatable

PACKAGES = ("subquad", "subquad_lab")


def bound(
    name: str, parameters: dict[str, inspect.Parameter], arguments: list[str], keywords: dict[str, str]
) -> list[str]:
    """Return a call's arguments in order; `undefined` lets JavaScript take the default."""
    places = list(parameters)
    last = max((places.index(keyword) for keyword in keywords), default=-1)
    if len(arguments) > min(map(places.index, keywords)):
        raise Untranslatable(f"{name}: an argument twice, or a starred one before a keyword")
    return arguments + [keywords.get(place, "undefined") for place in places[len(arguments) : last + 1]]


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or the fields of a class, without self and cls."""
    found = inspect.signature(function).parameters
    return {name: p for name, p in found.items() if name not in ("self", "cls")}


def is_value(kind: type) -> bool:
    """Return whether a class is made from its fields."""
    return dataclasses.is_dataclass(kind) or issubclass(kind, tuple)


def is_ours(thing: Any) -> bool:
    return thing.__module__.partition(".")[0] in PACKAGES


def full_name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', thing)}"


def short_name(thing: Any) -> str:
    """Return a name that is unique in a program."""
    return f"{thing.__module__.replace('.', '_')}${thing.__qualname__.replace('.', '_')}"
