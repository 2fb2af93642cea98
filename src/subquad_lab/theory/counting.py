"""Counts of torch's operations in a call: FLOPs of matrix products, exponentials, and peak memory.

Operations inside fused kernels, torch's and the library's, cannot be counted. Therefore `attention` in this module
selects the form of the library that uses plain torch operations.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from subquad.testing import attention_in_form

aten = torch.ops.aten
EXPONENTIALS = {aten._softmax.default, aten._safe_softmax.default, aten.exp.default}
Order = Literal["linear", "quadratic"]
ORDERS: tuple[Order, ...] = ("linear", "quadratic")


def exact_in_plain_operations() -> AbstractContextManager[None]:
    """Return a context in which `Exact` materializes its weight matrix."""
    return sdpa_kernel(SDPBackend.MATH)


def attention(q: Tensor, k: Tensor, v: Tensor, *, method: Any, order: Order = "linear") -> Tensor:
    """Call `subquad.attention` on (L, D) without scaling, in plain operations; `Exact` ignores the order."""
    form: Literal["linear", "dense"] = "linear" if order == "linear" else "dense"
    with exact_in_plain_operations():
        return attention_in_form(*(x[None, None] for x in (q, k, v)), method=method, form=form, scale=1.0)[0, 0]


class Held(TorchDispatchMode):
    """Track the memory of all new tensors (`peak` in bytes) and count `exponentials`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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


class Counts(NamedTuple):
    result: Any
    flops: int  # of the matrix products; a multiply-add counts as 2
    exponentials: int
    peak_bytes: int  # of the tensors created in the call, including its result


def counted(call: Callable[[], object]) -> Counts:
    with FlopCounterMode(display=False) as counter, Held() as held:
        result = call()
    return Counts(result, counter.get_total_flops(), held.exponentials, held.peak)


Term = tuple[int, ...]  # the exponents of a product of sizes


def misfit(terms: Sequence[Term], sizes: Sequence[Sequence[int]], values: Sequence[float]) -> tuple[float, list[float]]:
    """Fit a sum of terms; return its largest relative error and the coefficients.

    >>> misfit([(2,), (1,)], [(1,), (2,), (3,)], [4.0, 14.0, 30.0])[1]
    [3.0, 1.0]
    """
    table = np.array([[np.prod(np.array(size, float) ** term) for term in terms] for size in sizes])
    wanted = np.array(values, float)
    found, *_ = np.linalg.lstsq(table / wanted[:, None], np.ones(len(wanted)), rcond=None)
    return float(np.abs(table @ found / wanted - 1).max()), [round(float(c), 6) for c in found]


def written(terms: Sequence[Term], names: str, factors: Sequence[float] | None = None) -> str:
    """Format a sum of terms.

    >>> written([(2, 0), (1, 1)], "LD"), written([(2, 0), (1, 1)], "LD", [4.0, 0.5])
    ('L^2 + L D', '4 L^2 + 0.5 L D')
    """
    products = (
        " ".join(name if power == 1 else f"{name}^{power}" for name, power in zip(names, term, strict=True) if power)
        for term in terms
    )
    if factors is None:
        return " + ".join(products)
    return " + ".join(f"{factor:.4g} {product}" for factor, product in zip(factors, products, strict=True))
