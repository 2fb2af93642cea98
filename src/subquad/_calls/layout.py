"""Layout: what torch's shapes (..., heads, length, width) mean, and how the engines see them.

    query (..., heads, n, d) -> (b, g, n, d)        key, value (..., key heads, m, d or e) -> (b, m, d or e)

where b counts batches and key heads together, and g query heads share each key head.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import index

import torch
from torch import Tensor

from subquad._torch_internals import is_recorded

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The sizes of one call, after broadcasting."""

    batch: tuple[int, ...]
    key_heads: int
    group: int
    queries: int
    keys: int
    width: int
    value_width: int
    device: torch.device
    copies: int = 1  # of each key head, one after the other: one for each query head with a mask of its own
    rows: int = field(init=False)  # batches times key heads

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", prod(self.batch) * self.key_heads)

    @property
    def own_key_heads(self) -> int:
        """The number of different key heads."""
        return self.key_heads // self.copies

    def fold_query(self, query: Tensor) -> Tensor:
        """Return (b, g, n, d)."""
        lead = (*self.batch, self.key_heads * self.group)
        query = query if query.shape[:-2] == lead else query.expand(*lead, *query.shape[-2:])
        return query.reshape(self.rows, self.group, *query.shape[-2:])

    def fold_key(self, key: Tensor) -> Tensor:
        """Return (b, m, d) or (b, m, e)."""
        lead = (*self.batch, self.key_heads)
        key = key if key.shape[:-2] == lead else key.expand(*lead, *key.shape[-2:])
        return key.reshape(self.rows, *key.shape[-2:])

    def unfold(self, tensor: Tensor) -> Tensor:
        """Return (*batch, key_heads, ...) of a tensor (b, ...)."""
        return tensor.reshape(*self.batch, self.key_heads, *tensor.shape[1:])

    def unfold_query(self, output: Tensor) -> Tensor:
        """Return (*batch, heads, n, e) of an output (b, g, n, e)."""
        return output.reshape(*self.batch, self.key_heads * self.group, *output.shape[-2:])

    def fold_mask(self, name: str, mask: Tensor, length: int) -> Tensor:
        """Return (b, length) of a mask (length,), (*batch, length) or (*batch, key heads, length)."""
        target = (*self.batch, self.key_heads, length)
        wide = mask.unsqueeze(-2) if mask.dim() == len(self.batch) + 1 else mask
        fits = mask.dim() in (1, len(target) - 1, len(target))
        if not fits or any(size not in (1, want) for size, want in zip(wide.shape[::-1], target[::-1], strict=False)):
            wanted = (*self.batch, length)
            raise ValueError(f"{name}: expected shape {wanted} or {target}, got {tuple(mask.shape)}")
        if mask.device != self.device:
            raise ValueError(f"{name}: expected a tensor on {self.device}, like the query, got one on {mask.device}")
        return wide.expand(target).reshape(self.rows, length)


def layout_of(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, mixed: bool = False) -> Layout:
    """Return the layout of a call, or raise ValueError naming what does not fit.

    Args:
        query: (..., heads, n, d).
        key: (..., key heads, m, d).
        value: (..., key heads, m, e).
        enable_gqa: Whether query heads may share key heads.
        mixed: Whether half precision and float32 may be mixed, as under autocast.
    """
    dtype, device = query.dtype, query.device
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: expected floating point numbers, got {tensor.dtype}")
        fits = tensor.dtype == dtype or (mixed and torch.promote_types(tensor.dtype, torch.float32) == torch.float32)
        if not fits or tensor.device != device:
            raise ValueError(
                f"{name}: expected {dtype} on {device}, like the query, got {tensor.dtype} on {tensor.device}"
            )
    is_symbolic = torch.compiler.is_compiling() or is_recorded()  # Sizes may then be more than numbers.
    make = _layout if is_symbolic else _cached_layout
    return make(query.shape, key.shape, value.shape, device, enable_gqa)


def _layout(query: Sizes, key: Sizes, value: Sizes, device: torch.device, enable_gqa: bool) -> Layout:
    named = {"query": query, "key": key, "value": value}
    for name, shape in named.items():
        if len(shape) < 2:
            raise ValueError(f"{name}: expected shape (..., heads, length, width), got {tuple(shape)}")
    (n, d), (m, _), e = query[-2:], key[-2:], value[-1]
    if key[-1] != d:
        raise ValueError(f"key: expected width {d}, like the query, got {key[-1]}")
    if value[-2] != m:
        raise ValueError(f"value: expected length {m}, like the key, got {value[-2]}")
    if torch.compiler.is_compiling():  # Widths are never symbols: the number of features follows from them.
        d, e = index(d), index(e)
    heads, key_heads, value_heads = (shape[-3] if len(shape) > 2 else 1 for shape in named.values())
    if enable_gqa and (key_heads != value_heads or 0 in (heads, key_heads) or heads % key_heads):
        raise ValueError(
            f"key: with enable_gqa, key and value need the same number of heads, one that divides the query's {heads}; "
            f"got {key_heads} and {value_heads}"
        )
    batches = [shape[:-3] for shape in named.values()]
    try:
        batch = batches[0] if batches[0] == batches[1] == batches[2] else torch.broadcast_shapes(*batches)
        if not enable_gqa and not heads == key_heads == value_heads:
            shared = torch.broadcast_shapes((key_heads,), (value_heads,))[0]
            heads = torch.broadcast_shapes((heads,), (shared,))[0]
            key_heads = shared if shared == 1 and heads else heads
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in named.items())
        hint = "" if enable_gqa else "; enable_gqa=True lets query heads share key heads"
        raise ValueError(f"query, key, value: batch and head dimensions do not match: {shapes}{hint}") from None
    return Layout(tuple(batch), key_heads, heads // key_heads if key_heads else 1, n, m, d, e, device)


_cached_layout = lru_cache(maxsize=256)(_layout)
