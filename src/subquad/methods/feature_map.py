"""The contract of a feature map: three members, which any object can have."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class FeatureMap(Protocol):
    """The three members that make any object, such as a learned `nn.Module`, a `method` of attention.

    Attributes:
        positive: Whether phi(q).phi(k) >= 0 always. Then every output lies within the range of the values it sees.

    Example:
        >>> import torch
        >>> class Squares:
        ...     positive = True
        ...     def size(self, width: int) -> int:
        ...         return width
        ...     def __call__(self, x: torch.Tensor, *, is_query: bool) -> torch.Tensor:
        ...         return x.square()
        >>> from subquad import attention
        >>> q = k = v = torch.ones(1, 2, 5, 4)
        >>> attention(q, k, v, method=Squares()).shape
        torch.Size([1, 2, 5, 4])
    """

    positive: bool

    def size(self, width: int) -> int:
        """Return the number of features r for inputs of this width."""
        ...

    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor | tuple[Tensor, Tensor]:
        """Map (..., n, d) to features (..., n, r).

        May return a pair (features, log_scale) with log_scale (..., n); the true features are then
        `features * exp(log_scale)`. The log-scale of a query cancels in the normalizer and is not used.
        """
        ...
