"""What a layer of each method can read from its past when a model is trained with it.

Against exact attention nothing is approximated then: the method is the model. What differs is how much of the past it
can read: all tokens, the nearest ones, or a summary of fixed size.
"""

from typing import Any

from subquad._engines import engine_of
from subquad.methods.hybrid import Hybrid
from subquad.methods.method import feature_method
from subquad.planning.shape import Shape


def recalls_all(method: Any) -> bool:
    """Return whether a query can read any single token."""
    return engine_of(method) in ("exact", "multipole")


def recall_of(method: Any, shape: Shape) -> str:
    """Return what a query can read, in a few words."""
    engine = engine_of(method)
    if engine == "exact":
        return "all tokens"
    if engine == "multipole":
        return "all tokens: near and important ones one by one"
    if engine == "sparse":
        near = f"the last {method.reach:,}" if shape.is_causal else f"{method.reach - 1:,} on either side"
        return f"{near} and the first {method.sinks} tokens of each layer"
    if isinstance(method, Hybrid):
        return f"the last {method.window.reach:,} tokens, and {recall_of(method.far, shape)}"
    count = feature_method(method).size(shape.head_dim)
    return f"a summary of all tokens ({count:,} features per head), not single ones"
