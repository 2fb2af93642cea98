"""Exchanges that autograd records: one node in the graph, which sends gradients back the way the numbers came.

Inside the node, every part of the work has a graph of its own. So the order of messages is the order of our loops, the
same on all ranks, and not the order in which autograd happens to visit nodes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Exchange(ABC):
    """One call over several ranks."""

    is_recorded = False

    @abstractmethod
    def forward(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Return the results of this rank."""

    @abstractmethod
    def backward(self, *grads: Tensor | None) -> Sequence[Tensor | None]:
        """Return the gradients of the tensors; called once, on all ranks."""

    def run(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the call, and let autograd differentiate it if a tensor needs a gradient on this rank."""
        self.is_recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if not self.is_recorded:
            return self.forward(*tensors)
        found: tuple[Tensor, ...] = _Node.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return found

    def recording(self) -> AbstractContextManager[Any]:
        """Return the context in which parts of the work are computed."""
        return torch.set_grad_enabled(self.is_recorded)

    def leaf(self, tensor: Tensor) -> Tensor:
        """Return a tensor with which the graph of a part begins."""
        return tensor.detach().requires_grad_(self.is_recorded)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return exchange.forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.exchange is None:
            raise RuntimeError("subquad.distributed: the gradients of a call can be computed only once")
        exchange, ctx.exchange = ctx.exchange, None
        return None, *exchange.backward(*grads)


def gradients(
    results: Sequence[Tensor], grads: Sequence[Tensor | None], leaves: Sequence[Tensor], keeps_graph: bool = False
) -> list[Tensor]:
    """Return the gradients of leaves, given those of results; None stands for 0."""
    pairs = [(x, grad) for x, grad in zip(results, grads, strict=True) if grad is not None and x.requires_grad]
    if not pairs or not leaves:
        return [torch.zeros_like(x) for x in leaves]
    theirs, given = [x for x, _ in pairs], [grad for _, grad in pairs]
    return list(torch.autograd.grad(theirs, leaves, given, keeps_graph, allow_unused=True, materialize_grads=True))
