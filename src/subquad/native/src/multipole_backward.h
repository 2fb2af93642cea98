// The gradients of Multipole, with the order of the keys and the choice of blocks held constant.
//
//   weights  p_j = exp(x_j - level) of a key, or of a unit with x = ln n + m + min(s, widest) / 2
//   dx_j = p_j (do.v_j - do.out),   dv_j = sum p_j do,   dq = sum dx_j k_j,   dk_j = sum dx_j q
//   a unit also has its radius:  s = (|q| r)^2;  where s < widest, d(r^2) = sum dx |q|^2 / 2 and dq += dx r^2 q
//
// The caller passes the gradients of units on to their keys, and puts sorted keys back in their places.
//
// A part of a head is a fixed set of its tiles, with sums of its own, which the caller adds in order: the bits depend
// neither on the number of threads nor on their timing.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "parallel.h"
#include "selection.h"
#include "tiles.h"

namespace subquad::SUBQUAD_ISA {

template <class T> class MultipoleGradient {
 public:
  MultipoleGradient(const SubquadMultipoleGradient& given, Size most_sees)
      : given(given), call(given.call), record(Record::of<T>(call.width, call.values, call.block)), d(call.width),
        row(whole_panels(d) * PANEL), e(call.values), first_row(whole_panels(call.sinks) * PANEL),
        segments(given.segments), far(far_segments(call, most_sees)),
        capacity(std::min<Size>(call.group * call.queries, std::max<Size>(TILE_ROWS, call.group))),
        queries(capacity * row), grads(capacity * e), moves(capacity * row), gathered(capacity * row),
        gathered_grads(capacity * e), shared(2 * capacity * PANEL), norms(capacity), levels(capacity),
        deltas(capacity) {
    const Size nears = std::min<Size>(call.window + FAN * call.block, std::max<Size>(0, most_sees - call.sinks));
    const Size columns = std::max({far * FAN, nears + 2 * PANEL, first_row});
    weights = Buffer<T>(capacity * columns);
    slopes = Buffer<T>(capacity * columns);
    for (Size t = 0; t < PANEL; ++t) hidden[t] = t < call.block ? T(0) : -INFINITY;
  }

  // Add the gradients of a tile to the sums of a part.
  void operator()(const TileRange& range, Size part) {
    tile = Tile::of(call, range);
    place = tile.b * given.parts + part;
    read_rows();
    sinks();
    near_keys();
    if (tile.far) {
      find_selected();
      units();
      if (tile.grouped) roots();
      for_each_run([&](const Selection* x, Size many) { block(x, many); });
    }
    write();
  }

 private:
  const SubquadMultipoleGradient& given;
  const SubquadMultipole& call;
  const Record record;
  const Size d, row, e, first_row, segments, far, capacity;  // row: the key width in whole panels
  Size place = 0;                                            // of the sums: head and part
  Tile tile{};
  Buffer<T> queries, grads, moves;             // q, do and dq of the rows
  Buffer<T> gathered, gathered_grads, shared;  // q and do of the rows that chose a block; its weights and slopes
  Buffer<T> weights, slopes;                   // p and dx, (rows, columns)
  T hidden[PANEL];
  std::vector<T> norms, levels, deltas;  // |q|, the logarithm of the sum of weights, do.out
  Selections selected;                   // the blocks that rows read

  const T* segment(Size s) const {
    return reinterpret_cast<const T*>(call.table[2 * s]) + tile.b * call.table[2 * s + 1];
  }
  static const T* at(const void* data, Size offset) { return static_cast<const T*>(data) + offset; }
  static T* at(void* data, Size offset) { return static_cast<T*>(data) + offset; }
  Size place_of(Size r) const { return row_of(call, tile, r); }

  void read_rows() {
    std::fill(queries + 0, queries + tile.rows * row, T(0));
    std::fill(moves + 0, moves + tile.rows * row, T(0));
    for (Size r = 0; r < tile.rows; ++r) {
      const T *q = at(call.q, place_of(r) * d), *grad = at(given.output_grad, place_of(r) * e),
              *output = at(static_cast<const void*>(call.output),
                           strided_row(tile, r, call.output_batch, call.output_group, call.output_token));
      std::copy(q, q + d, queries + r * row);
      std::copy(grad, grad + e, grads + r * e);
      T squares = 0, delta = 0;
      for (Size i = 0; i < d; ++i) squares += q[i] * q[i];
      for (Size i = 0; i < e; ++i) delta += grad[i] * output[i];
      norms[r] = std::sqrt(squares);
      deltas[r] = delta;
      levels[r] = static_cast<const T*>(call.level)[place_of(r)];
    }
  }

  // From logits and do.v to weights and slopes, in place, of row r.
  void differentiate(T* logits, T* products, Size size, Size r) const {
    for (Size j = 0; j < size; j += lanes<T>) {
      const vec<T> p = share(load(logits + j) - levels[r]);
      store(logits + j, p);
      // 0 for a key that the row does not see, whatever its value.
      store(products + j, p == 0 ? vec<T>{} : p * (load(products + j) - deltas[r]));
    }
  }

  // dq += slopes keys;  dk += slopes' q;  dv += weights' do, for `count` keys or units.
  void add(Size count, Size columns, const T* keys, T* key_grads, T* value_grads) {
    if (count <= 0) return;
    add_product<T>(tile.rows, row, count, {slopes, columns, 1}, keys, row, moves, row);
    add_product<T>(count, row, tile.rows, {slopes, 1, columns}, queries, row, key_grads, row);
    add_product<T>(count, e, tile.rows, {weights, 1, columns}, grads, e, value_grads, e);
  }

  static void hide_from(T* row, Size from, Size size) {
    for (Size j = std::max<Size>(from, 0); j < size; ++j) row[j] = -INFINITY;
  }

  // Keys that all rows read: `keys` of them from the panels on, of which row r sees the first seen(r).
  template <class Seen>
  void dense_keys(Size panels, Size keys, const T* key_panels, const T* value_panels, const T* rows, T* key_grads,
                  T* value_grads, Seen seen) {
    const Size columns = panels * PANEL;
    panel_logits<T>(tile.rows, panels, d, queries, row, key_panels, d * PANEL, weights, columns);
    panel_logits<T>(tile.rows, panels, e, grads, e, value_panels, e * PANEL, slopes, columns);
    for (Size r = 0; r < tile.rows; ++r) {
      hide_from(weights + r * columns, seen(tile.sees[r % tile.count]), columns);
      differentiate(weights + r * columns, slopes + r * columns, columns, r);
    }
    add(keys, columns, rows, key_grads, value_grads);
  }

  void sinks() {
    const Size panels = first_row / PANEL, head = tile.b * first_row;
    dense_keys(panels, call.sinks, at(call.sink_keys, head * d), at(given.sink_value_panels, head * e),
               at(given.sink_rows, head * row), at(given.sink_key_grads, place * first_row * row),
               at(given.sink_value_grads, place * first_row * e),
               [&](Size sees) { return std::min<Size>(call.sinks, sees); });
  }

  void near_keys() {
    const Size head = (tile.b * call.raw_panels + tile.near_panel) * PANEL;
    const Size sum = (place * call.raw_panels + tile.near_panel) * PANEL;
    const Size most = *std::max_element(tile.sees, tile.sees + tile.count) - call.sinks - tile.near_from;
    dense_keys(tile.near_panels, most, at(static_cast<const void*>(call.raw_keys), head * d),
               at(given.raw_value_panels, head * e), at(given.raw_rows, head * row), at(given.raw_key_grads, sum * row),
               at(given.raw_value_grads, sum * e), [&](Size sees) { return sees - call.sinks - tile.near_from; });
  }

  void find_selected() {
    selected.clear();
    for (Size r = 0; r < tile.rows; ++r)
      for (Size i = 0; i < call.top; ++i) {
        const int32_t unit = call.chosen[place_of(r) * call.top + i];
        if (unit >= 0) *selected.add(1) = {unit, int32_t(r), int32_t(i)};
      }
    selected.sort(tile.far * FAN);
  }

  // Log-weights of 16 units, from their mean logits.
  void weigh(const T* radius, T* logits, Size r, T log_keys) const {
    for (Size j = 0; j < FAN; j += lanes<T>) {
      const vec<T> deviation = norms[r] * load(radius + j), variance = deviation * deviation;
      store(logits + j,
            load(logits + j) + log_keys + T(0.5) * (variance < T(call.widest) ? variance : all<T>(call.widest)));
    }
  }

  // The gradients of 16 radii, squared, and what they add to dq of row r.
  void differentiate_radius(const T* radius, const T* slope, T* square_grads, Size r) {
    T total = 0;
    for (Size j = 0; j < FAN; ++j) {
      const T deviation = norms[r] * radius[j];
      if (!(deviation * deviation < T(call.widest))) continue;
      square_grads[j] += T(0.5) * slope[j] * norms[r] * norms[r];
      total += slope[j] * radius[j] * radius[j];
    }
    T *q = queries + r * row, *move = moves + r * row;
    for (Size i = 0; i < d; ++i) move[i] += total * q[i];
  }

  bool is_open(Size r, Size s) const {
    const int32_t* mine = call.opened_segments + place_of(r) * call.opened;
    return std::binary_search(mine, mine + opened_count(mine), int32_t(s));
  }
  Size opened_count(const int32_t* mine) const {
    Size count = 0;
    while (count < call.opened && mine[count] >= 0) ++count;
    return count;
  }

  // Blocks by their moments: all of them, with weight 0 in rows that read them or did not open their segment.
  void units() {
    const Size columns = tile.far * FAN, head = tile.b * segments * FAN;
    const T log_keys = std::log(T(call.block));
    panel_logits<T>(tile.rows, tile.far, e, grads, e, at(given.mean_panels, head * e), e * PANEL, slopes, columns);
    for (Size s = 0; s < tile.far; ++s)
      panel_logits<T>(tile.rows, 1, d, queries, row, segment(s), 0, weights + s * FAN, columns);
    for (Size r = 0; r < tile.rows; ++r)
      for (Size s = 0; s < tile.far; ++s) {
        T* mine = weights + r * columns + s * FAN;
        if (tile.grouped && !is_open(r, s))
          std::fill(mine, mine + FAN, T(-INFINITY));
        else
          weigh(segment(s) + record.radius, mine, r, log_keys);
      }
    for (const Selection& x : selected.by_row) weights[x.row * columns + x.unit] = -INFINITY;
    for (Size r = 0; r < tile.rows; ++r) {
      differentiate(weights + r * columns, slopes + r * columns, columns, r);
      for (Size s = 0; s < tile.far; ++s)
        differentiate_radius(segment(s) + record.radius, slopes + r * columns + s * FAN,
                             at(given.square_grads, (place * segments + s) * FAN), r);
    }
    const Size sum = place * segments * FAN;
    add(columns, columns, at(given.centers, head * row), at(given.center_grads, sum * row),
        at(given.mean_grads, sum * e));
  }

  // Segments that were not opened, by their moments.
  void roots() {
    const Size panels = whole_panels(tile.far), columns = panels * PANEL, all_roots = call.root_count * FAN;
    const T* header = at(call.roots, tile.b * call.root_count * record.header);
    const T log_keys = std::log(T(FAN * call.block));
    panel_logits<T>(tile.rows, panels, d, queries, row, header, record.header, weights, columns);
    panel_logits<T>(tile.rows, panels, e, grads, e, at(given.root_mean_panels, tile.b * all_roots * e), e * PANEL,
                    slopes, columns);
    for (Size r = 0; r < tile.rows; ++r) {
      T* mine = weights + r * columns;
      for (Size i = 0; i < panels; ++i) weigh(header + i * record.header + record.radius, mine + i * FAN, r, log_keys);
      hide_from(mine, tile.far, columns);
      const int32_t* own = call.opened_segments + place_of(r) * call.opened;
      for (Size i = 0; i < opened_count(own); ++i) mine[own[i]] = -INFINITY;
      differentiate(mine, slopes + r * columns, columns, r);
      for (Size i = 0; i < panels; ++i)
        differentiate_radius(header + i * record.header + record.radius, slopes + r * columns + i * FAN,
                             at(given.root_square_grads, place * all_roots + i * FAN), r);
    }
    add(columns, columns, at(given.root_centers, tile.b * all_roots * row),
        at(given.root_center_grads, place * all_roots * row), at(given.root_mean_grads, place * all_roots * e));
  }

  template <class Body> void for_each_run(Body body) {
    const std::vector<Selection>& chosen = selected.by_unit;
    for (Size i = 0, count; i < Size(chosen.size()); i += count) {
      for (count = 1; i + count < Size(chosen.size()) && chosen[i + count].unit == chosen[i].unit;) ++count;
      body(chosen.data() + i, count);
    }
  }

  template <int rows> void meet(const Selection* x, Size count, const T* keys, const T* values, T* p, T* slope) {
    if constexpr (rows > 0) {
      if (count != rows) return meet<rows - 1>(x, count, keys, values, p, slope);
      const T *q[rows], *grad[rows];
      for (int i = 0; i < rows; ++i) {
        q[i] = queries + x[i].row * row;
        grad[i] = grads + x[i].row * e;
      }
      const PanelProduct<T, rows> logits(d, q, keys), products(e, grad, values);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < VECTORS<T>; ++j) {
          store(p + i * PANEL + j * lanes<T>, logits.sums[i][j] + load(hidden + j * lanes<T>));
          store(slope + i * PANEL + j * lanes<T>, products.sums[i][j]);
        }
        differentiate(p + i * PANEL, slope + i * PANEL, PANEL, x[i].row);
      }
    }
  }

  // A block that `many` rows read key by key.
  void block(const Selection* x, Size many) {
    const Size unit = x->unit, head = tile.b * segments * FAN + unit, sum = place * segments * FAN + unit;
    const T* keys = segment(unit / FAN) + record.keys + unit % FAN * d * PANEL;
    const T *values = at(given.block_value_panels, head * e * PANEL),
            *rows = at(given.block_rows, head * call.block * row);
    T *p = shared, *slope = shared + capacity * PANEL;
    for (Size i = 0; i < many; i += ROWS_PER_BLOCK) {
      const Size some = std::min(ROWS_PER_BLOCK, many - i);
      meet<ROWS_PER_BLOCK>(x + i, some, keys, values, p + i * PANEL, slope + i * PANEL);
      const T* a[ROWS_PER_BLOCK];
      T* c[ROWS_PER_BLOCK];
      for (Size r = 0; r < some; ++r) {
        a[r] = slope + (i + r) * PANEL;
        c[r] = moves + x[i + r].row * row;
        std::copy(queries + x[i + r].row * row, queries + (x[i + r].row + 1) * row, gathered + (i + r) * row);
        std::copy(grads + x[i + r].row * e, grads + (x[i + r].row + 1) * e, gathered_grads + (i + r) * e);
      }
      scattered_product<T, ROWS_PER_BLOCK>(some, row, call.block, a, rows, c);
    }
    add_product<T>(call.block, row, many, {slope, 1, PANEL}, gathered, row,
                   at(given.block_key_grads, sum * call.block * row), row);
    add_product<T>(call.block, e, many, {p, 1, PANEL}, gathered_grads, e,
                   at(given.block_value_grads, sum * call.block * e), e);
  }

  void write() {
    for (Size r = 0; r < tile.rows; ++r)
      std::copy(moves + r * row, moves + r * row + d, at(given.q_grad, place_of(r) * d));
  }
};

template <class T> bool multipole_backward(const SubquadMultipoleGradient& given) {
  const SubquadMultipole& call = given.call;
  const std::vector<TileRange> tiles = tiles_of(call);
  if (tiles.empty()) return true;
  const Size most_sees = *std::max_element(call.sees, call.sees + call.batch * call.queries);
  const Size tasks = call.batch * given.parts;
  std::atomic<Size> next{0};
  return in_parallel(std::max<Size>(1, std::min<Size>(call.threads, tasks)), [&](Size) {
    MultipoleGradient<T> tile(given, most_sees);
    for (Size task; (task = next++) < tasks;)
      for (Size i = 0, own = 0; i < Size(tiles.size()); ++i) {
        if (tiles[i].b != task / given.parts) continue;
        if (own++ % given.parts == task % given.parts) tile(tiles[i], task % given.parts);
      }
  });
}

}  // namespace subquad::SUBQUAD_ISA
