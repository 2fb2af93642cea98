"""From a method, a value that a user names, to the kernel that the forms compute with."""

from torch import Tensor

from subquad._engines.features.kernel import Kernel, feature_kernel, root_scales
from subquad._engines.features.separable import SeparableKernel
from subquad.methods.method import FeatureMethod


def kernel_of(
    method: FeatureMethod, q: Tensor, k: Tensor, scale: float, is_normalized: bool = True, pairs_alone: bool = False
) -> tuple[Kernel, Tensor, Tensor]:
    """Return the kernel of a method, and the queries and keys that go with it; arguments as for `feature_kernel`."""
    if method.normalizer == "feature":
        return SeparableKernel(root_scales(scale)), q, k
    return feature_kernel(method, q, k, scale, is_normalized, pairs_alone)
