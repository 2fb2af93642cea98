"""From a method, a value that a user names, to the kernel that the forms compute with."""

import torch
from torch import Tensor

from subquad._engines.features.kernel import Kernel, feature_kernel, root_scales
from subquad._engines.features.separable import SeparableKernel
from subquad._engines.finite import widen
from subquad.methods.method import FeatureMethod


def kernel_of(
    method: FeatureMethod, q: Tensor, k: Tensor, scale: float, is_normalized: bool = True, pairs_alone: bool = False
) -> tuple[Kernel, Tensor, Tensor]:
    """Return the kernel of a method, and the queries and keys that go with it; arguments as for `feature_kernel`."""
    if method.normalizer == "feature":
        return SeparableKernel(root_scales(scale)), q, k
    return feature_kernel(method, q, k, scale, is_normalized, pairs_alone)


def shifted(method: FeatureMethod, key: Tensor, heads: int) -> Tensor:
    """Return the keys (..., heads, m, d) minus the method's `key_shift`: a constant, so that nothing leaks."""
    if method.key_shift is None:
        return key
    key = widen(key)
    vector = torch.tensor(method.key_shift, device=key.device, dtype=key.dtype)
    if vector.shape not in ((key.shape[-1],), (heads, key.shape[-1])):
        raise ValueError(
            f"key_shift: expected shape {(key.shape[-1],)} or {(heads, key.shape[-1])}, got {tuple(vector.shape)}"
        )
    return key - (vector if vector.dim() == 1 else vector[:, None])
