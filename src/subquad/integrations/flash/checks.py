"""Checks of tensors, by the names that they have in the call."""

import torch
from torch import Tensor


def check_tensors(dimensions: int, **named: Tensor) -> None:
    """Check query, key and value (..., heads, width), given by name in this order, against each other."""
    (name, q), (key_name, k), (value_name, v) = named.items()
    layout = "(batch, length, heads, width)" if dimensions == 4 else "(tokens, heads, width)"
    for own, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{own}: expected a tensor, got {type(x).__name__}")
        if x.dim() != dimensions:
            raise ValueError(f"{own}: expected shape {layout}, got {tuple(x.shape)}")
        if not x.is_floating_point() or (x.dtype, x.device) != (q.dtype, q.device):
            expected = "floating-point numbers" if own == name else f"{q.dtype} on {q.device}, like {name}"
            raise ValueError(f"{own}: expected {expected}, got {x.dtype} on {x.device}")
    if k.shape[-1] != q.shape[-1] or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{key_name}: expected width {q.shape[-1]} and a number of heads that divides the {q.shape[-2]} heads of "
            f"{name}, got shape {tuple(k.shape)}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"{value_name}: expected shape {(*k.shape[:-1], 'width')}, got {tuple(v.shape)}")


def check_integers(name: str, x: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    """Return integers of this shape as int64; None stands for any size."""
    fits = isinstance(x, Tensor) and x.dim() == len(shape) and not (x.is_floating_point() or x.dtype == torch.bool)
    if not fits or any(size not in (None, own) for size, own in zip(shape, x.shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        found = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"{name}: expected a tensor of integers of shape ({sizes}), got {found}")
    return x.long()
