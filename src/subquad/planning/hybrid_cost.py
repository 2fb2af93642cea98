"""What Hybrid costs: a call of its window, and a causal call of its far method that is shorter by the window.

    window    n queries, n keys                  far    n - w queries, n - w keys, values with one more column

Joining the two takes a few numbers per row and output, which are counted as moved, not as products.

Axes: n queries, d width, e value width, w keys of the window, r features.
"""

from dataclasses import replace
from typing import Any

import torch

from subquad.methods.hybrid import Hybrid
from subquad.methods.method import feature_method
from subquad.planning.cost_result import Cost, order_of
from subquad.planning.feature_cost import feature_cost
from subquad.planning.shape import Shape
from subquad.planning.sparse_cost import sparse_cost, state_bytes

JOINED_COPIES = 4  # of the output: of both parts, cleaned, and of their sum


def far_shape(method: Hybrid, shape: Shape) -> Shape:
    """Return the shape of the far call, also of one token after a state; lengths may be 0."""
    later = max(0, shape.key_length - method.window.reach)
    return replace(shape, query_length=min(shape.query_length, later), key_length=later, value_dim=shape.value_dim + 1)


def hybrid_cost(method: Any, shape: Shape, form: str | None, dtype: torch.dtype) -> Cost:
    """Return the cost of a call of `Hybrid`; raise ValueError if it is not causal or lengths do not fit."""
    n, m = shape.query_length, shape.key_length
    if not shape.is_causal and form != "step":
        raise ValueError(f"is_causal: far keys of {method.label} are earlier ones; expected True, got False")
    if n != m and form != "step":
        raise ValueError(f"key_length: {method.label} compares positions; expected {n} keys, got {m}")
    near, own = sparse_cost(method.window, shape, form, dtype), far_shape(method, shape)
    if own.key_length == 0:
        far = Cost(0, 0, 0, 0, 0, near.form, "")
    else:
        far = feature_cost(method.far, own, form, dtype)
    wide = torch.promote_types(dtype, torch.float32).itemsize
    joined = JOINED_COPIES * wide * shape.outputs * (2 if shape.training else 1)
    keeper = replace(method.window, size=method.window.reach + 1)
    window_bytes = shape.batch * shape.key_heads * state_bytes(keeper, shape, dtype.itemsize)
    factors = 0 if method.log_factor is None else method.log_factor.numel()
    r = feature_method(method.far).size(shape.head_dim)
    time, memory = "n (w + r) (d + e)", "n e + r e"
    if near.form == "step":
        time, memory = "(w + r) (d + e)", "w (d + e) + r e"
    return Cost(
        flops=near.flops + far.flops,
        bytes_moved=near.bytes_moved + far.bytes_moved + 2 * joined,
        peak_bytes=near.peak_bytes + far.peak_bytes + joined,
        state_bytes=window_bytes + far.state_bytes,
        parameters=far.parameters + factors,
        form=near.form,
        order=order_of(time, memory, shape, r, f", w = {method.window.reach} near keys"),
    )
