"""What exact attention costs: torch's own kernel, counted by the pairs that are seen.

flops = 2 pairs (d + e)
"""

from dataclasses import replace
from typing import Any

import torch

from subquad.planning.cost_result import Cost, order_of
from subquad.planning.shape import Shape


def exact_cost(method: Any, shape: Shape, form: str | None, dtype: torch.dtype) -> Cost:
    """Return the cost of a call of `Exact`."""
    is_step, training = form == "step", shape.training
    n, m, d, e = shape.query_length, shape.key_length, shape.head_dim, shape.value_dim
    heads = shape.batch * shape.heads
    pairs = (replace(shape, is_causal=False) if is_step else shape).pairs
    # The backward pass makes the logits again, then the gradients of both factors of both products.
    flops = 2 * pairs * (4 * d + 3 * e if training else d + e)
    inputs, outputs = shape.inputs, shape.outputs
    is_fused = d == e  # Otherwise torch has no kernel that avoids the matrix of weights.
    number, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    made = 0 if is_fused else heads * n * m
    moved = number * (3 * inputs + 2 * outputs if training else inputs + outputs) + wide * made * (6 if training else 2)
    if is_fused:
        # A logarithm per row; and the gradients, with that of the result where it is not contiguous.
        peak = number * outputs + wide * heads * n + (number * (inputs + outputs) if training else 0)
    else:
        # Queries and keys times the root of the scale; the logits, the weights, and the mask of rows without a key, a
        # byte each; in the backward pass weights, their gradient, and that of the logits. GQA repeats keys and values.
        repeated = heads * m * (d + e) if shape.heads > shape.key_heads else 0
        peak = wide * ((3 if training else 2) * made + heads * (n + m) * d + repeated)
        peak += number * heads * (n + m) * e if training else made + n * m * wide * shape.is_causal
    state = number * shape.batch * shape.key_heads * m * (d + e)
    order = order_of("n m (d + e)", "n e" if is_fused else "n m", shape)
    return Cost(flops, moved, peak + (state if is_step else 0), state, 0, "step" if is_step else "exact", order)
