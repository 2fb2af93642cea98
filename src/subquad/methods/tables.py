"""Constant tensors that follow from plain arguments: made once, then shared."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from typing import TypeVar, cast

from torch import Tensor

from subquad._torch_internals import mark_constant, with_fixed_sizes

Table = TypeVar("Table", bound=Callable[..., Tensor])


def constant(make: Table) -> Table:
    """Cache a function that makes a tensor from hashable arguments.

    The tensor is created in a separate thread: a tensor made inside torch.func or torch.compile belongs to that call
    and must not be kept for others.
    """

    @lru_cache(maxsize=64)
    def once(*arguments: object) -> Tensor:
        with ThreadPoolExecutor(1) as thread:
            return with_fixed_sizes(thread.submit(make, *arguments).result())

    @wraps(make)
    def made(*arguments: object) -> Tensor:
        return once(*arguments)

    mark_constant(made, make.__name__)
    return cast(Table, made)
