"""Multipole: near and important keys exactly, all others by the moments of their blocks. For trained models.

Feature maps expand exp around zero, where the logits of a trained model are not. Blocks of keys are expanded around
their own centers. A block of n keys with center mu has offsets k_j - mu; P are the main directions of the offsets,
c_j = P (k_j - mu) their coordinates, S the second moments of c, X the cross moments of c and v, u the mean value.
A scaled query q, with y = P q, sees the block's logits spread around

    m = q.mu    with variance    s = y' S y

and treats it as n keys of weight exp(m + s/2) and value u + X'y: exact if the logits were Gaussian. s is capped at 4.

Read one by one are: the first `sinks` keys, the last `window` keys before the query, the keys between them and the last
whole block, and the `top` blocks that are likely to hold the largest logit, m + sqrt(2 s ln n), chosen by each query
for itself, ties going to the first. Only whole blocks of the past have moments, so nothing of the future enters.

Many blocks are put into groups of G, whose number grows like the square root of the length; groups have moments too, of
twice the rank, and only the best are opened and seen block by block.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

from subquad.methods.checks import check_whole
from subquad.methods.method import Engine, Method

MAX_SETTING = 1 << 31
GROUPED_FROM_BLOCKS = 1024  # far blocks from which on there are groups
MIN_GROUP_BLOCKS = 16
OPENED_GROUPS = 16  # groups that a query opens
MAX_VARIANCE = 4.0  # A larger variance means that a few keys stand out, which a Gaussian does not describe.


@dataclass(frozen=True)
class Multipole(Method):
    """Exact for near keys, the first keys and the best blocks; moments for all other blocks ("fast multipole").

    Works well where neighboring keys are similar, as in a trained model; random keys have no block structure to use.
    Its gradient treats the choice of blocks and the directions of their spread as constants.

    Args:
        window: The number of last keys read exactly, in a causal call.
        sinks: The number of first keys read exactly.
        block: The number of keys in a block.
        top: The number of blocks that a query reads key by key.
        rank: The number of directions in which a block's spread is known.

    Example:
        >>> import torch
        >>> from subquad import attention
        >>> q, k, v = torch.randn(3, 1, 2, 300, 16).unbind()
        >>> exact = attention(q, k, v, is_causal=True)
        >>> float((attention(q, k, v, is_causal=True, method=Multipole()) - exact).norm() / exact.norm()) < 0.05
        True
    """

    name = "multipole"
    argument = "top"
    engine: ClassVar[Engine] = "multipole"
    family: ClassVar[str] = "multipole"

    window: int = 128
    sinks: int = 4
    block: int = 16
    top: int = 32
    rank: int = 2

    def __post_init__(self) -> None:
        least = {"window": 1, "sinks": 0, "block": 2, "top": 0, "rank": 0}
        for field in fields(self):
            check_whole(field.name, getattr(self, field.name), least[field.name], MAX_SETTING)
        if self.rank >= self.block:
            raise ValueError(
                f"rank: the {self.block} keys of a block span fewer than {self.block} directions around their center; "
                f"expected at most {self.block - 1}, got {self.rank}"
            )

    @property
    def label(self) -> str:
        return "Multipole()" if self == Multipole() else str(self)


def group_size(far: int) -> int:
    """Return the number of blocks in a group, for a query with `far` far blocks; 1 if there are no groups."""
    if far < GROUPED_FROM_BLOCKS:
        return 1
    size = MIN_GROUP_BLOCKS
    while OPENED_GROUPS * 4 * size * size <= far:
        size *= 2
    return size


def group_sizes(far: int) -> list[int]:
    """Return the sizes of all groups that queries with up to `far` far blocks use."""
    return [MIN_GROUP_BLOCKS << level for level in range((group_size(far) // MIN_GROUP_BLOCKS).bit_length())]
