// Tiles of Multipole: the queries that are computed together, and the layout of their logits.
//
// A tile has 48 rows, which are 8 register blocks: enough to amortize reading the pseudo-keys from the second-level
// cache, and few enough that their logits (48 x 1,536 numbers at 8,192 keys) stay there too.
#pragma once

#include <algorithm>
#include <vector>

#include "call.h"
#include "vector.h"

namespace subquad::SUBQUAD_ISA {

constexpr Size TILE_ROWS = 48;

// The number of blocks in a group for a query with `far` far blocks; 1: no groups. As `group_size` in multipole.py.
inline Size group_size(const SubquadMultipole& call, Size far) {
  if (far < call.grouped_from) return 1;
  Size size = call.least_group;
  while (call.opened * 4 * size * size <= far) size *= 2;
  return size;
}

// Queries [from, from + count) of head b, whose groups have the same size, and the layout of their logits: ranges of
// units or keys, and row lengths in whole vectors.
struct MultipoleTile {
  Size b, from, count, rows;        // rows: of all heads that share the keys
  const int64_t *sees, *far;        // (count,)
  Size least_far, most_far;         // of the queries
  const SubquadLevel* groups;       // null: no groups
  Size size, wholes, outer_row;     // blocks of a group; groups that any row sees
  Size start, dense, dense_row;     // the blocks [start, start + dense), which all rows consider
  Size slots, leaf_row;             // groups that a row may open; their blocks follow the dense ones
  Size near_from, nears, near_row;  // the keys [near_from, near_from + nears), which are read exactly
  Size first_row, block_row;        // for the sinks, and for one block

  template <class T> static MultipoleTile of(const SubquadMultipole& call, Size b, Size from, Size count) {
    MultipoleTile t{};
    t.b = b;
    t.from = from;
    t.count = count;
    t.rows = call.group * count;
    t.sees = call.sees + b * call.queries + from;
    t.far = call.far + b * call.queries + from;
    t.least_far = *std::min_element(t.far, t.far + count);
    t.most_far = *std::max_element(t.far, t.far + count);
    t.size = group_size(call, t.most_far);
    for (Size i = 0; i < call.groups_count; ++i)
      if (call.groups[i].size == t.size) t.groups = &call.groups[i];
    t.wholes = t.groups ? t.most_far / t.size : 0;
    t.outer_row = padded<T>(t.wholes);
    t.start = t.groups ? t.least_far / t.size * t.size : 0;
    t.dense = t.most_far - t.start;
    t.dense_row = padded<T>(t.dense);
    t.slots = t.wholes ? std::min<Size>(call.opened, t.wholes) : 0;
    t.leaf_row = t.dense_row + t.slots * t.size;
    t.near_from = std::min<Size>(call.sinks + t.least_far * call.block, call.keys);
    t.nears = std::max<Size>(0, *std::max_element(t.sees, t.sees + count) - t.near_from);
    t.near_row = padded<T>(t.nears);
    t.first_row = padded<T>(std::min(call.sinks, call.keys));
    t.block_row = padded<T>(call.block);
    return t;
  }
};

struct TileRange {
  Size b, from, count;
};

inline std::vector<TileRange> tiles_of(const SubquadMultipole& call) {
  const Size n = call.queries, rows = std::max<Size>(1, TILE_ROWS / call.group);
  std::vector<TileRange> tiles;
  for (Size b = 0; b < call.batch; ++b) {
    const int64_t* far = call.far + b * n;
    for (Size from = 0, to; from < n; from = to) {
      for (to = from + 1; to < n && to - from < rows && group_size(call, far[to]) == group_size(call, far[from]);) ++to;
      tiles.push_back({b, from, to - from});
    }
  }
  return tiles;
}

}  // namespace subquad::SUBQUAD_ISA
