"""What Multipole costs: a query meets keys and pseudo-keys, each for 2 (d + e) operations.

    keys           the first, the near ones, and those of the chosen blocks
    pseudo-keys    1 + r for each block that it looks at, 1 + 2r for each group

Axes as in _multipole.py. Counted are the products of the native kernels. In training torch's operations make them, and
read for all rows of a tile what any of them chose: counted as all that they see.
"""

from itertools import pairwise

from subquad import _multipole as multipole
from subquad._layout import Layout
from subquad._multipole import Multipole
from subquad._work import seen_pairs


def met(method: Multipole, layout: Layout, is_causal: bool) -> int:
    """Keys and pseudo-keys that all queries of a head meet."""
    n, m = layout.queries, layout.keys
    last = _read(method, m, is_causal)
    return _read_up_to(method, min(n, m)) + max(0, n - m) * last if is_causal else n * last


def met_in_training(method: Multipole, layout: Layout, is_causal: bool) -> int:
    """The same where rows share what any of them chose, at most."""
    n, m = layout.queries, layout.keys
    pairs = seen_pairs(n, m, 1) if is_causal else n * m
    return pairs + pairs * (1 + method.rank) // method.block


def _read(method: Multipole, sees: int, is_causal: bool) -> int:
    """By one query that sees so many keys."""
    far = max(0, sees - method.sinks - (method.window if is_causal else 0)) // method.block
    return sees - far * method.block + _chosen(method, far, far + 1)


def _read_up_to(method: Multipole, count: int) -> int:
    """By queries that see 1, 2, ..., count keys. Of each number of far blocks, but for 0, there are `block` of them."""
    alone = min(count, method.sinks + method.window + method.block - 1)  # without a far block
    most, rest = divmod(count - alone, method.block)  # 1 .. most, and of the next number only some
    far = method.block * most * (most + 1) // 2 + rest * (most + 1)
    read = method.block * _chosen(method, 0, most + 1) + rest * _chosen(method, most + 1, most + 2)
    return count * (count + 1) // 2 - method.block * far + read


def _chosen(method: Multipole, first: int, end: int) -> int:
    """What stands for the far blocks of queries with first, first + 1, ..., end - 1 of them, one query of each:
    pseudo-keys that are looked at, and keys of the blocks that are read."""
    sizes = multipole.sizes_of(end)
    starts = [multipole.GROUPED, *(multipole.OPENED * size**2 for size in sizes[1:])][: len(sizes)]
    total = 0
    for size, (here, there) in zip([1, *sizes], pairwise([0, *starts, end]), strict=True):
        low, high = max(first, here), min(end, there)
        if low < high:
            total += _chosen_below(method, high, size) - _chosen_below(method, low, size)
    return total


def _chosen_below(method: Multipole, end: int, size: int) -> int:
    """The same for 0, 1, ..., end - 1 far blocks, if all of them were in groups of this size."""
    looked_at, read = _looked_at(end, size, end), _looked_at(end, size, method.top)
    groups = size * _triangle(end // size) + end // size * (end % size) if size > 1 else 0
    return read * method.block + looked_at * (1 + method.rank) + groups * (1 + 2 * method.rank)


def _looked_at(end: int, size: int, most: int) -> int:
    """The blocks, `most` of each query at most: all as far as the groups can all be opened; then those of the opened
    groups, and those after the last group, of which there are 0, 1, ..., size - 1, 0, 1, ..."""
    whole = end if size == 1 else min(end, multipole.OPENED * size)
    rounds, rest = divmod(end - whole, size)
    below = _capped(whole, most)
    return below + rounds * (_capped(whole + size, most) - below) + _capped(whole + rest, most) - below


def _capped(end: int, most: int) -> int:
    """0 + 1 + ... + end - 1, each counted as `most` at most."""
    return _triangle(min(end, most)) + max(0, end - most) * most


def _triangle(end: int) -> int:
    return end * (end - 1) // 2


def moments_flops(method: Multipole, layout: Layout) -> int:
    """Of the moments of a head's blocks and groups."""
    d, e, keys = layout.width, layout.value_width, max(0, layout.keys - method.sinks)
    total = 0
    for size in (1, *multipole.sizes_of(keys // method.block)):
        rank, used = method.rank * (1 if size == 1 else 2), keys // (size * method.block) * size * method.block
        # Products with the offsets: the start, two a round, the coordinates; then the second and the cross moments.
        total += 2 * used * rank * ((2 + 2 * multipole.ROUNDS) * d + rank + e)
    return total


def moments_elements(method: Multipole, layout: Layout) -> int:
    """Numbers of the moments of a head."""
    d, e, keys, total = layout.width, layout.value_width, max(0, layout.keys - method.sinks), 0
    for size in (1, *multipole.sizes_of(keys // method.block)):
        rank = method.rank * (1 if size == 1 else 2)
        total += keys // (size * method.block) * ((1 + rank) * (d + e) + rank * (rank + 1) // 2)
    return total
