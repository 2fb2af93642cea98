"""What a module needs to compute attention by a method: the random matrix as a buffer, a learned map of its own.

    bind_method(self, method, head_dim, heads)  in __init__: sets `method`, and the buffer `random_matrix`
    bound_method(self)                          in forward: the method with that buffer as its matrix

`quiet_attention` then computes without the warning that was given at construction.

The buffer belongs to the module itself, so that its key in a state_dict is `random_matrix`.
"""

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from subquad.methods import RandomFeatures, for_layer


def bind_method(module: nn.Module, method: Any, head_dim: int, heads: int = 1, like: Tensor | None = None) -> None:
    """Make a method part of a module.

    Sets `module.method`, so that a map that is an `nn.Module` becomes a submodule, and registers the buffer
    `random_matrix`: the matrix of `RandomFeatures`, None for other methods. A learned map without sizes, such as
    `Hedgehog()`, gets those of the module, and parameters of its own.

    Args:
        module: The module that will call `attention`.
        method: A method, or None.
        head_dim: Width of the queries and keys.
        heads: Query heads, and key heads.
        like: Tensor whose device, and dtype if wider than float32, the matrix takes; float64 on the CPU by default.

    Example:
        >>> module = nn.Module()
        >>> bind_method(module, RandomFeatures(8), head_dim=4)
        >>> list(module.state_dict()), bound_method(module).matrix.shape
        (['random_matrix'], torch.Size([8, 4]))
    """
    # An `Auto` that remembers does so for each module: layers have different logits.
    module.method = copy(method) if getattr(method, "remember", False) else own_method(method, head_dim, heads, like)
    module.register_buffer("random_matrix", random_matrix(method, head_dim, like))


def bound_method(module: nn.Module) -> Any:
    """Return the method of a module after `bind_method`, with the module's buffer as its matrix."""
    if module.random_matrix is None:
        return module.method
    return replace(module.method, matrix=module.random_matrix)  # type: ignore[type-var]


def own_method(method: Any, head_dim: int, heads: int, like: Tensor | None = None, key_heads: int | None = None) -> Any:
    """Return the method of a layer; a map that is made for it is on the device of `like`, in float32 or wider."""
    own = for_layer(method, head_dim, heads, key_heads)
    if like is None or own is method or not isinstance(own, nn.Module):
        return own
    return own.to(like.device, torch.promote_types(like.dtype, torch.float32))


def random_matrix(method: Any, head_dim: int, like: Tensor | None = None) -> Tensor | None:
    """Return the matrix of `RandomFeatures`, given or drawn from its seed; None for other methods."""
    if not isinstance(method, RandomFeatures):
        return None
    matrix = method.draw(head_dim) if method.matrix is None else method.matrix
    return matrix if like is None else matrix.to(like.device, torch.promote_types(like.dtype, torch.float32))
