"""Shape: the sizes of calls that are predicted, checked once."""

from dataclasses import dataclass
from math import inf
from operator import index
from typing import Any

import torch

from subquad._calls.layout import Layout
from subquad.methods.checks import check_whole


@dataclass(frozen=True)
class Shape:
    """The sizes of a call, and whether its backward pass is included."""

    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    heads: int = 1
    key_heads: int = 1
    batch: int = 1
    is_causal: bool = False
    training: bool = False

    @classmethod
    def of(
        cls, *, query_length: int, key_length: int | None = None, head_dim: int, value_dim: int | None = None,
        heads: int = 1, key_heads: int | None = None, batch: int = 1, is_causal: bool = False, training: bool = False,
        least_length: int = 0, most: float = inf,
    ) -> "Shape":  # fmt: skip
        """Check the sizes; key_length, value_dim and key_heads default to query_length, head_dim and heads."""
        sizes = {
            "query_length": query_length,
            "key_length": query_length if key_length is None else key_length,
            "head_dim": head_dim,
            "value_dim": head_dim if value_dim is None else value_dim,
            "heads": heads,
            "key_heads": heads if key_heads is None else key_heads,
            "batch": batch,
        }
        sizes = {name: as_int(size) for name, size in sizes.items()}
        for name, size in sizes.items():
            check_whole(name, size, least_length if name.endswith("length") else 1)
            if size > most:
                raise ValueError(f"{name}: expected an integer up to {int(most):,}, got {size:,}")
        if sizes["heads"] % sizes["key_heads"]:
            raise ValueError(f"key_heads: expected a number that divides the {heads} heads, got {key_heads}")
        for name, flag in {"is_causal": is_causal, "training": training}.items():
            if not isinstance(flag, bool):
                raise ValueError(f"{name}: expected True or False, got {flag!r}")
        return cls(**sizes, is_causal=is_causal, training=training)

    @property
    def layout(self) -> Layout:
        return self.layout_on(torch.device("cpu"))

    def layout_on(self, device: torch.device) -> Layout:
        """Return the layout of the call on a device."""
        group = self.heads // self.key_heads
        return Layout((self.batch,), self.key_heads, group, self.query_length, self.key_length, self.head_dim,
                      self.value_dim, device)  # fmt: skip

    @property
    def pairs(self) -> int:
        """Queries and keys that see each other, over all heads."""
        n, m = self.query_length, self.key_length
        return self.batch * self.heads * (seen_pairs(n, m) if self.is_causal else n * m)

    @property
    def inputs(self) -> int:
        """Numbers in q, k and v."""
        keys = self.key_heads * self.key_length * (self.head_dim + self.value_dim)
        return self.batch * (self.heads * self.query_length * self.head_dim + keys)

    @property
    def outputs(self) -> int:
        """Numbers in the result."""
        return self.batch * self.heads * self.query_length * self.value_dim


def seen_pairs(n: int, m: int, block: int = 1) -> int:
    """Return the pairs of causal attention where rows come in blocks, each against the keys up to its end."""
    whole = n // block
    growing = min(whole, m // block)  # blocks that end before the keys do
    return block**2 * growing * (growing + 1) // 2 + (whole - growing) * block * m + n % block * min(n, m)


def as_int(size: Any) -> Any:
    """Return an integer of another library, such as NumPy's int64, as an int; anything else as it is."""
    try:
        return size if isinstance(size, bool) else index(size)
    except TypeError:
        return size


def check_dtype(dtype: object) -> None:
    """Raise ValueError unless this is a floating point dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating point dtype, got {dtype}")
