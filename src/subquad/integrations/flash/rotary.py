"""Rotary position embedding: pairs of numbers are rotated by an angle that depends on the position.

    (x, y) -> (x cos - y sin, x sin + y cos)

Pairs are neighbors (interleaved) or half of the rotated width apart.

Axes: b batch, n tokens, h heads, d width, r rotated width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad._engines.finite import widen


class Rotary(NamedTuple):
    """Cosines and sines of the angles, (positions, r / 2) each."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x (b, n, h, d) with its first r numbers rotated by the angles at positions (b, n)."""
        longest = int(positions.max()) + 1 if positions.numel() else 0
        if longest > len(self.cos):
            raise ValueError(f"rotary_cos: expected the angles of {longest} positions, got {len(self.cos)}")
        cos, sin = (widen(table)[positions][:, :, None] for table in (self.cos, self.sin))  # (b, n, 1, r / 2)
        width = 2 * self.cos.shape[1]
        x, rest = x[..., :width], x[..., width:]
        first, second = (x[..., ::2], x[..., 1::2]) if self.is_interleaved else x.chunk(2, -1)
        pairs = first * cos - second * sin, first * sin + second * cos
        turned = torch.stack(pairs, -1).flatten(-2) if self.is_interleaved else torch.cat(pairs, -1)
        return torch.cat([turned.to(x.dtype), rest], -1)


def rotary_of(cos: Tensor | None, sin: Tensor | None, is_interleaved: bool, width: int) -> Rotary:
    """Check the arguments of a rotation and return them as one value."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table is None or table.dim() != 2 or not table.is_floating_point() or 2 * table.shape[1] > width:
            found = "None" if table is None else f"{table.dtype} of shape {tuple(table.shape)}"
            expected = f"floating-point numbers of shape (positions, at most {width // 2}), half of the rotated width"
            raise ValueError(f"{name}: expected {expected}, got {found}")
    assert cos is not None and sin is not None
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_sin: expected shape {tuple(cos.shape)}, like rotary_cos, got {tuple(sin.shape)}")
    return Rotary(cos, sin, is_interleaved)
