"""Shapes of a call: what torch's layout (..., heads, length, width) means, and how the forms see it.

    query (..., heads, n, d) -> (b, g, n, d)        key, value (..., key heads, m, d or e) -> (b, m, d or e)

where b counts batches and key heads together, and g query heads share each key head.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from subquad._state import State


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

    @property
    def rows(self) -> int:
        return prod(self.batch) * self.key_heads

    def fold_query(self, query: Tensor) -> Tensor:
        heads = self.key_heads * self.group
        query = query.expand(*self.batch, heads, *query.shape[-2:])
        return query.reshape(self.rows, self.group, *query.shape[-2:])

    def fold_key(self, key: Tensor) -> Tensor:
        return key.expand(*self.batch, self.key_heads, *key.shape[-2:]).reshape(self.rows, *key.shape[-2:])

    def unfold(self, tensor: Tensor) -> Tensor:
        """(b, ...) -> (*batch, key_heads, ...)"""
        return tensor.reshape(*self.batch, self.key_heads, *tensor.shape[1:])

    def unfold_query(self, output: Tensor) -> Tensor:
        """(b, g, n, e) -> (*batch, heads, n, e)"""
        return output.reshape(*self.batch, self.key_heads * self.group, *output.shape[-2:])

    def fold_mask(self, name: str, mask: Tensor, length: int) -> Tensor:
        """A mask of shape (length,), (*batch, length) or (*batch, key heads, length) to (b, length)."""
        target = (*self.batch, self.key_heads, length)
        wide = mask.unsqueeze(-2) if mask.dim() == len(self.batch) + 1 else mask
        fits = mask.dim() in (1, len(target) - 1, len(target))
        if not fits or any(size not in (1, want) for size, want in zip(wide.shape[::-1], target[::-1], strict=False)):
            wanted = (*self.batch, length)
            raise ValueError(f"{name}: expected shape {wanted} or {target}, got {tuple(mask.shape)}")
        if mask.device != self.device:
            raise ValueError(f"{name}: expected a tensor on {self.device}, as the query, got one on {mask.device}")
        return wide.expand(target).reshape(self.rows, length)


def check_tensors(**named: object) -> None:
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Layout:
    """The layout of a call, or an error that names what does not fit."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: expected floating point numbers, got {tensor.dtype}")
        if tensor.dim() < 2:
            raise ValueError(f"{name}: expected shape (..., heads, length, width), got {tuple(tensor.shape)}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name}: expected {query.dtype} on {query.device}, as the query, got {tensor.dtype} on {tensor.device}"
            )
    (n, d), (m, _), e = query.shape[-2:], key.shape[-2:], value.shape[-1]
    if key.shape[-1] != d:
        raise ValueError(f"key: expected width {d}, as the query, got {key.shape[-1]}")
    if value.shape[-2] != m:
        raise ValueError(f"value: expected length {m}, as the key, got {value.shape[-2]}")
    heads, key_heads, value_heads = (x.shape[-3] if x.dim() > 2 else 1 for x in named.values())
    if enable_gqa and (key_heads != value_heads or 0 in (heads, key_heads) or heads % key_heads):
        raise ValueError(
            f"key: with enable_gqa a number of heads that divides the query's {heads} is expected, the same for key "
            f"and value; got {key_heads} and {value_heads}"
        )
    batches = [x.shape[:-3] for x in named.values()]
    try:  # torch.broadcast_shapes takes longer than a whole decoding step has.
        batch = batches[0] if batches[0] == batches[1] == batches[2] else torch.broadcast_shapes(*batches)
        if not enable_gqa and not heads == key_heads == value_heads:
            shared = torch.broadcast_shapes((key_heads,), (value_heads,))[0]
            heads = torch.broadcast_shapes((heads,), (shared,))[0]
            key_heads = shared if shared == 1 else heads
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        hint = "" if enable_gqa else "; enable_gqa=True lets query heads share key heads"
        raise ValueError(f"query, key, value: batch and head dimensions do not fit: {shapes}{hint}") from None
    return Layout(tuple(batch), key_heads, heads // key_heads if key_heads else 1, n, m, d, e, query.device)


def check_state(state: State | None, method: object, layout: Layout, segments: bool, dtype: torch.dtype) -> None:
    """A state serves the method, the batch, the widths and the dtype that it was made with."""
    if state is None:
        return
    if state.method != method:
        raise ValueError(f"state: expected one made by {method}, got one made by {state.method}")
    old, new = getattr(state.method, "matrix", None), getattr(method, "matrix", None)
    if (
        old is not new
        and not torch.compiler.is_compiling()
        and (old is None or new is None or not torch.equal(old, new))
    ):
        raise ValueError("state: expected one made with the same matrix of random projections, got one with another")
    if state.sums is None and state.keys is None:
        return  # Nothing has been seen.
    if (state.segment is not None) != segments:
        made = "with" if state.segment is not None else "without"
        raise ValueError(f"state: it was made {made} segment_ids, so the next call is expected {made} them too")
    lead = (*layout.batch, layout.key_heads)
    if state.sums is not None:
        features = method.size(layout.width)  # type: ignore[attr-defined]
        found, expected = tuple(state.sums.shape), (*lead, features, layout.value_width + 1)
        found_dtype, wide = state.sums.dtype, torch.promote_types(dtype, torch.float32)
    else:
        assert state.keys is not None and state.values is not None
        found = (*state.keys.shape[:-2], state.keys.shape[-1], state.values.shape[-1])
        expected = (*lead, layout.width, layout.value_width)
        found_dtype, wide = state.keys.dtype, dtype
        if state.filled is not None:  # Multipole's are wide, and its values have rows of whole vectors.
            found = (*found[:-1], state.value_width or 0)
            wide = torch.promote_types(dtype, torch.float32)
    if found != expected or found_dtype != wide:
        raise ValueError(f"state: expected {expected} in {wide} for these inputs, got {found} in {found_dtype}")
