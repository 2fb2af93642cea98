"""Multipole: near and important keys exactly, all others by the moments of blocks of similar keys. For trained models.

Feature maps expand exp around zero, where the logits of a trained model are not. Here keys are expanded around the
centers of blocks of similar keys. For a scaled query q, a block of n keys with center mu, mean value u and radius r
(the root of the mean squared distance from the center, per dimension) has logits of mean m and variance s:

    m = q.mu    s = (|q| r)^2

It is treated as n keys of weight exp(m + min(s, 1) / 2) and value u.

Keys become far in segments of 16 blocks, once a segment ends `window` keys before the query. A finished segment is
sorted by bisection along the main direction of its keys, so that its blocks hold similar keys; nothing but its own keys
matters, so the future changes nothing. A query reads one by one the first `sinks` keys, all keys after the last
finished segment, and the `top` best blocks, which it chooses in two steps, ties going to the first:

    1. the LOOKS_PER_READ * top blocks with the highest likely maximum, m + sqrt(2 s ln n), are looked at in 8 bits
    2. of these, the `top` blocks with the largest logit are read

Many segments are not looked at block by block: each query opens the OPENED_SEGMENTS segments with the highest likely
maximum, and sees the others by their own moments.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

from subquad.methods.checks import check_whole
from subquad.methods.method import Engine, Method
from subquad.native.calls import FAN, PADDING

MAX_SETTING = 1 << 31
MAX_BLOCK = PADDING  # keys; the width of a panel of the native kernels
MAX_SINKS = 1024
BLOCKS_PER_SEGMENT = FAN
GROUPED_FROM_SEGMENTS = 20  # finished segments from which on a query opens only some of them
OPENED_SEGMENTS = 16
LOOKS_PER_READ = 8
MAX_VARIANCE = 1.0  # In a block that is not read no key stands out, which a larger variance would assume.


@dataclass(frozen=True)
class Multipole(Method):
    """Exact for near keys, the first keys and the best blocks; moments for all other blocks ("fast multipole").

    Works well where far keys come in clusters, as in a trained model; random keys have no structure to use. Its
    gradient treats the order of keys and the choice of blocks as constants.

    Args:
        window: The number of last keys that are always read exactly.
        sinks: The number of first keys read exactly, at most 1,024.
        block: The number of keys in a block, at most 16.
        top: The number of blocks that a query reads key by key.

    Example:
        >>> import torch
        >>> from subquad import attention
        >>> q, k, v = torch.randn(3, 1, 2, 600, 16).unbind()
        >>> exact = attention(q, k, v, is_causal=True)
        >>> float((attention(q, k, v, is_causal=True, method=Multipole()) - exact).norm() / exact.norm()) < 0.05
        True
    """

    name = "multipole"
    argument = "top"
    engine: ClassVar[Engine] = "multipole"
    family: ClassVar[str] = "multipole"

    window: int = 64
    sinks: int = 4
    block: int = 16
    top: int = 12

    def __post_init__(self) -> None:
        least = {"window": 1, "sinks": 0, "block": 2, "top": 0}
        most = {"block": MAX_BLOCK, "sinks": MAX_SINKS}
        for field in fields(self):
            name = field.name
            check_whole(name, getattr(self, name), least[name], most.get(name, MAX_SETTING))

    @property
    def label(self) -> str:
        usual = Multipole()
        changed = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = (f"{name}={value}" for name, value in changed.items() if value != getattr(usual, name))
        return f"Multipole({', '.join(shown)})"

    @property
    def segment(self) -> int:
        """The number of keys in a segment."""
        return BLOCKS_PER_SEGMENT * self.block

    @property
    def looks(self) -> int:
        """The number of blocks that a query looks at before it chooses those that it reads."""
        return LOOKS_PER_READ * self.top
