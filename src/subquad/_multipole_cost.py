"""What Multipole costs: a query meets keys and pseudo-keys, each for 2 (d + e) operations.

    keys           the first, the near ones, and those of the chosen blocks
    pseudo-keys    1 + r for each block that it looks at, 1 + 2r for each group

Axes as in _multipole.py. Counted are the products of the native kernels; in the backward, which torch's operations
make, each is made again, and twice more for the gradients, and rows share the blocks that any of them chose.
"""

from functools import lru_cache

import torch
from torch import Tensor

from subquad import _multipole as multipole
from subquad._layout import Layout
from subquad._multipole import Multipole


def met(method: Multipole, layout: Layout, is_causal: bool) -> int:
    """Keys and pseudo-keys that all queries of a head meet."""
    n, m = layout.queries, layout.keys
    last = _read(method, m, is_causal)
    return _read_up_to(method, min(n, m)) + max(0, n - m) * last if is_causal else n * last


def _read(method: Multipole, sees: int, is_causal: bool) -> int:
    """By one query that sees so many keys."""
    far = max(0, sees - method.sinks - (method.window if is_causal else 0)) // method.block
    return sees - far * method.block + int(_chosen(method, torch.tensor([far], device="cpu")))


def _read_up_to(method: Multipole, count: int) -> int:
    """By queries that see 1, 2, ..., count keys. Of each number of far blocks, but for 0, there are `block` of them."""
    alone = min(count, method.sinks + method.window + method.block - 1)  # without a far block
    most, rest = divmod(count - alone, method.block)  # 1 .. most, and of the next number only some
    chosen = _chosen_up_to(method, 1 << (most + 1).bit_length())
    far = method.block * most * (most + 1) // 2 + rest * (most + 1)
    read = method.block * int(chosen[most]) + rest * int(chosen[most + 1] - chosen[most])
    return count * (count + 1) // 2 - method.block * far + read


@lru_cache
def _chosen_up_to(method: Multipole, most: int) -> Tensor:
    """Summed over queries with 1, 2, ... far blocks, one of each; the first is 0."""
    far = torch.arange(most + 1, device="cpu")
    return torch.where(far > 0, _chosen(method, far), 0).cumsum(0)


def _chosen(method: Multipole, far: Tensor) -> Tensor:
    """What stands for so many far blocks: pseudo-keys that are looked at, and keys of the blocks that are read."""
    size = torch.ones_like(far)
    for each in multipole.sizes_of(int(far.max())):
        from_here = multipole.GROUPED if each == multipole.LEAST else multipole.OPENED * each * each
        size = torch.where(far >= from_here, each, size)
    groups = torch.where(size > 1, far // size, 0)
    blocks = torch.where(size > 1, groups.clamp(max=multipole.OPENED) * size + far % size, far)
    read = blocks.clamp(max=method.top) * method.block
    return read + blocks * (1 + method.rank) + groups * (1 + 2 * method.rank)


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
