"""Hedgehog: a feature map that is learned, head by head ("The Hedgehog & the Porcupine", 2024).

    phi(x) = softmax([W x, -W x])        2 r features, W (r, d) of each head, one for queries and one for keys

W begins as the identity. Features are positive and add up to 1, so nothing overflows. Time O(n r d) for the features.

Axes: n tokens, d width, r rank.
"""

import torch
from torch import Tensor, nn

from subquad.methods.checks import check_whole


class Hedgehog(nn.Module):
    """A learned feature map with its own projections for each head, for queries and for keys.

    Train it as part of a model: as the method of a module it is a submodule, which is saved and moved with it. Without
    sizes it has no parameters yet, and each layer of `MultiheadAttention` and `replace_attention` makes its own.

    Args:
        head_dim: Width of queries and keys.
        heads: Query heads.
        key_heads: Key heads, `heads` by default.
        rank: Rows of each projection, `head_dim` by default. There are twice as many features.

    Attributes:
        query_weight: (heads, rank, head_dim), or None without sizes.
        key_weight: (key heads, rank, head_dim), the same.

    Example:
        >>> from subquad import MultiheadAttention, attention
        >>> q = k = v = torch.randn(1, 2, 5, 4)
        >>> attention(q, k, v, is_causal=True, method=Hedgehog(head_dim=4, heads=2)).shape
        torch.Size([1, 2, 5, 4])
        >>> layer = MultiheadAttention(8, 2, method=Hedgehog())  # or method="hedgehog"
        >>> layer.method
        Hedgehog(head_dim=4, heads=2)
    """

    name = "hedgehog"
    argument = "rank"
    positive = True
    query_weight: nn.Parameter | None
    key_weight: nn.Parameter | None

    def __init__(
        self, head_dim: int | None = None, heads: int | None = None, *, key_heads: int | None = None,
        rank: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if (head_dim is None) != (heads is None):
            raise ValueError(f"heads: expected both head_dim and heads, or neither, got {head_dim} and {heads}")
        if heads is None and key_heads is not None:
            raise ValueError(f"key_heads: expected None without head_dim and heads, got {key_heads}")
        for name, size in dict(head_dim=head_dim, heads=heads, key_heads=key_heads, rank=rank).items():
            if size is not None:
                check_whole(name, size, 1)
        self.head_dim, self.rank = head_dim, rank
        if head_dim is None or heads is None:
            self.register_parameter("query_weight", None)
            self.register_parameter("key_weight", None)
            return
        key_heads = heads if key_heads is None else key_heads
        if heads % key_heads:
            raise ValueError(f"key_heads: expected a number that divides the {heads} heads, got {key_heads}")
        identity = torch.eye(head_dim if rank is None else rank, head_dim)
        self.query_weight = nn.Parameter(identity.repeat(heads, 1, 1))
        self.key_weight = nn.Parameter(identity.repeat(key_heads, 1, 1))

    @property
    def heads(self) -> int:
        """Query heads; 1 without sizes."""
        return 1 if self.query_weight is None else len(self.query_weight)

    @property
    def key_heads(self) -> int:
        """Key heads; 1 without sizes."""
        return 1 if self.key_weight is None else len(self.key_weight)

    def for_layer(self, head_dim: int, heads: int, key_heads: int) -> "Hedgehog":
        """Return a map with its own parameters for a layer of these sizes; the map itself if it has sizes."""
        return self if self.head_dim is not None else Hedgehog(head_dim, heads, key_heads=key_heads, rank=self.rank)

    def size(self, width: int) -> int:
        return 2 * (width if self.rank is None else self.rank)

    def forward(self, x: Tensor, *, is_query: bool) -> Tensor:
        """Map (..., heads, n, d) to features (..., heads, n, 2 r)."""
        weight: Tensor | None = self.query_weight if is_query else self.key_weight
        if weight is None:
            raise ValueError(
                "method: Hedgehog() has no parameters yet; expected Hedgehog(head_dim, heads), or a module such as "
                "MultiheadAttention, which makes them"
            )
        heads = x.shape[-3]
        if not is_query and heads == self.heads:  # Query heads with their own masks each have a copy of their key head.
            weight = weight.repeat_interleave(self.heads // self.key_heads, 0)
        if (heads, x.shape[-1]) != (len(weight), self.head_dim):
            name = "query" if is_query else "key"
            raise ValueError(
                f"{name}: expected {len(weight)} heads of width {self.head_dim}, for which {self} has parameters, got "
                f"{heads} of width {x.shape[-1]}"
            )
        projected = x @ weight.mT
        return torch.cat([projected, -projected], -1).softmax(-1)

    def __repr__(self) -> str:
        sizes = dict(head_dim=self.head_dim, heads=None if self.head_dim is None else self.heads, rank=self.rank)
        sizes |= dict(key_heads=self.key_heads) if self.key_heads != self.heads else {}
        return f"Hedgehog({', '.join(f'{name}={size}' for name, size in sizes.items() if size is not None)})"
