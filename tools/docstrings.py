"""Docstrings as the documentation tools expect them: an extension of griffe, which parses them for the API reference.

Example:               -> Examples:         griffe knows the plural only
a, b: As for `cost`.   -> a: As for `cost`. one line for each parameter
                          b: As for `cost`.
"""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^Args:\n(?:(?: {4}.*)?\n)*", flags=re.MULTILINE)
SHARED = re.compile(r"^ {4}(\w+(?:, \w+)+):((?:.*)(?:\n {5,}.*)*)", flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of an object, if it has one."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = prepared(obj.docstring.value)


def prepared(text: str) -> str:
    """Return a docstring with sections that griffe parses."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    return SECTION.sub(lambda section: SHARED.sub(_one_line_each, section[0]), text + "\n").rstrip("\n")


def _one_line_each(found: re.Match[str]) -> str:
    return "\n".join(f"    {name}:{found[2]}" for name in found[1].split(", "))
