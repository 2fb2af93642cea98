// The pairs of query and key that sparse attention computes.
//
//   row i sees key j    if first[i] <= j < first_end[i] or near[i] <= j < near_end[i],
//                       and blocks[i / query_block][j / key_block], where there is a layout of blocks
//
// Both ways to walk through them need hulls: the keys that some rows see, and the rows that see some keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "panels.h"
#include "tensor.h"

namespace subquad::SUBQUAD_ISA {

struct Range {
  Size from, to;
  bool is_empty() const { return from >= to; }
  Range with(Range other) const {  // the hull of both
    if (is_empty()) return other;
    return other.is_empty() ? *this : Range{std::min(from, other.from), std::max(to, other.to)};
  }
  Range inside(Range other) const { return {std::max(from, other.from), std::min(to, other.to)}; }
};

// The keys that some rows see: two hulls, because first and near keys may lie far apart.
struct Hulls {
  Range first{0, 0}, near{0, 0};
  bool meet(Range keys) const { return !first.inside(keys).is_empty() || !near.inside(keys).is_empty(); }
};

inline Size panel_floor(Size x) { return x / PANEL * PANEL; }
inline Size panel_ceil(Size x) { return (x + PANEL - 1) / PANEL * PANEL; }

class Seen {
 public:
  static constexpr Size TILE = 256;  // tokens of a tile: few enough that a tile of rows stays in the cache

  explicit Seen(const SubquadSparse& call) : call(call) {}

  // Look at query head g of key head b.
  void look_at(Size b, Size g) {
    const int32_t* own = call.bounds + b * call.bounds_batch;
    first = own;
    first_end = own + call.queries;
    near = own + 2 * call.queries;
    near_end = own + 3 * call.queries;
    blocks = nullptr;
    if (!call.layout) return;
    const Size head = call.layout_heads == 1 ? 0 : b % call.key_heads * call.group + g;
    blocks = call.layout + head * call.query_blocks * call.key_blocks;
  }

  Range first_of(Size i) const { return {first[i], first_end[i]}; }
  Range near_of(Size i) const { return {near[i], near_end[i]}; }

  Hulls hulls_of(Size from, Size to) const {
    Hulls found;
    for (Size i = from; i < to; ++i) {
      found.first = found.first.with(first_of(i));
      found.near = found.near.with(near_of(i));
    }
    return found;
  }

  // The hull of the keys inside `keys` that rows [from, to) see, blocks aside.
  Range hull(Size from, Size to, Range keys) const {
    Range found{0, 0};
    for (Size i = from; i < to; ++i) found = found.with(first_of(i).inside(keys)).with(near_of(i).inside(keys));
    return found;
  }

  // Ranges of keys, in order, that hold all that rows [from, to) see; the rows belong to one block.
  void find_keys(Size from, Size to, std::vector<Range>& found) const {
    Hulls all = hulls_of(from, to);
    if (all.near.from <= all.first.to) all = {{0, 0}, all.first.with(all.near)};
    found.clear();
    for (const Range& hull : {all.first, all.near}) {
      if (!blocks) {
        append(found, hull);
        continue;
      }
      const uint8_t* mine = blocks + from / call.query_block * call.key_blocks;
      for (Size j = hull.from / call.key_block; !hull.is_empty() && j * call.key_block < hull.to; ++j)
        if (mine[j]) append(found, hull.inside({j * call.key_block, (j + 1) * call.key_block}));
    }
  }

  // Ranges of rows, in order, that hold all that see keys [from, to); the keys belong to one block.
  void find_rows(Size from, Size to, std::vector<Range>& found) {
    found.clear();
    const Size step = call.layout ? call.query_block : TILE;
    describe_tiles(step);
    for (Size tile = 0; tile < Size(hulls.size()); ++tile) {
      if (blocks && !blocks[tile * call.key_blocks + from / call.key_block]) continue;
      if (hulls[tile].meet({from, to})) append(found, {tile * step, std::min<Size>((tile + 1) * step, call.queries)});
    }
  }

  // Of the logits of row i with the keys [from, to), leave those that it sees inside `keys`; set others to -infinity.
  template <class T> void hide(Size i, Size from, Size to, Range keys, T* logits) const {
    const Range a = first_of(i).inside(keys), b = near_of(i).inside(keys), all = a.with(b);
    if (all.is_empty()) return fill(logits, 0, to - from);
    fill(logits, 0, all.from - from);
    if (!a.is_empty() && !b.is_empty()) fill(logits, a.to - from, b.from - from);
    fill(logits, all.to - from, to - from);
  }

  bool sees(Size i, Size j) const { return (first[i] <= j && j < first_end[i]) || (near[i] <= j && j < near_end[i]); }

 private:
  const SubquadSparse& call;
  const int32_t *first = nullptr, *first_end = nullptr, *near = nullptr, *near_end = nullptr;
  const uint8_t* blocks = nullptr;
  const int32_t* described = nullptr;  // the bounds whose hulls these are
  std::vector<Hulls> hulls;            // of each tile of rows

  // Find the hulls of all tiles of `step` rows, once for all heads with the same bounds.
  void describe_tiles(Size step) {
    if (described == first) return;
    described = first;
    hulls.clear();
    for (Size i = 0; i < call.queries; i += step) hulls.push_back(hulls_of(i, std::min<Size>(i + step, call.queries)));
  }

  static void append(std::vector<Range>& found, Range range) {
    if (range.is_empty()) return;
    if (!found.empty() && range.from <= found.back().to)
      found.back().to = std::max(found.back().to, range.to);
    else
      found.push_back(range);
  }

  template <class T> static void fill(T* logits, Size from, Size to) {
    for (Size j = from; j < to; ++j) logits[j] = -INFINITY;
  }
};

// Tokens of a tensor as rows and as panels (width, 16), from a multiple of 16 on.
template <class T> class PackedTokens {
 public:
  PackedTokens(Size width, Size capacity)
      : width(width), row(padded<T>(width)), rows(capacity * row), panels(capacity * width), poison(capacity) {}

  const Size width, row;

  // Read these of `count` tokens, and those beside them in their panels. Tokens after the last one are 0, and so are
  // numbers that are not finite, unless they are gradients.
  void read(const SubquadTensor& tensor, Size b, Size g, Range tokens, Size count, T scale, bool is_gradient = false) {
    base = panel_floor(tokens.from);
    const Size size = panel_ceil(tokens.to) - base, given = std::min(size, count - base);
    read_rows<T>(tensor, b, g, base, given, width, scale, rows, row);
    std::fill(rows + given * row, rows + size * row, T(0));
    is_poisoned = !is_gradient && !is_finite(rows, given * row);
    if (is_poisoned) {
      std::fill(poison + 0, poison + size, T(0));
      clean<T>(rows, row, given, width, poison);
    }
    filled = size;
  }
  void pack() {
    for (Size t = 0; t < filled; t += PANEL) turn<T>(rows + t * row, row, PANEL, width, panels + t * width, PANEL);
  }

  const T* row_of(Size token) const { return rows + (token - base) * row; }
  const T* panel_of(Size token) const { return panels + (token - base) * width; }
  T poison_of(Size token) const { return is_poisoned ? poison[token - base] : T(0); }
  bool is_poisoned = false;

 private:
  Buffer<T> rows, panels, poison;
  Size base = 0, filled = 0;

  static bool is_finite(const T* x, Size size) {
    vec<T> found{};
    for (Size i = 0; i < size; i += lanes<T>) found += load(x + i) * T(0);
    return sum<T>(found) == 0;
  }
};

inline vec<float> tanh(vec<float> y) {
  const vec<float> square = y * y, limited = y > 20.0f ? all(20.0f) : y < -20.0f ? all(-20.0f) : y;
  vec<float> series = all(62.0f / 2835);
  series = series * square - 17.0f / 315;
  series = series * square + 2.0f / 15;
  series = series * square - 1.0f / 3;
  series = y + y * square * series;
  const vec<float> far = 1.0f - 2.0f / (exp(2.0f * limited) + 1.0f);
  const vec<float> found = square < 0.1f ? series : far;
  return y == y ? found : y;
}
inline vec<double> tanh(vec<double> y) {
  for (Size i = 0; i < lanes<double>; ++i) y[i] = std::tanh(y[i]);
  return y;
}

// y = softcap tanh(x / softcap)
template <class T> void cap_logits(T* logits, Size size, T softcap) {
  for (Size j = 0; j < size; j += lanes<T>) store(logits + j, softcap * tanh(load(logits + j) / softcap));
}

}  // namespace subquad::SUBQUAD_ISA
