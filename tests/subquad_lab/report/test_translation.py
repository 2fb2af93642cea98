"""Python as JavaScript: what is translated, and what is refused. tests/browser/test_cost.py compares the results."""

import functools
import re
from dataclasses import dataclass

import pytest

from subquad_lab.report.translation.expressions import Untranslatable
from subquad_lab.report.translation.program import Program

LIMITS = (1, 2.5)


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of this file count as those of the library."""
    monkeypatch.setattr("subquad_lab.report.translation.inspection.PACKAGES", (__name__.partition(".")[0],))


@dataclass(frozen=True)
class Box:
    width: int
    height: int = 2

    @property
    def area(self) -> int:
        return self.width * self.height

    def unused(self) -> str:
        with open("file") as file:  # outside the subset, but no other function asks for it
            return file.read()


def area_within(width: int, limits: tuple[float, float] = LIMITS) -> float:
    """Return an area."""
    return min(Box(width=width).area, limits[-1])


def threads() -> int:
    return 7


def per_thread(x: float) -> float:
    return x // threads()


def shadowed(default: int, var: int) -> list[int]:
    return [default for default in range(var) if default % 2]


def translated(*functions, **options) -> str:
    return Program(**options).javascript({function.__name__: function for function in functions})


def test_a_function_brings_its_class_and_constants_but_not_unused_methods() -> None:
    text = translated(area_within)
    assert "$Box extends py.Value" in text and "static $new(width, height = 2)" in text and "get area()" in text
    assert re.search(r"const \S+\$limits = \[1, 2.5\];", text)  # the default
    assert "$Box.$new(width).area" in text and "unused" not in text and "Return an area" not in text


def test_facts_are_answered_now() -> None:
    assert "py.floorDiv(x, (() => 7)())" in translated(per_thread, facts=[f"{__name__}.threads"])


def test_what_is_left_out_throws() -> None:
    text = translated(per_thread, left_out=[f"{__name__}.threads"])
    assert f'throw new Error("{__name__}.threads is not part of the page")' in text


def test_words_of_javascript_are_no_names() -> None:
    assert (
        "for (const default_ of py.range(var_)) if (py.truth(py.mod(default_, 2))) out.push(default_);"
        in translated(shadowed)
    )


def test_text_cannot_end_the_script() -> None:
    assert "<" not in Program().javascript({"text": "</script><!--"})


def with_statement(x):
    with x:
        return 1


def imports(x):
    import math

    return math.floor(x)


def sets(x):
    return set(x)


def matrix_product(x):
    return x @ x


def stepped(x):
    return x[::2]


def chained(x):
    return 1 < x + 1 < 3


def foreign(x):
    return re.compile(x)


def held():
    return PATTERN


PATTERN = re.compile("x")


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (with_statement, "With is not in the Python that the page can run"),
        (imports, "Import is not in"),
        (sets, "the page does not have set"),
        (matrix_product, "MatMult is not in"),
        (stepped, "a slice with a step"),
        (chained, "a chain of comparisons"),
        (foreign, "re.compile: expected a function of subquad"),
        (held, "PATTERN: expected a number"),
    ],
)
def test_other_python_is_refused_with_its_place(function, what) -> None:
    with pytest.raises(Untranslatable, match=re.escape(what)) as error:
        translated(function)
    if "is not in" in what:
        line = function.__code__.co_firstlineno + 1
        assert f"{__name__}, line {line}:" in str(error.value)


def test_a_cached_function_is_its_function() -> None:
    assert "py.floorDiv(x, 2)" in Program().javascript({"half": functools.cache(half)})


def half(x: int) -> int:
    return x // 2
