"""Exact: softmax attention itself."""

from dataclasses import dataclass
from typing import ClassVar

from subquad.methods.error_estimate import NO_ERROR, ErrorEstimate
from subquad.methods.method import Engine, Method


@dataclass(frozen=True)
class Exact(Method):
    """Softmax attention, computed by torch's `scaled_dot_product_attention`. Its state is the keys and values so far.

    Example:
        >>> import torch
        >>> from subquad import attention
        >>> attention(*torch.ones(3, 1, 2, 5, 4), method=Exact()).shape
        torch.Size([1, 2, 5, 4])
    """

    name = "exact"
    engine: ClassVar[Engine] = "exact"
    family: ClassVar[str] = "exact"

    def error(
        self, low: float, high: float, spread: float | None = None, squared_norm: float | None = None,
        width: int | None = None,
    ) -> ErrorEstimate:  # fmt: skip
        return NO_ERROR
