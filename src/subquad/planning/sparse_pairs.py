"""The pairs of query and key that Window and BlockSparse see, counted without making a mask.

A window's pairs have a closed form: each end of what a row sees moves by one key from row to row, between the first key
and the last. Tiles of rows, which meet all keys that one of their rows sees, are counted in the same way.

Axes: n queries, m keys.
"""

import torch
from torch import Tensor

from subquad.methods.block_sparse import BlockSparse
from subquad.methods.sparse import SparseMethod
from subquad.methods.window import Window
from subquad.planning.shape import Shape


def pairs_of(method: SparseMethod, shape: Shape, rows: int = 1) -> int:
    """Return the pairs that are seen, over all heads; of a window, with tiles of `rows` rows as for `tile_pairs`."""
    if isinstance(method, BlockSparse):
        return shape.batch * _block_pairs(method, shape)
    return shape.batch * shape.heads * tile_pairs(window_of(method), shape, rows)


def window_of(method: SparseMethod) -> Window:
    """Return the method itself, or, for blocks, the window of all keys, among which the layout chooses."""
    return method if isinstance(method, Window) else Window(None)


def has_places(method: SparseMethod, queries: int, keys: int, is_causal: bool) -> bool:
    """Return whether queries have places among the keys: a window on both sides needs as many of each."""
    return is_causal or queries == keys or window_of(method).size is None


def tile_pairs(method: Window, shape: Shape, rows: int = 1) -> int:
    """Return the pairs of one head where tiles of `rows` rows meet all keys that one of them sees."""
    tiles, rest = divmod(shape.query_length, rows)
    total = rows * tile_keys(method, shape, 0, rows, tiles)
    return total + (rest * tile_keys(method, shape, tiles * rows, rest) if rest else 0)


def tile_keys(method: Window, shape: Shape, first: int, rows: int, tiles: int = 1) -> int:
    """Return the number of keys that tiles of `rows` rows see from row `first` on, summed over the tiles."""
    m, sinks = shape.key_length, min(method.sinks, shape.key_length)
    begin = first - method.reach + 1  # of the first tile's window
    end = first + rows - 1 + (1 if shape.is_causal else method.reach)
    keys = _ramp(tiles, end, m, rows) - _ramp(tiles, begin, m, rows) + _ramp(tiles, begin, sinks, rows)
    if shape.is_causal:
        return keys
    return keys + tiles * sinks - _ramp(tiles, end, sinks, rows)  # sinks behind the window


def _ramp(count: int, first: int, top: int, step: int) -> int:
    """Return the sum of first + k * step for k = 0 .. count - 1, each limited to 0 .. top."""
    begin = min(count, max(0, -(first // step)))
    end = min(count, max(begin, -((first - top) // step)))  # from here on `top`
    return (end - begin) * first + step * (begin + end - 1) * (end - begin) // 2 + (count - end) * top


def keys_of_last(method: Window, keys: int) -> int:
    """Return the number of keys that the last of `keys` tokens sees."""
    near = min(method.reach, keys)
    return near + min(method.sinks, keys - near)


def _block_pairs(method: BlockSparse, shape: Shape) -> int:
    """Return the pairs of all heads of one batch."""
    n, m = shape.query_length, shape.key_length
    query_block, key_block = method.blocks(shape.heads, n, m)
    heads, rows, columns = method.layout.shape
    ends = torch.arange(rows + 1).mul(query_block).clamp(max=n)[:, None]
    key_ends = torch.arange(columns + 1).mul(key_block).clamp(max=m)
    pairs = _pairs_before(ends, key_ends, shape.is_causal).diff(dim=0).diff(dim=1)  # (query blocks, key blocks)
    return int((method.layout.cpu() * pairs).sum()) * (shape.heads if heads == 1 else 1)


def _pairs_before(n: Tensor, m: Tensor, is_causal: bool) -> Tensor:
    """Return the pairs of the first n queries and the first m keys."""
    if not is_causal:
        return n * m
    both = torch.minimum(n, m)
    return both * (both + 1) // 2 + (n - both) * m
