"""Engines: how a method is computed. One engine for each family of methods.

    exact        torch's scaled_dot_product_attention
    features     sums of features, in one of five forms
    hybrid       near keys exactly, older ones by sums of features
    multipole    near keys exactly, blocks of far keys by their moments
    sparse       exact softmax over a window of keys, or over chosen blocks

A new engine adds its module here and its name to `methods.method.Engine`.
"""

from typing import Any

import torch

from subquad._calls.call import Call
from subquad._calls.masks import NotServed
from subquad._calls.state import check_state
from subquad._engines import exact
from subquad._engines.features import engine as features
from subquad._engines.hybrid import engine as hybrid
from subquad._engines.multipole import engine as multipole
from subquad._engines.result import Result
from subquad._engines.sparse import engine as sparse
from subquad.methods import Method
from subquad.methods.method import Engine

__all__ = ["Result", "engine_of", "run"]


def engine_of(method: Any) -> Engine:
    """Return the name of the engine that computes a method; a user's feature map is computed by "features"."""
    return method.engine if isinstance(method, Method) else "features"


def run(method: Any, call: Call, form: Any = None, chunk: int | None = None) -> Result:
    """Compute a call by a method; tests may choose the form and the chunk."""
    name = engine_of(method)
    if call.state is not None:
        dtype = call.key.dtype
        if name in ("hybrid", "sparse") and call.is_autocast:  # It keeps keys as it computes with them.
            dtype = torch.promote_types(dtype, torch.float32)
        check_state(call.state, method, call.layout, call.segments is not None, dtype, call.logit_scale)
    if name == "exact":
        return exact.run(method, call)
    if call.dropout_p != 0:
        raise NotServed(
            f"dropout_p: expected 0, got {call.dropout_p}: only exact attention has dropout on the weights. "
            'Use method="exact", or dropout on the output.'
        )
    if name == "hybrid":
        return hybrid.run(method, call, form, chunk)
    if name == "multipole":
        return multipole.run(method, call, form)
    if name == "sparse":
        return sparse.run(method, call, form)
    return features.run(method, call, form, chunk)
