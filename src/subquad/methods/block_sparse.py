"""BlockSparse: exact softmax attention to the pairs of blocks that a layout names.

    query i sees key j    if layout[head, i // query block, j // key block], and, in a causal call, j <= i

Blocks are equal parts of the sequence, the last one shorter. Time O(density n m (d + e)).
"""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from subquad.methods.sparse import SparseMethod


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(SparseMethod):
    """Exact attention inside chosen blocks, as in Longformer- or BigBird-like patterns.

    Args:
        layout: Boolean, (heads or 1, query blocks, key blocks): True where queries of a block see the keys of a block.
            Blocks have ceil(n / query blocks) queries and ceil(m / key blocks) keys, the last one fewer; the number of
            blocks must be one that such blocks give: 100 tokens make 10 blocks of 10 or 9 of 12, never 60.
        softcap: As for `Window`.
        sink_logits: As for `Window`.

    Example:
        >>> from subquad import attention
        >>> q, k, v = torch.randn(3, 1, 2, 64, 8).unbind()
        >>> near = torch.eye(8, dtype=torch.bool)[None]  # 8 blocks of 8 tokens, each of which sees itself
        >>> alone = attention(q[..., :8, :], k[..., :8, :], v[..., :8, :])
        >>> torch.allclose(attention(q, k, v, method=BlockSparse(near))[..., :8, :], alone, atol=1e-6)
        True
    """

    name: ClassVar[str] = "block_sparse"

    layout: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        layout = self.layout
        if not isinstance(layout, Tensor) or layout.dtype != torch.bool or layout.dim() != 3 or 0 in layout.shape:
            found = f"{layout.dtype} of shape {tuple(layout.shape)}" if isinstance(layout, Tensor) else repr(layout)
            raise ValueError(f"layout: expected a boolean tensor (heads, query blocks, key blocks), got {found}")

    @property
    def label(self) -> str:
        heads, rows, columns = self.layout.shape
        size = f"{rows} x {columns} blocks, {heads} head{'s' * (heads > 1)}"
        return f"BlockSparse({', '.join([size, *self._options])})"

    @property
    def density(self) -> float:
        """The share of blocks that are seen."""
        return float(self.layout.float().mean())

    def blocks(self, heads: int, queries: int, keys: int) -> tuple[int, int]:
        """Return the number of queries and of keys in a block; raise ValueError if the layout does not fit."""
        own, rows, columns = self.layout.shape
        if own not in (1, heads):
            raise ValueError(f"layout: expected 1 head or the {heads} query heads of the call, got {own}")
        for name, blocks, length in (("query", rows, queries), ("key", columns, keys)):
            if length and blocks != ceil(length / ceil(length / blocks)):
                size = ceil(length / blocks)
                raise ValueError(
                    f"layout: {blocks} {name} blocks of {length} tokens would have {size} tokens each, and fewer "
                    f"blocks hold them all; expected {ceil(length / size)} {name} blocks, or another number"
                )
        return max(1, ceil(queries / rows)), max(1, ceil(keys / columns))
