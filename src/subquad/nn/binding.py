"""What a module needs to compute attention by a method: random matrix and fitted vectors as buffers, a learned map.

    bind_method(self, method, head_dim, heads)  in __init__: sets `method`, and the buffers
    bound_method(self)                          in forward: the method with that buffer as its matrix

`quiet_attention` then computes without the warning that was given at construction.

Buffers belong to the module itself, so that their keys in a state_dict are `random_matrix`, `key_shift` and so on. A
method holds its vectors as plain numbers; the buffers save them, and `fitted_by` reads them back.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from subquad.methods import Method, RandomFeatures, for_layer
from subquad.planning.coordinates import as_tuples

# Buffers that hold what `fit` has found, and the fields of the methods.
FITTED = {"key_shift": "key_shift", "query_shift": "query_shift", "balance": "balance", "feature_scale": "scale"}


def bind_method(module: nn.Module, method: Any, head_dim: int, heads: int = 1, like: Tensor | None = None) -> None:
    """Make a method part of a module.

    Sets `module.method`, so that a map that is an `nn.Module` becomes a submodule, and registers the buffers
    `random_matrix`, the matrix of `RandomFeatures`, and `key_shift`, `query_shift`, `balance` and `feature_scale`, what
    `fit` has found; each is None for methods without it. A learned map without sizes, such as `Hedgehog()`, gets those
    of the module, and parameters of its own.

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
    device = None if like is None else like.device
    for name, field in FITTED.items():
        given = _fitted(method, field)
        module.register_buffer(name, None if given is None else torch.tensor(given, device=device))


def bound_method(module: nn.Module) -> Any:
    """Return the method of a module after `bind_method`, with the module's buffer as its matrix."""
    if module.random_matrix is None:
        return module.method
    return replace(module.method, matrix=module.random_matrix)  # type: ignore[type-var]


def fitted_by(method: Any, saved: Mapping[str, Tensor], prefix: str = "") -> Any:
    """Return the method with what the buffers in a state_dict say was fitted; the method itself if they say nothing."""
    found: dict[str, Any] = {}
    is_fitted = any(prefix + name in saved for name in FITTED)
    for name, field in FITTED.items():
        vectors, own = saved.get(prefix + name), _fitted(method, field)
        if vectors is None:
            if is_fitted and own is not None:  # The method that was saved does not have what this one has.
                found[field] = 0.0 if field == "scale" else None
            continue
        if not _may_hold(method, field):
            continue
        if own is not None and torch.equal(torch.tensor(own, dtype=vectors.dtype), vectors.detach().cpu()):
            continue  # The method itself has more digits.
        rows = vectors.detach().double().cpu().reshape(-1, vectors.shape[-1] if vectors.dim() else 1)
        numbers: Any = as_tuples(rows)
        found[field] = numbers if vectors.dim() == 2 else numbers[0] if vectors.dim() else numbers[0][0]
    return replace(method, **found) if found else method


def _may_hold(method: Any, field: str) -> bool:
    """Return whether `fit` may set this field: an attribute of a user's map may have another one of the same name."""
    is_fitted = isinstance(method, Method) and method.coordinates
    return bool(is_fitted) and field in {each.name for each in fields(method)}


def _fitted(method: Any, field: str) -> Any:
    """Return the numbers of a field that `fit` may set; None if there are none, or no more than the default says."""
    given = getattr(method, field) if _may_hold(method, field) else None
    return None if given in (0.0, "auto") else given


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
