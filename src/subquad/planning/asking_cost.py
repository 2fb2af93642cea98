"""The cost of checking whether a method is accurate enough, in equivalent operations of exact attention.

    rows to pick       norms and sorting, for every query
    exact rows         rows * keys pairs
    rows of a method   pairs, gathered keys of a window, sorted keys of Multipole, or features of all keys

The factors were measured against torch's attention on one thread, at 8,192 tokens and width 64.
"""

from typing import Any

from subquad._engines import engine_of
from subquad.methods.method import feature_method
from subquad.planning.multipole_cost import met_by_one, segment_flops
from subquad.planning.reference import TRAINING_FACTOR
from subquad.planning.rows import WINDOW_ROW_PRICE
from subquad.planning.shape import Shape

CALL_FLOPS = 50_000_000  # what the interpreter takes for some fifty operations
PICK_FLOPS = 35_000  # of a query
PAIR_PRICE, SORT_PRICE, FEATURE_PRICE = 1.5, 10, 8  # of an operation, relative to exact attention
EXPONENTIAL_FLOPS = 64  # of a weight, besides its products: in narrow heads most of the time
MEASURED_WIDTH = 128  # of keys and values together, where the factors were measured


def exact_flops(shape: Shape) -> float:
    """Return the operations of exact attention, with those of its exponentials, in units of wide heads."""
    products, share = (
        2 * (shape.head_dim + shape.value_dim),
        2 * MEASURED_WIDTH / (2 * MEASURED_WIDTH + EXPONENTIAL_FLOPS),
    )
    return shape.pairs * (products + EXPONENTIAL_FLOPS) * share * (TRAINING_FACTOR if shape.training else 1)


def exact_rows_flops(shape: Shape, rows: int) -> float:
    """Return the cost of picking rows of each head and computing them exactly."""
    queries = shape.batch * shape.heads * shape.query_length
    return CALL_FLOPS + PICK_FLOPS * queries + _pairs_flops(shape, rows)


def method_rows_flops(method: Any, shape: Shape, rows: int) -> float:
    """Return the cost of computing as many rows of each head by a method."""
    width, heads, m = shape.head_dim + shape.value_dim, shape.batch * shape.heads, shape.key_length
    engine = engine_of(method)
    if engine == "multipole":
        sorting = shape.batch * shape.key_heads * segment_flops(method, shape)
        return SORT_PRICE * sorting + PAIR_PRICE * 2 * heads * rows * met_by_one(method, m) * width
    if engine == "sparse":
        sees: int = min(m, method.reach + method.sinks)
        return WINDOW_ROW_PRICE * 2 * heads * rows * sees * width
    features = feature_method(method)
    if features.of_logits is not None:
        return _pairs_flops(shape, rows)
    return FEATURE_PRICE * 2 * heads * m * features.size(shape.head_dim) * shape.head_dim + _pairs_flops(shape, rows)


def _pairs_flops(shape: Shape, rows: int) -> float:
    pairs = shape.batch * shape.heads * rows * shape.key_length
    return PAIR_PRICE * 2 * pairs * (shape.head_dim + shape.value_dim)
