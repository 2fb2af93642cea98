"""What torch did in a call, counted: multiplications, exponentials, and the most bytes that were held at one time."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

EXPONENTIALS = {torch.ops.aten._softmax.default, torch.ops.aten.exp.default}


def flops(call: Callable[[], object]) -> int:
    """Of the matrix products; a multiplication and an addition are 2."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


class Held(TorchDispatchMode):
    """Follows the memory of all tensors that are made: `peak` bytes at most; and counts `exponentials`."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = self.exponentials = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in EXPONENTIALS:
            self.exponentials += args[0].numel()
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.known | given:
                    self._hold(storage)
        return made

    def _hold(self, storage: Any) -> None:
        self.known.add(storage._cdata)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        finalize(storage, self._let_go, storage._cdata, storage.nbytes())

    def _let_go(self, mark: int, size: int) -> None:
        self.known.discard(mark)
        self.held -= size


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that tensors made in the call have held, its result included."""
    with Held() as held:
        result = call()
    del result
    return held.peak


def exponentials(call: Callable[[], object]) -> int:
    with Held() as held:
        call()
    return held.exponentials


Term = tuple[int, ...]  # the exponents of a product of sizes


def misfit(terms: Sequence[Term], sizes: Sequence[Sequence[int]], values: Sequence[float]) -> tuple[float, list[float]]:
    """The largest relative error of the best sum of terms, and the coefficients.

    >>> misfit([(2,), (1,)], [(1,), (2,), (3,)], [4.0, 14.0, 30.0])[1]
    [3.0, 1.0]
    """
    table = np.array([[np.prod(np.array(size, float) ** term) for term in terms] for size in sizes])
    wanted = np.array(values, float)
    found, *_ = np.linalg.lstsq(table / wanted[:, None], np.ones(len(wanted)), rcond=None)
    return float(np.abs(table @ found / wanted - 1).max()), [round(float(c), 6) for c in found]


def written(terms: Sequence[Term], names: str) -> str:
    """
    >>> written([(2, 0), (1, 1)], "LD")
    'L^2 + L D'
    """
    products = (
        " ".join(name if power == 1 else f"{name}^{power}" for name, power in zip(names, term, strict=True) if power)
        for term in terms
    )
    return " + ".join(products)
