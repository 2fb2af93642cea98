"""Separable: softmax over the width of q times softmax over the length of k ("Efficient Attention", 2021).

    out_i = sum_c softmax_c(q_i) * sum_j softmax_j(k_jc) v_j

with d features, each with its own normalizer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from subquad.methods.method import FeatureMethod, Traits


@dataclass(frozen=True)
class Separable(FeatureMethod):
    """Softmax over the width of q times softmax over the length of k, for models that are trained with it.

    Example:
        >>> import torch
        >>> from subquad import attention
        >>> attention(*torch.ones(3, 1, 2, 5, 4), method=Separable(), is_causal=True).shape
        torch.Size([1, 2, 5, 4])
    """

    name = "separable"
    family: ClassVar[str] = "separable"
    normalizer = "feature"

    @property
    def native_map(self) -> str | None:
        return "separable"

    def size(self, width: int) -> int:
        return width

    def features(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, None]:
        return x, None  # The exponents are the keys themselves.

    def traits(self, width: int) -> Traits:
        return Traits(width, log_scales=width, making=width, kept=width, gradient=2 * width)

    @classmethod
    def candidates(cls, width: int) -> Iterable["Separable"]:
        return [cls()]
