"""What Multipole costs: a query meets keys and pseudo-keys, each for 2 (d + e) operations.

    keys           the first, the near ones, and those of the chosen blocks
    pseudo-keys    1 + r for each block that it looks at, 1 + 2r for each group

Axes as in _multipole.py. Counted are the products of the native kernels; in the backward, which torch's operations
make, each is made again, and twice more for the gradients, and rows share the blocks that any of them chose.
"""

import torch
from torch import Tensor

from subquad import _multipole as multipole
from subquad._layout import Layout
from subquad._multipole import Multipole


def met(method: Multipole, layout: Layout, is_causal: bool) -> int:
    """Keys and pseudo-keys that all queries of a head meet."""
    n, m = layout.queries, layout.keys
    if not is_causal:
        return n * int(_met_by(method, torch.tensor([m]), False).sum())
    both = min(n, m)
    total = 0
    for first in range(1, both + 1, STRETCH):
        total += int(_met_by(method, torch.arange(first, min(both, first + STRETCH - 1) + 1), True).sum())
    return total + (n - both) * int(_met_by(method, torch.tensor([m]), True).sum())


STRETCH = 1 << 20  # queries whose numbers are in memory at once


def _met_by(method: Multipole, sees: Tensor, is_causal: bool) -> Tensor:
    """By queries that see so many keys."""
    far = multipole.far_blocks(method, sees, is_causal)
    size = torch.ones_like(far)
    for each in multipole.sizes_of(int(far.max())):
        size = torch.where(
            far >= (multipole.GROUPED if each == multipole.LEAST else multipole.OPENED * each**2), each, size
        )
    groups = torch.where(size > 1, far // size, 0)
    blocks = torch.where(size > 1, groups.clamp(max=multipole.OPENED) * size + far % size, far)
    keys = sees - far * method.block + blocks.clamp(max=method.top) * method.block
    return keys + blocks * (1 + method.rank) + groups * (1 + 2 * method.rank)


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
