"""Linear: products of simple activations, for models that are trained with it.

    elu        w = (elu(q) + 1).(elu(k) + 1)    positive
    relu       w = relu(q).relu(k)              positive
    identity   w = q.k                          the plain sum of x_j v_j, without a normalizer

with d features.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from subquad.methods.checks import check_choice
from subquad.methods.method import FeatureMethod, Traits


@dataclass(frozen=True)
class Linear(FeatureMethod):
    """Linear attention: softmax's exponential replaced by a product of activations.

    Args:
        activation: "elu" (elu + 1) and "relu" are positive and normalized. "identity" is the plain sum of x_j v_j; it
            is not normalized, because its weights can be negative and their sum can vanish.

    Example:
        >>> import torch
        >>> from subquad import attention
        >>> attention(*torch.ones(3, 1, 2, 5, 4), method=Linear()).shape
        torch.Size([1, 2, 5, 4])
    """

    name = "linear"
    argument = "activation"

    activation: Literal["elu", "relu", "identity"] = "elu"

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, ("elu", "relu", "identity"))

    @property
    def positive(self) -> bool:  # type: ignore[override]
        return self.activation != "identity"

    @property
    def normalizer(self) -> Literal["row", "none"]:  # type: ignore[override]
        return "none" if self.activation == "identity" else "row"

    @property
    def label(self) -> str:
        return f"Linear({self.activation!r})"

    @property
    def native_map(self) -> str | None:
        return self.activation

    @property
    def of_logits(self) -> Callable[[Tensor], Tensor] | None:
        return (lambda x: x) if self.activation == "identity" else None

    def size(self, width: int) -> int:
        return width

    def features(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, None]:
        return self(x), None

    def __call__(self, x: Tensor, *, is_query: bool = False) -> Tensor:
        """Map (..., n, d) to features of the same shape."""
        if self.activation == "identity":
            return x
        if self.activation == "relu":
            return F.relu(x)
        return x.clamp(max=0).exp() + F.relu(x)  # elu(x) + 1, in which small features would drown in the 1

    def traits(self, width: int) -> Traits:
        if self.activation == "identity":
            return Traits(width, gradient=width)
        if self.activation == "relu":
            return Traits(width, making=width, result=width, kept=width, gradient=2 * width)
        # An exponential, a line, and their sum.
        return Traits(width, making=3 * width, result=width, kept=3 * width, gradient=3 * width)

    @classmethod
    def candidates(cls, width: int) -> Iterable["Linear"]:
        return [cls("elu")]
