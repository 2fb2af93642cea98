"""Feature maps with parameters, for the methods that a model is converted to.

    Projected    phi(A x), with a matrix A for each head, one for queries and one for keys; A = I at first

The method phi itself stays as it is, so an untrained map changes nothing. `Hedgehog` has matrices of its own.

Axes: h heads, n tokens, d width, r features.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad import Hybrid
from subquad.methods import FeatureMethod, for_layer
from subquad_lab.options.methods import parse_method


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
        >>> from subquad import Taylor, attention
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
        >>> learned = Projected(Taylor(2), HeadShape(layers=1, heads=2, key_heads=2, width=4))
        >>> torch.testing.assert_close(attention(q, k, v, method=learned), attention(q, k, v, method="taylor:2"))
    """

    def __init__(self, base: FeatureMethod, shape: HeadShape) -> None:
        super().__init__()
        self.base, self.positive, self.key_heads = base, bool(base.positive), shape.key_heads
        unit = torch.eye(shape.width)
        self.query_weight = nn.Parameter(unit.repeat(shape.heads, 1, 1))  # (h, d, d)
        self.key_weight = nn.Parameter(unit.repeat(shape.key_heads, 1, 1))

    def size(self, width: int) -> int:
        return self.base.size(width)

    def forward(self, x: Tensor, *, is_query: bool) -> Any:
        """Map scaled queries or keys (..., h, n, d) to features (..., h, n, r)."""
        weight = self.query_weight if is_query else self.key_weight
        copies = x.shape[-3] // len(weight)  # Query heads with their own masks have copies of their key head.
        return self.base(x @ weight.repeat_interleave(copies, 0).mT, is_query=is_query)  # type: ignore[operator]

    def __repr__(self) -> str:
        return f"Projected({self.base.label})"


class LearnedMethods(nn.Module):
    """A method for each layer of a decoder, with their parameters, if any.

    Args:
        spec: Name of the method.
        shape: The attention of the decoder.
    """

    methods: Sequence[Any]

    def __init__(self, spec: str, shape: HeadShape) -> None:
        super().__init__()
        methods = [learned(parse_method(spec, "--methods"), shape) for _ in range(shape.layers)]
        self.maps = nn.ModuleList(method for method in methods if isinstance(method, nn.Module))
        vars(self)["methods"] = methods

    @property
    def log_factors(self) -> list[nn.Parameter]:
        """The factors of far weights of hybrids."""
        return [method.log_factor for method in self.methods
                if isinstance(method, Hybrid) and method.log_factor is not None]  # fmt: skip

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The parameters of the maps."""
        factors = {id(factor) for factor in self.log_factors}
        return [parameter for parameter in self.parameters() if id(parameter) not in factors]


def learned(method: Any, shape: HeadShape) -> Any:
    """Return a method with parameters of its own: a learned map, alone or behind a window; others as they are.

    >>> learned(parse_method("window:64+taylor:2"), HeadShape(layers=1, heads=2, key_heads=2, width=4))
    Hybrid(Window(64), Projected(Taylor(2)))
    """
    if isinstance(method, Hybrid):
        return Hybrid(method.window, learned(method.far, shape), heads=shape.heads)
    if isinstance(method, FeatureMethod):
        return Projected(method, shape) if method.normalizer == "row" and callable(method) else method
    return for_layer(method, shape.width, shape.heads, shape.key_heads)
