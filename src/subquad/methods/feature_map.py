"""The contract of a feature map: three members, which any object can have."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class FeatureMap(Protocol):
    """The three members that make any object, such as a learned `nn.Module`, a `method` of attention.

    A map with parameters for each head may say how many it has, `heads` and `key_heads`. One that is learned may have a
    fourth member, `for_layer(head_dim, heads, key_heads)`, which returns the map of one layer of a model; all layers
    share a map without it.

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
        """Map (..., heads, n, d) to features (..., heads, n, r).

        Queries have all query heads, keys their own, or a copy for each query head where masks differ between them.
        Both are already multiplied by the square root of the scale.

        May return a pair (features, log_scale) with log_scale (..., n); the true features are then
        `features * exp(log_scale)`. The log-scale of a query cancels in the normalizer; only `Hybrid` uses it.
        """
        ...
