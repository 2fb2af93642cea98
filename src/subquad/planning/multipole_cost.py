"""What Multipole costs: a query meets keys and pseudo-keys, each for 2 (d + e) operations.

    keys           the first, those after the finished segments, and those of the blocks that are read
    pseudo-keys    one for each block that is considered, and one for each segment where segments are opened
    looks          at the keys of a block in 8 bits, without values: counted as one eighth of a key each

The counts are those of the native kernel. Torch's operations read for all rows of a tile what any of them chose:
counted as everything that they see.
"""

from typing import Any

import torch

from subquad import native
from subquad._engines.multipole.records import Layout
from subquad.methods import multipole as settings
from subquad.methods.multipole import BLOCKS_PER_SEGMENT, Multipole
from subquad.native.calls import ROUNDS, padded
from subquad.planning.cost_result import Cost, order_of
from subquad.planning.shape import Shape, seen_pairs

LOOKS_PER_KEY = 8


def multipole_cost(method: Any, shape: Shape, form: str | None, dtype: torch.dtype) -> Cost:
    """Return the cost of a call of `Multipole`."""
    d, e, training, is_step = shape.head_dim, shape.value_dim, shape.training, form == "step"
    b, heads = shape.batch * shape.key_heads, shape.batch * shape.heads
    number, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    if is_step:  # The last query sees all keys; the segments before it are finished.
        pairs, sorting = met_by_one(method, shape.key_length), 0
    else:
        pairs, sorting = met(method, shape), b * segment_flops(method, shape)
    chosen = "step" if is_step else form or ("fused" if native.available() else "dense")
    if chosen == "dense":  # Rows of a tile read what any of them chose.
        pairs = met_by_torch(method, shape)
    flops = heads * 2 * pairs * (d + e) + sorting
    kept = b * state_numbers(method, shape, wide)
    made = b * shape.key_length * (d + padded(e)) + kept  # keys in panels, and the segments
    moved = number * (shape.inputs + shape.outputs) + wide * (heads * pairs * (d + e) if is_step else 2 * made)
    peak = number * shape.outputs + wide * (shape.outputs + (0 if is_step else made))
    if training:  # The backward pass visits all far blocks, and makes every product again with its two gradients.
        visited = pairs if chosen == "dense" else met(method, shape, opens_all=True)
        flops += heads * 2 * visited * (3 * d + 2 * e) + sorting
        moved *= 4
        # Gradients of queries, keys and values; rows and panels of all keys; two sums of gradients of each.
        peak += number * shape.inputs + wide * (2 * shape.outputs + b * shape.key_length * (8 * d + 7 * e))
    fraction = "" if chosen == "dense" else " / 16" if training else " / 256"
    order = order_of(f"n m{fraction} (d + e)", "n e + m (d + e)", shape)
    return Cost(flops, moved, peak, wide * kept, 0, chosen, order)


def met(method: Multipole, shape: Shape, opens_all: bool = False) -> int:
    """Return the keys and pseudo-keys that all queries of a head meet; `opens_all`: if they open every segment."""
    n, m = shape.query_length, shape.key_length
    extra = _extra_blocks(method, n, m, shape.is_causal) if opens_all else 0
    if not shape.is_causal:
        return n * met_by_one(method, m) + extra
    return _met_up_to(method, min(n, m)) + max(0, n - m) * met_by_one(method, m) + extra


def _extra_blocks(method: Multipole, n: int, m: int, is_causal: bool) -> int:
    """Return about how many blocks are in segments that queries do not open."""
    far = max(0, m - method.sinks - method.window) // method.segment
    closed = max(0, far - settings.OPENED_SEGMENTS) if far >= settings.GROUPED_FROM_SEGMENTS else 0
    return n * BLOCKS_PER_SEGMENT * closed // (2 if is_causal else 1)


def met_by_torch(method: Multipole, shape: Shape) -> int:
    """Return the same where rows share what any of them chose: an upper bound."""
    n, m = shape.query_length, shape.key_length
    pairs = seen_pairs(n, m) if shape.is_causal else n * m
    return pairs + pairs // method.block


def met_by_one(method: Multipole, sees: int) -> int:
    """Return what one query meets that sees `sees` keys."""
    far = max(0, sees - method.sinks - method.window) // method.segment
    return sees - far * method.segment + _met_far(method, far)


def _met_far(method: Multipole, far: int) -> int:
    """Return what stands for `far` segments."""
    is_grouped = far >= settings.GROUPED_FROM_SEGMENTS
    blocks = BLOCKS_PER_SEGMENT * (min(settings.OPENED_SEGMENTS, far) if is_grouped else far)
    looks = min(method.looks, blocks) * method.block // LOOKS_PER_KEY
    return blocks + (far if is_grouped else 0) + looks + min(method.top, blocks) * method.block


def _met_up_to(method: Multipole, count: int) -> int:
    """Return what queries meet that see 1, 2, ..., count keys; all of a segment have the same number of far ones."""
    alone = min(count, method.sinks + method.window + method.segment - 1)  # without a far segment
    most, rest = divmod(count - alone, method.segment)  # 1 .. most, and of the next number only some
    far = method.segment * most * (most + 1) // 2 + rest * (most + 1)
    read = method.segment * _met_far_up_to(method, most) + rest * _met_far(method, most + 1)
    return count * (count + 1) // 2 - method.segment * far + read


def _met_far_up_to(method: Multipole, most: int) -> int:
    """Return the sum of `_met_far` for 1, 2, ..., most segments: linear once segments are grouped."""
    single = min(most, max(settings.GROUPED_FROM_SEGMENTS, settings.OPENED_SEGMENTS))
    total = sum(_met_far(method, far) for far in range(1, single + 1))
    if most > single:
        total += (most - single) * (_met_far(method, single + 1) + _met_far(method, most)) // 2
    return total


def segment_flops(method: Multipole, shape: Shape) -> int:
    """Return the work of sorting and describing a head's segments."""
    d, e, keys = shape.head_dim, shape.value_dim, max(0, shape.key_length - method.sinks - method.window)
    levels = (BLOCKS_PER_SEGMENT - 1).bit_length()
    # Each cut: the mean, offsets, start, two products per round, the projections; then moments of blocks and segments.
    return keys // method.segment * method.segment * (levels * (5 + 4 * ROUNDS) * d + 2 * (4 * d + e))


def state_numbers(method: Multipole, shape: Shape, itemsize: int) -> int:
    """Return how many wide numbers of this size the state of a head has."""
    d, e = shape.head_dim, padded(shape.value_dim)
    segments = max(0, shape.key_length - method.sinks - method.window) // method.segment
    record = Layout(d, e, method.block, itemsize)
    roots = -(-segments // BLOCKS_PER_SEGMENT) * record.header
    return segments * record.size + roots + (padded(method.sinks) + padded(method.window + method.segment)) * (d + e)
