"""Records: how a finished segment is stored, for the kernels and in a state. `native/src/panels.h` has the same layout.

    record = centers (d, 16), means (16, e), radius (16)                                       the header
             scale (16), bias (16, 16), 8-bit keys (16, d / 4, 16, 4), keys (16, d, 16), values (16 block, e)
    root   = the header of 16 segments, one column for each

Axes: b batch and key heads, s segments, u units (blocks or segments), t keys of a block, d width, e value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.methods.multipole import BLOCKS_PER_SEGMENT as FAN
from subquad.native.calls import PADDING


class Blocks(NamedTuple):
    """Finished segments as tensors; block i of segment s is unit 16 s + i."""

    keys: Tensor  # (b, u, t, d)
    values: Tensor  # (b, u, t, e)
    centers: Tensor  # (b, u, d)
    means: Tensor  # (b, u, e)
    radius: Tensor  # (b, u)
    look: Tensor  # (b, u, t, d): offsets from the center in 8 bits, as whole numbers in the dtype of the keys
    scale: Tensor  # (b, u): of `look`


class Roots(NamedTuple):
    """The moments of whole segments."""

    centers: Tensor  # (b, s, d)
    means: Tensor  # (b, s, e)
    radius: Tensor  # (b, s)


class Layout(NamedTuple):
    """Sizes of the parts of a record, in numbers of its dtype."""

    d: int
    e: int
    block: int
    itemsize: int

    @property
    def header(self) -> int:
        return FAN * (self.d + self.e + 1)

    @property
    def quads(self) -> int:
        return -(-self.d // 4)

    @property
    def sizes(self) -> list[int]:
        look = FAN * self.quads * PADDING * 4 // self.itemsize
        return [
            FAN * self.d, FAN * self.e, FAN, FAN, FAN * PADDING, look, FAN * self.d * PADDING,
            FAN * self.block * self.e,
        ]  # fmt: skip

    @property
    def size(self) -> int:
        return sum(self.sizes)


def packed(blocks: Blocks) -> Tensor:
    """Return the records (b, s, size) of blocks."""
    b, u, t, d = blocks.keys.shape
    s, pad = u // FAN, PADDING - t

    def rows(x: Tensor) -> Tensor:
        return x.reshape(b, s, -1)

    look = F.pad(blocks.look, (0, -d % 4, 0, pad)).reshape(b, u, PADDING, -1, 4).transpose(2, 3)
    panels = F.pad(blocks.keys, (0, 0, 0, pad)).mT
    parts = [
        blocks.centers.reshape(b, s, FAN, d).mT, blocks.means, blocks.radius, blocks.scale,
        F.pad(128 * blocks.look.sum(-1), (0, pad)),
        look.to(torch.int8).contiguous().view(b, s, -1).view(blocks.keys.dtype), panels, blocks.values,
    ]  # fmt: skip
    return torch.cat([rows(x) for x in parts], -1)


def unpacked(records: Tensor, layout: Layout) -> Blocks:
    """Return the blocks of records (b, s, size)."""
    b, s, _ = records.shape
    d, e, t = layout.d, layout.e, layout.block
    centers, means, radius, scale, _, look, keys, values = records.split(layout.sizes, -1)
    bytes_ = look.contiguous().view(torch.int8).reshape(b, s * FAN, layout.quads, PADDING, 4).transpose(2, 3)
    return Blocks(
        keys.reshape(b, s * FAN, d, PADDING).mT[:, :, :t],
        values.reshape(b, s * FAN, t, e),
        centers.reshape(b, s, d, FAN).mT.reshape(b, s * FAN, d),
        means.reshape(b, s * FAN, e),
        radius.reshape(b, s * FAN),
        bytes_.reshape(b, s * FAN, PADDING, 4 * layout.quads)[:, :, :t, :d].to(records.dtype),
        scale.reshape(b, s * FAN),
    )


def packed_roots(roots: Roots) -> Tensor:
    """Return (b, roots, header), the last one padded."""
    b, s, d = roots.centers.shape
    pad = -s % FAN
    count = (s + pad) // FAN
    centers = F.pad(roots.centers, (0, 0, 0, pad)).reshape(b, count, FAN, d).mT.flatten(2)
    means = F.pad(roots.means, (0, 0, 0, pad)).reshape(b, count, FAN * roots.means.shape[2])
    return torch.cat([centers, means, F.pad(roots.radius, (0, pad)).reshape(b, count, FAN)], -1)


def unpacked_roots(records: Tensor, count: int, d: int, e: int) -> Roots:
    """Return the first `count` segments of roots (b, roots, header)."""
    b, roots, _ = records.shape
    centers, means, radius = records.split([FAN * d, FAN * e, FAN], -1)
    return Roots(
        centers.reshape(b, roots, d, FAN).mT.reshape(b, roots * FAN, d)[:, :count],
        means.reshape(b, roots * FAN, e)[:, :count],
        radius.reshape(b, roots * FAN)[:, :count],
    )
