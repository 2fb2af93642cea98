// Tiles of Multipole: the queries that are computed together, and the layout of their logits.
//
// The queries of a tile see the same finished segments. A tile has 48 rows, which are 8 register blocks: enough to
// amortize reading the blocks, and few enough that their logits stay in the second-level cache.
#pragma once

#include <algorithm>
#include <vector>

#include "panels.h"

namespace subquad::SUBQUAD_ISA {

constexpr Size TILE_ROWS = 48;

inline Size whole_panels(Size keys) { return (std::max<Size>(keys, 0) + PANEL - 1) / PANEL; }

// The number of finished segments for a query that sees `sees` keys.
inline Size far_segments(const SubquadMultipole& call, Size sees) {
  return std::max<Size>(0, sees - call.sinks - call.window) / (FAN * call.block);
}

// Queries [from, from + count) of all query heads of key head b.
struct TileRange {
  Size b, from, count;
};

struct Tile : TileRange {
  Size rows;                                // of all query heads
  const int64_t* sees;                      // (count,)
  Size far;                                 // finished segments
  bool grouped;                             // rows open some of the segments, instead of looking at all
  Size columns;                             // blocks that a row considers
  Size near_from, near_panel, near_panels;  // keys after the segments, not counting sinks; where they are in `raw`

  static Tile of(const SubquadMultipole& call, const TileRange& range) {
    Tile t{};
    static_cast<TileRange&>(t) = range;
    t.rows = call.group * t.count;
    t.sees = call.sees + t.b * call.queries + t.from;
    t.far = far_segments(call, t.sees[0]);
    t.grouped = t.far >= call.grouped_from;
    t.columns = FAN * (t.grouped ? std::min<Size>(call.opened, t.far) : t.far);
    t.near_from = t.far * FAN * call.block;
    t.near_panel = (t.far - call.base[t.b]) * call.block;
    t.near_panels = whole_panels(*std::max_element(t.sees, t.sees + t.count) - call.sinks - t.near_from);
    return t;
  }

  Size near_row() const { return near_panels * PANEL; }
};

// The place of row r in (b, g, n).
inline Size row_of(const SubquadMultipole& call, const Tile& tile, Size r) {
  return (tile.b * call.group + r / tile.count) * call.queries + tile.from + r % tile.count;
}

// Where row r begins in a tensor with these strides.
inline Size strided_row(const Tile& tile, Size r, Size batch, Size group, Size token) {
  return tile.b * batch + r / tile.count * group + (tile.from + r % tile.count) * token;
}

inline std::vector<TileRange> tiles_of(const SubquadMultipole& call) {
  const Size n = call.queries, rows = std::max<Size>(1, TILE_ROWS / call.group);
  std::vector<TileRange> tiles;
  for (Size b = 0; b < call.batch; ++b) {
    const int64_t* sees = call.sees + b * n;
    for (Size from = 0, to; from < n; from = to) {
      const Size far = far_segments(call, sees[from]);
      for (to = from + 1; to < n && to - from < rows && far_segments(call, sees[to]) == far;) ++to;
      tiles.push_back({b, from, to - from});
    }
  }
  return tiles;
}

}  // namespace subquad::SUBQUAD_ISA
