"""Result: what an engine returns."""

from typing import NamedTuple

from torch import Tensor

from subquad._calls.state import State


class Result(NamedTuple):
    """The output of a call, its new state if wanted, and the form that was executed."""

    output: Tensor
    state: State | None
    form: str
