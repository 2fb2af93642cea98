"""Methods: the values that a user can name, one file each.

To add a method, write its file, add its class to `BUILT_IN` and its name to `names.MethodName`, and export it from
`subquad`. `BlockSparse` has no name: it cannot be made without a layout. `Hybrid` has the names of its two parts,
"window:64+taylor:2". `Hedgehog` is a feature map, as users write them, and has a name.
"""

from typing import Any, TypeAlias

from subquad.methods.block_sparse import BlockSparse
from subquad.methods.error_estimate import ErrorEstimate
from subquad.methods.exact import Exact
from subquad.methods.feature_map import FeatureMap
from subquad.methods.hedgehog import Hedgehog
from subquad.methods.hybrid import Hybrid
from subquad.methods.linear import Linear
from subquad.methods.method import FeatureMethod, Method, feature_method, for_layer
from subquad.methods.multipole import Multipole
from subquad.methods.names import NAMES, MethodName, method_named
from subquad.methods.random_features import RandomFeatures
from subquad.methods.separable import Separable
from subquad.methods.taylor import Taylor
from subquad.methods.window import Window

BUILT_IN: tuple[type[Method], ...] = (Exact, Taylor, RandomFeatures, Linear, Separable, Window, Multipole)
KINDS: dict[str, Any] = {**{kind.name: kind for kind in BUILT_IN}, Hedgehog.name: Hedgehog}

AnyMethod: TypeAlias = Method | FeatureMap  # what `resolve` returns
MethodLike: TypeAlias = AnyMethod | MethodName | str  # what a user may pass; a name may have an argument, "taylor:3"

__all__ = [
    "AnyMethod", "BUILT_IN", "BlockSparse", "ErrorEstimate", "Exact", "FeatureMap", "FeatureMethod", "Hedgehog",
    "Hybrid", "KINDS", "Linear", "Method", "MethodLike", "MethodName", "Multipole", "NAMES", "RandomFeatures",
    "Separable", "Taylor", "Window", "feature_method", "for_layer", "label_of", "resolve",
]  # fmt: skip


def resolve(method: MethodLike, more_names: tuple[str, ...] = ()) -> AnyMethod:
    """Return the method with this name, or the method itself.

    Args:
        method: A name such as "taylor" or "taylor:3", two of them for a `Hybrid` ("window:64+taylor"), a built-in
            method, or an object with the members of `FeatureMap`.
        more_names: Further names for the error message.
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        near, plus, far = method.partition("+")
        if not plus:
            found: AnyMethod = method_named(method, KINDS, more_names)
            return found
        parts = [method_named(part, KINDS, more_names) for part in (near, far)]
        try:
            return Hybrid(*parts)
        except ValueError as error:
            raise ValueError(f"method: {method!r}: {error}") from error
    if isinstance(method, type):
        raise TypeError(
            f"method: expected a method such as {method.__name__}(), got the class {method.__name__} itself"
        )
    if not callable(method) or not all(hasattr(method, name) for name in ("positive", "size")):
        raise TypeError(
            f"method: expected a name, a method such as Taylor(2), or an object with the members of FeatureMap "
            f"(positive, size and __call__), got {type(method).__name__}"
        )
    return method


def label_of(method: AnyMethod) -> str:
    """Return a short name for tables and messages."""
    return method.label if isinstance(method, Method) else str(method)
