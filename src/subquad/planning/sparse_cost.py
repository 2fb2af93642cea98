"""What Window and BlockSparse cost: exact softmax over the pairs that are seen.

    forward     2 pairs (d + e)
    backward    2 pairs (d + e + d)        by queries: logits, gradients of weights, gradients of queries
              + 2 pairs (d + e + d + e)    by keys: logits, gradients of weights, of keys and of values

These are the counts of the native kernels. Torch's operations work in tiles of rows, each with all keys that one of its
rows sees, and keep the weights for the backward pass.

Axes: n queries, m keys, d width, e value width, w keys that a query sees.
"""

from typing import Any

import torch

from subquad import native
from subquad._engines.sparse.by_torch import TILE_ROWS
from subquad._engines.sparse.memory import MAX_SPARE_KEYS, MIN_SPARE_KEYS
from subquad.methods.block_sparse import BlockSparse
from subquad.methods.sparse import SparseMethod
from subquad.methods.window import Window
from subquad.native.calls import TYPES
from subquad.planning.cost_result import Cost, order_of
from subquad.planning.shape import Shape
from subquad.planning.sparse_pairs import has_places, keys_of_last, pairs_of, tile_keys, tile_pairs, window_of

BOUND_BYTES = 16  # of a query: four bounds
PLACE_BYTES = 8  # of a sink: its place in the sequence
VISIBLE_BYTES = 1  # of a key: whether it is visible
KEPT_WEIGHTS, GRADIENT_WEIGHTS = 2, 4  # tensors like the weights that torch keeps, and makes in the backward pass


def has_kernel(shape: Shape, dtype: torch.dtype) -> bool:
    """Return whether the native kernels compute a call of this shape on the CPU."""
    return native.available() and dtype in TYPES and shape.query_length * shape.key_length > 0


def sparse_cost(method: Any, shape: Shape, form: str | None, dtype: torch.dtype) -> Cost:
    """Return the cost of a call of `Window` or `BlockSparse`; raise ValueError if lengths do not fit the method."""
    n, m = shape.query_length, shape.key_length
    if isinstance(method, BlockSparse):
        method.blocks(shape.heads, n, m)
    elif form != "step" and not has_places(method, n, m, shape.is_causal):
        raise ValueError(f"key_length: a window on both sides compares positions; expected {n} keys, got {m}")
    chosen = form or ("fused" if has_kernel(shape, dtype) else "dense")
    d, e, training = shape.head_dim, shape.value_dim, shape.training
    heads, key_heads = shape.batch * shape.heads, shape.batch * shape.key_heads
    number = dtype.itemsize
    state = key_heads * state_bytes(method, shape, number)
    products = d + e + (4 * d + 3 * e if training else 0)
    if chosen == "step":
        seen = keys_of_last(window_of(method), shape.key_length)
        pairs, moved = heads * seen, number * (heads + key_heads * seen) * (d + e)
        peak = _kernel_bytes(shape, dtype) + state  # A state without room for the key is replaced.
    elif chosen == "fused":
        pairs, peak = pairs_of(method, shape), _kernel_bytes(shape, dtype)
        moved = number * (shape.inputs + shape.outputs)
        if training:  # Two passes over inputs, output and its gradient; and the gradients.
            moved += number * (3 * shape.inputs + 4 * shape.outputs)
    else:
        pairs = heads * tile_pairs(window_of(method), shape, TILE_ROWS)
        products = (3 if training else 1) * (d + e)  # autograd: each product, and the gradients of its factors
        wide = torch.promote_types(dtype, torch.float32).itemsize
        moved = number * (3 * shape.inputs + 2 * shape.outputs if training else shape.inputs + shape.outputs)
        moved += wide * pairs * (6 if training else 2)
        peak = wide * _torch_numbers(window_of(method), shape, pairs)
        peak += number * shape.outputs + wide * shape.inputs if number < wide else 0
    return Cost(2 * pairs * products, moved, peak, state, 0, chosen, _order(method, shape, chosen))


def state_bytes(method: SparseMethod, shape: Shape, number: int) -> int:
    """Return the bytes of a key head's state with its room for more keys: constant once the window is full."""
    if not isinstance(method, Window):
        return 0
    kept, sinks = min(shape.key_length, method.reach - 1), min(method.sinks, shape.key_length)
    room = sinks + kept + max(MIN_SPARE_KEYS, min(method.reach, MAX_SPARE_KEYS, kept))
    token = number * (shape.head_dim + shape.value_dim)
    return room * (token + VISIBLE_BYTES) + sinks * (token + PLACE_BYTES)


def _kernel_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Return the peak of the kernels: wide results, and a few numbers of each row. Buffers of threads are left out."""
    number, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    rows, outputs, inputs = shape.batch * shape.heads * shape.query_length, shape.outputs, shape.inputs
    narrow = number if number < wide else 0  # bytes of a number in copies that are not wide
    peak = wide * outputs + BOUND_BYTES * shape.query_length
    # Of each row: the logarithm of its sum of weights, its poison, and the product of its output and gradient.
    if not shape.training:
        return peak + max(wide * 2 * rows, narrow * outputs)
    gradient = wide * outputs if narrow else 0  # of the output, made wide
    return peak + wide * (inputs + 3 * rows) + narrow * (inputs + outputs) + gradient


def _torch_numbers(method: Window, shape: Shape, pairs: int) -> int:
    """Return the most numbers that torch's operations hold at once, the result included."""
    d, e, n, outputs = shape.head_dim, shape.value_dim, shape.query_length, shape.outputs
    heads, key_heads = shape.batch * shape.heads, shape.batch * shape.key_heads
    queries, keys = heads * n * d, key_heads * shape.key_length * (d + e)  # without NaN
    rows, last = min(TILE_ROWS, n), max(0, n // TILE_ROWS - 1)
    places = {0, last // 2, last, min(last, shape.key_length // TILE_ROWS)}
    widest = max(tile_keys(method, shape, k * TILE_ROWS, rows) for k in places) if n else 0
    tile, masks = heads * rows * widest, (1 + key_heads) * rows * widest // 4  # Four bytes of masks are a number.
    if not shape.training:
        copies = widest * (d + e) * (key_heads + heads * (heads > key_heads))
        return queries + keys + max(outputs + copies + 3 * tile + masks, 3 * outputs)
    copies = pairs // max(1, rows) * (d + e)
    kept = 2 * queries + outputs + KEPT_WEIGHTS * pairs + copies
    return kept + keys + max(outputs + GRADIENT_WEIGHTS * tile, 2 * outputs)


def _order(method: SparseMethod, shape: Shape, form: str) -> str:
    """Return how time and memory grow."""
    window = window_of(method)
    sees = min(shape.key_length, (window.reach if shape.is_causal else 2 * window.reach - 1) + window.sinks)
    w, more = ("m", "") if window.size is None else ("w", f", w = {sees} keys that a query sees")
    if form == "step":
        return order_of(f"{w} (d + e)", f"{w} (d + e)", shape, more=more)
    if form == "fused" and isinstance(method, BlockSparse):
        return order_of("p n m (d + e)", "n e", shape, more=f", p = {method.density:.2g} of the blocks")
    memory = "n e" if form == "fused" else f"n {w}" if shape.training else "n (d + e) + m (d + e)"
    return order_of(f"n {w} (d + e)", memory, shape, more=more)
