"""What Multipole costs: a query meets keys and pseudo-keys, each for 2 (d + e) operations.

    keys           the first, the near ones, and those of the chosen blocks
    pseudo-keys    1 + r for each block that it looks at, 1 + 2r for each group

The counts are those of the native kernel. In training torch's operations read for all rows of a tile what any of them
chose: counted as everything that they see.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from subquad import native
from subquad._engines.multipole.moments import ITERATIONS
from subquad.methods import multipole
from subquad.methods.multipole import Multipole
from subquad.planning.cost_result import Cost, order_of
from subquad.planning.shape import Shape, seen_pairs


def multipole_cost(method: Any, shape: Shape, form: str | None, dtype: torch.dtype) -> Cost:
    """Return the cost of a call of `Multipole`."""
    d, e, training, is_step = shape.head_dim, shape.value_dim, shape.training, form == "step"
    b, heads = shape.batch * shape.key_heads, shape.batch * shape.heads
    number, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    if is_step:  # The last query sees all keys; the moments of those before it exist.
        pairs = met(method, shape)
        if shape.is_causal:
            pairs = met(method, replace(shape, query_length=shape.key_length)) - met(
                method, replace(shape, query_length=shape.key_length - 1, key_length=shape.key_length - 1))  # fmt: skip
        moments = 0
    else:
        pairs, moments = met(method, shape), b * moments_flops(method, shape)
    chosen = "step" if is_step else form or ("fused" if native.available() and not training else "dense")
    if chosen == "dense":  # Rows of a tile read what any of them chose.
        pairs = met_by_torch(method, shape)
    flops = heads * 2 * pairs * (d + e) + moments
    kept = b * (shape.key_length * (d + e) + moments_numbers(method, shape))
    made = b * shape.key_length * d + b * moments_numbers(method, shape)  # the keys transposed, and the moments
    moved = number * (shape.inputs + shape.outputs) + wide * (heads * pairs * (d + e) if is_step else 2 * made)
    peak = number * shape.outputs + wide * (shape.outputs + (0 if is_step else made))
    if training:  # Everything is made again, and a gradient of both factors of each product.
        flops, moved, peak = 4 * flops, 4 * moved, peak + number * shape.inputs + 2 * wide * kept
    order = order_of("n m (d + e)" if chosen == "dense" else "n m^(1/2) (d + e)", "n e + m (d + e)", shape)
    return Cost(flops, moved, peak, wide * kept, 0, chosen, order)


def met(method: Multipole, shape: Shape) -> int:
    """Return the keys and pseudo-keys that all queries of a head meet."""
    n, m = shape.query_length, shape.key_length
    last = _read(method, m, shape.is_causal)
    return _read_up_to(method, min(n, m)) + max(0, n - m) * last if shape.is_causal else n * last


def met_by_torch(method: Multipole, shape: Shape) -> int:
    """Return the same where rows share what any of them chose: an upper bound."""
    n, m = shape.query_length, shape.key_length
    pairs = seen_pairs(n, m) if shape.is_causal else n * m
    return pairs + pairs * (1 + method.rank) // method.block


def _read(method: Multipole, sees: int, is_causal: bool) -> int:
    """Return what one query meets that sees `sees` keys."""
    far = max(0, sees - method.sinks - (method.window if is_causal else 0)) // method.block
    return sees - far * method.block + _chosen(method, far, far + 1)


def _read_up_to(method: Multipole, count: int) -> int:
    """Return what queries meet that see 1, 2, ..., count keys; `block` of them share each number of far blocks > 0."""
    alone = min(count, method.sinks + method.window + method.block - 1)  # without a far block
    most, rest = divmod(count - alone, method.block)  # 1 .. most, and of the next number only some
    far = method.block * most * (most + 1) // 2 + rest * (most + 1)
    read = method.block * _chosen(method, 0, most + 1) + rest * _chosen(method, most + 1, most + 2)
    return count * (count + 1) // 2 - method.block * far + read


def _chosen(method: Multipole, first: int, end: int) -> int:
    """Return what stands for the far blocks of queries with first, ..., end - 1 of them, one query each: pseudo-keys
    that are looked at, and keys of the blocks that are read."""
    sizes = multipole.group_sizes(end)
    starts = [multipole.GROUPED_FROM_BLOCKS, *(multipole.OPENED_GROUPS * size**2 for size in sizes[1:])][: len(sizes)]
    total = 0
    for size, (here, there) in zip([1, *sizes], pairwise([0, *starts, end]), strict=True):
        low, high = max(first, here), min(end, there)
        if low < high:
            total += _chosen_below(method, high, size) - _chosen_below(method, low, size)
    return total


def _chosen_below(method: Multipole, end: int, size: int) -> int:
    """Return the same for 0, 1, ..., end - 1 far blocks, if all were in groups of this size."""
    looked_at, read = _looked_at(end, size, end), _looked_at(end, size, method.top)
    groups = size * _triangle(end // size) + end // size * (end % size) if size > 1 else 0
    return read * method.block + looked_at * (1 + method.rank) + groups * (1 + 2 * method.rank)


def _looked_at(end: int, size: int, most: int) -> int:
    """Return the blocks looked at, at most `most` per query: all while all groups can be opened; then those of the
    opened groups, and those after the last group, of which there are 0, 1, ..., size - 1, 0, 1, ..."""
    whole = end if size == 1 else min(end, multipole.OPENED_GROUPS * size)
    rounds, rest = divmod(end - whole, size)
    below = _capped(whole, most)
    return below + rounds * (_capped(whole + size, most) - below) + _capped(whole + rest, most) - below


def _capped(end: int, most: int) -> int:
    """Return 0 + 1 + ... + end - 1, each term capped at `most`."""
    return _triangle(min(end, most)) + max(0, end - most) * most


def _triangle(end: int) -> int:
    return end * (end - 1) // 2


def moments_flops(method: Multipole, shape: Shape) -> int:
    """Return the work of the moments of a head's blocks and groups."""
    d, e, keys = shape.head_dim, shape.value_dim, max(0, shape.key_length - method.sinks)
    total = 0
    for size in (1, *multipole.group_sizes(keys // method.block)):
        rank, used = method.rank * (1 if size == 1 else 2), keys // (size * method.block) * size * method.block
        # Products with the offsets: the start, two per iteration, the coordinates; then second and cross moments.
        total += 2 * used * rank * ((2 + 2 * ITERATIONS) * d + rank + e)
    return total


def moments_numbers(method: Multipole, shape: Shape) -> int:
    """Return how many numbers the moments of a head have."""
    d, e, keys, total = shape.head_dim, shape.value_dim, max(0, shape.key_length - method.sinks), 0
    for size in (1, *multipole.group_sizes(keys // method.block)):
        rank = method.rank * (1 if size == 1 else 2)
        total += keys // (size * method.block) * ((1 + rank) * (d + e) + rank * (rank + 1) // 2)
    return total
