"""Feature maps with parameters, for the methods that a model is converted to.

    Projected    phi(A x), with a matrix A for each head, one for queries and one for keys; A = I at first

The method phi itself stays as it is, so an untrained map changes nothing. `Hedgehog` has matrices of its own.

Axes: b batch, h key heads, g query heads per key head, n queries, m keys, d width, r features.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import subquad
from subquad.methods import FeatureMethod


class HeadShape(NamedTuple):
    """The attention of a model: number of layers, of query heads and of key heads, and width of a head."""

    layers: int
    heads: int
    key_heads: int
    width: int


class Projected(nn.Module):
    """A feature method behind a learned projection of queries and keys.

    Args:
        base: The feature method.
        shape: The attention of the model.

    Example:
        >>> from subquad import attention
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
        >>> learned = Projected(subquad.Taylor(2), HeadShape(layers=1, heads=2, key_heads=2, width=4))
        >>> torch.testing.assert_close(attention(q, k, v, method=learned), attention(q, k, v, method="taylor:2"))
    """

    def __init__(self, base: FeatureMethod, shape: HeadShape) -> None:
        super().__init__()
        self.base, self.positive = base, bool(base.positive)
        h, g = shape.key_heads, shape.heads // shape.key_heads
        unit = torch.eye(shape.width)
        self.of_queries = nn.Parameter(unit.repeat(h, g, 1, 1))  # (h, g, d, d)
        self.of_keys = nn.Parameter(unit.repeat(h, 1, 1))

    def size(self, width: int) -> int:
        return self.base.size(width)

    def forward(self, x: Tensor, *, is_query: bool) -> Any:
        """Map queries (b h, g, n, d) or keys (b h, m, d), both already scaled, to features."""
        matrix = self.of_queries if is_query else self.of_keys
        projected = x.unflatten(0, (-1, len(matrix))) @ matrix.transpose(-1, -2)
        return self.base(projected.flatten(0, 1), is_query=is_query)

    def extra_repr(self) -> str:
        return str(self.base)
