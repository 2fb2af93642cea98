"""From a method, a value that the user names, to the kernel that the forms compute with."""

from collections.abc import Callable
from math import copysign, sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from subquad._auto import Auto
from subquad._features import Exact, FeatureMap, Linear, RandomFeatures, Taylor
from subquad._kernel import FeatureKernel, Kernel, widen
from subquad._multipole import Multipole
from subquad._separable import Separable, SeparableKernel
from subquad.native import _library as native
from subquad.native._fused import Recipe

Approximation: TypeAlias = Taylor | RandomFeatures | Linear | Separable | FeatureMap  # by sums of features
Named: TypeAlias = Exact | Approximation | Multipole
Method: TypeAlias = Named | Auto

METHODS: dict[str, Method] = {
    "exact": Exact(), "taylor": Taylor(), "random": RandomFeatures(), "linear": Linear(), "separable": Separable(),
    "multipole": Multipole(), "auto": Auto(),
}  # fmt: skip


def resolve(method: Method | str) -> Method:
    """A method by its name, or itself."""
    if isinstance(method, Exact | Taylor | RandomFeatures | Linear | Separable | Multipole | Auto):
        return method
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(map(repr, METHODS))} or a method, got {method!r}")
        return METHODS[method]
    if isinstance(method, type):
        raise TypeError(
            f"method: expected a method such as {method.__name__}(), got the class {method.__name__} itself"
        )
    members = all(hasattr(method, name) for name in ("positive", "size")) and callable(method)
    if not members:
        raise TypeError(
            f"method: expected a name, a method such as Taylor(2), or an object with the members of FeatureMap "
            f"(positive, size and __call__), got {type(method).__name__}"
        )
    return method


def recipe_of(method: Approximation) -> Recipe | None:
    """By which the native kernels know the method's map, if they do."""
    if isinstance(method, Taylor):
        return Recipe(native.TAYLOR, method.degree) if method.basis == "symmetric" else None
    if isinstance(method, RandomFeatures):
        kinds = {"positive": native.POSITIVE, "hyperbolic": native.HYPERBOLIC}
        return Recipe(kinds[method.kind]) if method.kind in kinds else None
    if isinstance(method, Linear):
        return Recipe({"elu": native.ELU, "relu": native.RELU, "identity": native.IDENTITY}[method.activation])
    return Recipe(native.SEPARABLE if isinstance(method, Separable) else native.IDENTITY)


def shifted(method: Approximation, key: Tensor, heads: int) -> Tensor:
    """The keys less the method's `key_shift`: a constant, so it knows nothing of the future."""
    shift = getattr(method, "key_shift", None)
    if shift is None:
        return key
    key = widen(key)
    vector = torch.tensor(shift, device=key.device, dtype=key.dtype)
    if vector.shape not in ((key.shape[-1],), (heads, key.shape[-1])):
        raise ValueError(
            f"key_shift: expected shape {(key.shape[-1],)} or {(heads, key.shape[-1])}, got {tuple(vector.shape)}"
        )
    return key - (vector if vector.dim() == 1 else vector[:, None])


def kernel_of(
    method: Approximation, q: Tensor, k: Tensor, scale: float, pairs_alone: bool = False
) -> tuple[Kernel, Tensor, Tensor]:
    """What the forms need to know of a method, and the queries and keys that go with it.

    pairs_alone: tokens meet pair by pair and there are no sums, so that Taylor needs no table of its features.
    """
    root = sqrt(abs(scale))
    roots = (copysign(root, scale), root)
    if isinstance(method, Separable):
        return SeparableKernel(roots), q, k
    size, recipe = method.size(q.shape[-1]), recipe_of(method)
    features: Callable[[Tensor, bool, Any], tuple[Tensor, Tensor | None]]
    if isinstance(method, Taylor):
        series = method.series if method.basis == "symmetric" else None
        weights = None if pairs_alone and series is not None else method.weights(widen(q[:0]))
        features = lambda x, *_: (method.monomials(x), None)
        return FeatureKernel(roots, weights, features, of_logits=series, weighted=True, size=size,
                             recipe=recipe), q, k  # fmt: skip
    if isinstance(method, Linear):
        identity = method.activation == "identity"
        of_logits = (lambda x: x) if identity else None
        features = lambda x, *_: (method(x), None)
        return FeatureKernel(roots, None, features, of_logits=of_logits, normalized=not identity, size=size,
                             recipe=recipe), q, k  # fmt: skip
    if isinstance(method, RandomFeatures):
        projections = method.projections(widen(q[:0]))
        features = lambda x, _, table: method.project(x, table)
        return FeatureKernel(roots, projections, features, scaled=True, size=size, recipe=recipe), q, k
    # A user's map may hold parameters, which only plain differentiation finds: its features are made here, once.
    finite = [x.isfinite().all(-1, keepdim=True) for x in (q, k)]
    q, k = (torch.where(flag, widen(x) * root, 0.0) for flag, x, root in zip(finite, (q, k), roots, strict=True))
    (q, _), (k, log_scale) = mapped(method, q, is_query=True), mapped(method, k, is_query=False)
    scaled = log_scale is not None
    if log_scale is not None:
        k = torch.cat([k, log_scale[..., None]], -1)
    features = lambda x, is_query, _: (x[..., :-1], x[..., -1]) if scaled and not is_query else (x, None)
    recipe = Recipe(native.LOGGED if scaled else native.IDENTITY)
    kernel = FeatureKernel((1.0, 1.0), None, features, scaled=scaled, size=size, recipe=recipe)
    return kernel, torch.where(finite[0], q, torch.nan), torch.where(finite[1], k, torch.nan)


def mapped(method: FeatureMap, x: Tensor, is_query: bool) -> tuple[Tensor, Tensor | None]:
    """The features of a user's map, computed in the dtype of its parameters, if it has any."""
    weight = next(method.parameters(), None) if isinstance(method, nn.Module) else None
    result = method(x if weight is None else x.to(weight.dtype), is_query=is_query)
    features, log_scale = result if isinstance(result, tuple) else (result, None)
    expected = (*x.shape[:-1], method.size(x.shape[-1]))
    if features.shape != expected:
        raise ValueError(f"method: its size() promises features of shape {expected}, got {tuple(features.shape)}")
    if log_scale is not None and log_scale.shape != x.shape[:-1]:
        raise ValueError(f"method: expected a log-scale of shape {tuple(x.shape[:-1])}, got {tuple(log_scale.shape)}")
    return features.to(x.dtype), None if log_scale is None else log_scale.to(x.dtype)
