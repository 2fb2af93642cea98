// Near keys exactly, the best blocks of far keys exactly, the other blocks by their moments: one tile of queries at a
// time.
//
//   a block of n keys with center mu, radius r and mean value u has logits of mean m and variance s for a query:
//     m = q.mu,  s = (|q| r)^2;  its weight is n exp(m + min(s, widest) / 2), its value u
//   1. likely maximum  m + sqrt(2 s ln n)     the best `looks` blocks are looked at, in 8 bits (look.h)
//   2. largest of their logits                the best `top` of these are read, key by key
//
// With many segments, each row first opens the segments with the highest likely maximum; the others count as one unit.
//
// Rows are the queries of a tile, of all heads that share the keys. Each row is summed in the order of the keys,
// whatever the other rows chose, so neither future keys nor neighboring rows change its bits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "buffer.h"
#include "look.h"
#include "parallel.h"
#include "selection.h"
#include "tiles.h"

namespace subquad::SUBQUAD_ISA {

template <class T> class Multipole {
 public:
  Multipole(const SubquadMultipole& call, Size most_sees)
      : call(call), record(Record::of<T>(call.width, call.values, call.block)), d(call.width), e(call.values),
        quads((d + 3) / 4), first_row(whole_panels(call.sinks) * PANEL),
        capacity(std::min<Size>(call.group * call.queries, std::max<Size>(TILE_ROWS, call.group))),
        queries(capacity * d), answers(capacity * e), first(capacity * first_row), totals(capacity * PANEL),
        excess(capacity * PANEL), bytes(capacity * quads * 4), norms(capacity), scales(capacity), level(capacity) {
    const Size far = far_segments(call, most_sees);
    const Size flat = std::min<Size>(far, call.grouped_from), slots = std::min<Size>(far, call.opened);
    const Size columns = FAN * std::max(flat, slots);
    means = Buffer<T>(capacity * columns);
    logs = Buffer<T>(capacity * columns);
    radii = Buffer<T>(flat * FAN);
    outer_row = far >= call.grouped_from ? whole_panels(far) * PANEL : 0;
    outer = Buffer<T>(capacity * outer_row);
    score = Buffer<T>(std::max(columns, outer_row));
    looked = Buffer<T>(capacity * looks_row());
    const Size nears = std::min<Size>(call.window + FAN * call.block, std::max<Size>(0, most_sees - call.sinks));
    near = Buffer<T>(capacity * (nears + 2 * PANEL));
    column.resize(capacity * call.looks);
    for (Size t = 0; t < PANEL; ++t) hidden[t] = t < call.block ? T(0) : -INFINITY;
  }

  // Write the outputs of a tile.
  void operator()(const TileRange& range) {
    tile = Tile::of(call, range);
    read_queries();
    read_near_keys();
    opened.clear();
    candidates.clear();
    selected.clear();
    if (tile.grouped) open_segments();
    if (tile.columns) {
      describe_blocks();
      find_candidates();
      select_blocks();
    }
    while (!read_blocks()) {
    }
    exponentiate();
    add_values();
    write();
  }

 private:
  static constexpr T MAX_EXCESS = 60;  // exp of it is far from overflow

  const SubquadMultipole& call;
  const Record record;
  const Size d, e, quads, first_row, capacity;  // capacity: rows of a tile; at least those of one query
  Size outer_row = 0;
  Tile tile{};
  Buffer<T> queries, answers;
  Buffer<T> first, near;                // logits of the sinks and of the near keys
  Buffer<T> outer, means, logs, radii;  // log-weights of unopened segments; mean logits and log-weights of blocks
  Buffer<T> score, looked;              // of the units that one row considers; of the blocks that each row looked at
  Buffer<T> totals, excess;             // (rows, 16): partial sums of the weights; logits of read keys above the level
  T hidden[PANEL];                      // 0 for the keys of a block, -infinity beyond
  std::vector<uint8_t> bytes;           // the queries in 8 bits
  std::vector<T> norms, scales, level;  // |q|, the scale of the bytes, the largest log-weight of each row
  std::vector<int32_t> column;          // (rows, looks): where `logs` has a block that a row looked at
  Selections opened;                    // segments that rows open
  Selections candidates, selected;      // blocks that rows look at, and read
  std::vector<int32_t> found;           // the columns that one row takes

  Size looks_row() const { return whole_panels(call.looks) * PANEL; }

  const T* segment(Size s) const {
    return reinterpret_cast<const T*>(call.table[2 * s]) + tile.b * call.table[2 * s + 1];
  }
  const T* root(Size i) const {
    return static_cast<const T*>(call.roots) + (tile.b * call.root_count + i) * record.header;
  }

  // --- Queries, and the keys that all rows read ----------------------------------------------------------------------

  void read_queries() {
    const T scale = T(call.scale);
    for (Size r = 0; r < tile.rows; ++r) {
      const T* given =
          static_cast<const T*>(call.q) + strided_row(tile, r, call.query_batch, call.query_group, call.query_token);
      for (Size i = 0; i < d; ++i) queries[r * d + i] = given[i] * scale;
    }
    for (Size r = 0; r < tile.rows && tile.far; ++r) {
      const T* q = queries + r * d;
      T parts[PANEL] = {};
      for (Size i = 0; i < d; ++i) parts[i % PANEL] += q[i] * q[i];
      norms[r] = std::sqrt(std::accumulate(parts, parts + PANEL, T(0)));
      scales[r] = to_bytes<T>(q, d, bytes.data() + r * quads * 4);
    }
    std::fill(level.begin(), level.end(), T(-INFINITY));
  }

  static void hide_from(T* row, Size from, Size size) {
    for (Size j = std::max<Size>(from, 0); j < size; ++j) row[j] = -INFINITY;
  }

  void raise(Size r, const T* row, Size size) {
    if (!size) return;
    vec<T> most = load(row);
    for (Size j = lanes<T>; j < size; j += lanes<T>) most = larger<T>(most, load(row + j));
    level[r] = std::max(level[r], largest<T>(most));
  }

  // Logits of the sinks and of the near keys.
  void read_near_keys() {
    const Size stride = d * PANEL, nears = tile.near_row();
    const T* sinks = static_cast<const T*>(call.sink_keys) + tile.b * first_row * d;
    const T* raw = static_cast<const T*>(call.raw_keys) + (tile.b * call.raw_panels + tile.near_panel) * stride;
    panel_logits<T>(tile.rows, first_row / PANEL, d, queries, d, sinks, stride, first, first_row);
    panel_logits<T>(tile.rows, tile.near_panels, d, queries, d, raw, stride, near, nears);
    for (Size r = 0; r < tile.rows; ++r) {
      const Size sees = tile.sees[r % tile.count];
      hide_from(first + r * first_row, std::min<Size>(call.sinks, sees), first_row);
      hide_from(near + r * nears, sees - call.sinks - tile.near_from, nears);
      raise(r, first + r * first_row, first_row);
      raise(r, near + r * nears, nears);
    }
  }

  // --- Moments, and the choice of blocks -----------------------------------------------------------------------------

  // Log-weights and likely maxima of the units of one header, for row r with mean logits m.
  void weigh(const T* radius, const T* m, T* log_weights, T* scores, Size r, T log_keys, T reach) {
    for (Size j = 0; j < FAN; j += lanes<T>) {
      const vec<T> mean = load(m + j), deviation = norms[r] * load(radius + j), variance = deviation * deviation;
      store(scores + j, mean + reach * deviation);
      store(log_weights + j, mean + log_keys + T(0.5) * (variance < T(call.widest) ? variance : all<T>(call.widest)));
    }
  }

  // All segments through their moments, and the segments that each row opens.
  void open_segments() {
    const Size panels = whole_panels(tile.far), row = panels * PANEL;
    panel_logits<T>(tile.rows, panels, d, queries, d, root(0), record.header, outer, row);
    const T log_keys = std::log(T(FAN * call.block)), reach = std::sqrt(2 * log_keys);
    for (Size r = 0; r < tile.rows; ++r) {
      T* mine = outer + r * row;
      for (Size i = 0; i < panels; ++i)
        weigh(root(i) + record.radius, mine + i * FAN, mine + i * FAN, score + i * FAN, r, log_keys, reach);
      hide_from(mine, tile.far, row);
      hide_from(score, tile.far, row);
      const Size count = take_best<T>(score, tile.far, call.opened, found);
      Selection* own = opened.add(count);
      for (Size slot = 0; slot < count; ++slot) {
        own[slot] = {found[slot], int32_t(r), int32_t(slot)};
        mine[found[slot]] = -INFINITY;
      }
      raise(r, mine, row);
    }
    if (call.opened_segments)
      for (const Selection& x : opened.by_row)
        call.opened_segments[row_of(call, tile, x.row) * call.opened + x.slot] = x.unit;
    opened.sort(tile.far);
  }

  template <int rows> void describe_opened(const Selection* chosen, Size count) {
    if constexpr (rows > 0) {
      if (count != rows) return describe_opened<rows - 1>(chosen, count);
      const T* a[rows];
      for (int i = 0; i < rows; ++i) a[i] = queries + chosen[i].row * d;
      const PanelProduct<T, rows> product(d, a, segment(chosen->unit));
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < VECTORS<T>; ++j)
          store(means + chosen[i].row * tile.columns + chosen[i].slot * FAN + j * lanes<T>, product.sums[i][j]);
    }
  }

  // Mean logits of the blocks that each row considers.
  void describe_blocks() {
    if (tile.grouped)
      for_each_unit(opened.by_unit, [&](const Selection* x, Size count) { describe_opened<ROWS_PER_BLOCK>(x, count); });
    else
      for (Size s = 0; s < tile.far; ++s)
        panel_logits<T>(tile.rows, 1, d, queries, d, segment(s), 0, means + s * FAN, tile.columns);
  }

  // The segment in slot `i` of row r, whose slots begin at `opened.by_row[begin]`.
  Size segment_of(Size i, Size begin) const { return tile.grouped ? opened.by_row[begin + i].unit : i; }

  // The number of selections of row r, which begin at `begin`.
  static Size count_of(const Selections& chosen, Size begin, Size r) {
    Size count = 0;
    while (begin + count < Size(chosen.by_row.size()) && chosen.by_row[begin + count].row == r) ++count;
    return count;
  }

  // Log-weights of the blocks, and those that each row looks at.
  void find_candidates() {
    const T log_keys = std::log(T(call.block)), reach = std::sqrt(2 * log_keys);
    for (Size s = 0; s < tile.far && !tile.grouped; ++s)
      std::copy(segment(s) + record.radius, segment(s) + record.radius + FAN, radii + s * FAN);
    Size begin = 0, slots = tile.far;  // of row r in opened.by_row
    for (Size r = 0; r < tile.rows; ++r, begin += slots) {
      if (tile.grouped) slots = count_of(opened, begin, r);
      T *m = means + r * tile.columns, *log_weights = logs + r * tile.columns;
      for (Size i = 0; i < slots; ++i)
        weigh(tile.grouped ? segment(segment_of(i, begin)) + record.radius : radii + i * FAN, m + i * FAN,
              log_weights + i * FAN, score + i * FAN, r, log_keys, reach);
      hide_from(log_weights, slots * FAN, tile.columns);
      const Size count = take_best<T>(score, slots * FAN, call.looks, found);
      Selection* own = candidates.add(count);
      for (Size i = 0; i < count; ++i) {
        const Size j = found[i];
        const Size unit = tile.grouped ? segment_of(j / FAN, begin) * FAN + j % FAN : j;
        own[i] = {int32_t(unit), int32_t(r), int32_t(i)};
        column[r * call.looks + i] = int32_t(j);
      }
      hide_from(looked + r * looks_row(), count, looks_row());
    }
    candidates.sort(tile.far * FAN);
  }

  const int8_t* look_of(Size unit) const {
    return reinterpret_cast<const int8_t*>(segment(unit / FAN) + record.look) + unit % FAN * Record::look_bytes(d);
  }

  // The largest logit of each candidate.
  template <class Products> inline void look() {
    const Size size = candidates.by_unit.size();
    for (Size i = 0, count; i < size; i += count) {
      const Selection* x = candidates.by_unit.data() + i;
      for (count = 1; count < ROWS_PER_BLOCK && i + count < size && x[count].unit == x->unit;) ++count;
      const T* mine = segment(x->unit / FAN);
      const Size place = x->unit % FAN;
      const uint8_t* coarse[ROWS_PER_BLOCK];
      T above[ROWS_PER_BLOCK];
      for (Size r = 0; r < count; ++r) coarse[r] = bytes.data() + x[r].row * quads * 4;
      Products::template largest<T>(count, look_of(x->unit), coarse, quads, mine + record.bias + place * PANEL,
                                    call.block, above);
      for (Size r = 0; r < count; ++r) {
        const Size row = x[r].row, j = column[row * call.looks + x[r].slot];
        looked[row * looks_row() + x[r].slot] =
            means[row * tile.columns + j] + above[r] * (scales[row] * mine[record.scale + place]);
      }
    }
  }

#ifdef SUBQUAD_BYTE_PRODUCTS
  SUBQUAD_BYTE_PRODUCTS void look_in_bytes() { look<ByteProducts>(); }
#endif

  // Look at the candidates, and select the best ones of each row.
  void select_blocks() {
#ifdef SUBQUAD_BYTE_PRODUCTS
    if (ByteProducts::available())
      look_in_bytes();
    else
#endif
      look<PlainProducts>();
    Size begin = 0;  // of row r in candidates.by_row
    for (Size r = 0; r < tile.rows; ++r) {
      const Size count = count_of(candidates, begin, r);
      const T* mine = looked + r * looks_row();
      const Size chosen = take_best<T>(mine, count, call.top, found);
      Selection* own = selected.add(chosen);
      for (Size i = 0; i < chosen; ++i) {
        own[i] = {candidates.by_row[begin + found[i]].unit, int32_t(r), int32_t(i)};
        logs[r * tile.columns + column[r * call.looks + found[i]]] = -INFINITY;
      }
      raise(r, logs + r * tile.columns, tile.columns);
      begin += count;
    }
    remember_selected();
    selected.sort(tile.far * FAN);
  }

  void remember_selected() {
    if (!call.chosen) return;
    for (const Selection& x : selected.by_row) call.chosen[row_of(call, tile, x.row) * call.top + x.slot] = x.unit;
  }

  // --- Weights and values --------------------------------------------------------------------------------------------

  template <int rows> void read_block(const Selection* chosen, Size count) {
    if constexpr (rows > 0) {
      if (count != rows) return read_block<rows - 1>(chosen, count);
      const T *mine = segment(chosen->unit / FAN), *a[rows];
      const Size place = chosen->unit % FAN;
      for (int i = 0; i < rows; ++i) a[i] = queries + chosen[i].row * d;
      const PanelProduct<T, rows> product(d, a, mine + record.keys + place * d * PANEL);
      T weights[rows][PANEL], *c[rows];
      for (int i = 0; i < rows; ++i) {
        const Size r = chosen[i].row;
        c[i] = answers + r * e;
        a[i] = weights[i];
        for (int j = 0; j < VECTORS<T>; ++j) {
          T *total = totals + r * PANEL + j * lanes<T>, *over = excess + r * PANEL + j * lanes<T>;
          const vec<T> x = product.sums[i][j] + load(hidden + j * lanes<T>) - level[r], w = exp(x);
          store(weights[i] + j * lanes<T>, w);
          store(total, load(total) + w);
          store(over, larger<T>(load(over), x));
        }
      }
      scattered_product<T, rows>(rows, e, call.block, a, mine + record.values + place * call.block * e, c);
    }
  }

  // Read the selected blocks. If a logit is far above the level of its row, raise the level and return false.
  bool read_blocks() {
    std::fill(answers + 0, answers + tile.rows * e, T(0));
    std::fill(totals + 0, totals + tile.rows * PANEL, T(0));
    std::fill(excess + 0, excess + tile.rows * PANEL, T(0));
    for (Size r = 0; r < tile.rows; ++r) level[r] = level[r] == -INFINITY ? T(0) : level[r];
    for_each_unit(selected.by_unit, [&](const Selection* x, Size count) { read_block<ROWS_PER_BLOCK>(x, count); });
    bool done = true;
    for (Size r = 0; r < tile.rows; ++r) {
      T most = 0;
      for (Size t = 0; t < PANEL; ++t) most = std::max(most, excess[r * PANEL + t]);
      if (!(most > MAX_EXCESS) || !(level[r] + most > level[r])) continue;
      level[r] += most;
      done = false;
    }
    return done;
  }

  // Replace log-weights by weights, and add them to the totals of row r.
  void exponentiate(T* row, Size size, Size r) {
    for (Size j = 0; j < size; j += lanes<T>) {
      const vec<T> w = exp(load(row + j) - level[r]);
      T* total = totals + r * PANEL + j % PANEL;
      store(row + j, w);
      store(total, load(total) + w);
    }
  }

  void exponentiate() {
    for (Size r = 0; r < tile.rows; ++r) {
      if (tile.grouped) exponentiate(outer + r * whole_panels(tile.far) * PANEL, whole_panels(tile.far) * PANEL, r);
      exponentiate(first + r * first_row, first_row, r);
      exponentiate(logs + r * tile.columns, tile.columns, r);
      exponentiate(near + r * tile.near_row(), tile.near_row(), r);
    }
  }

  // answers += weights (rows, row) values (count, e)
  void add_dense(Size count, const T* weights, Size row, const T* values) {
    if (count > 0) add_product<T>(tile.rows, e, count, {weights, row, 1}, values, e, answers, e);
  }

  // answers += weights (rows, columns) means, over all segments.
  template <int rows> void add_means(Size from) {
    constexpr Size wide = SUBQUAD_COLUMNS * lanes<T>;
    for (Size j = 0; j < e; j += wide) {
      const Size vectors = std::min<Size>(SUBQUAD_COLUMNS, (e - j) / lanes<T>);
      if (vectors == SUBQUAD_COLUMNS)
        add_means<rows, SUBQUAD_COLUMNS>(from, j);
      else
        for (Size i = 0; i < vectors; ++i) add_means<rows, 1>(from, j + i * lanes<T>);
    }
  }

  template <int rows, int vectors> void add_means(Size from, Size column) {
    vec<T> sums[rows][vectors] = {};
    for (Size s = 0; s < tile.far; ++s) {
      const T *values = segment(s) + record.means + column, *weights = logs + from * tile.columns + s * FAN;
      for (Size k = 0; k < FAN; ++k) {
        vec<T> right[vectors];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) right[j] = load(values + k * e + j * lanes<T>);
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) {
          const vec<T> left = all(weights[i * tile.columns + k]);
#pragma GCC unroll 8
          for (int j = 0; j < vectors; ++j) sums[i][j] += left * right[j];
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < vectors; ++j) {
        T* to = answers + (from + i) * e + column + j * lanes<T>;
        store(to, load(to) + sums[i][j]);
      }
  }

  void add_means() {
    Size r = 0;
    for (; r + ROWS_PER_BLOCK <= tile.rows; r += ROWS_PER_BLOCK) add_means<ROWS_PER_BLOCK>(r);
    for (; r < tile.rows; ++r) add_means<1>(r);
  }

  void add_values() {
    const Size outer_columns = whole_panels(tile.far) * PANEL,
               most = *std::max_element(tile.sees, tile.sees + tile.count);
    for (Size i = 0; tile.grouped && i < whole_panels(tile.far); ++i)
      add_dense(std::min<Size>(FAN, tile.far - i * FAN), outer + i * FAN, outer_columns, root(i) + record.means);
    add_dense(std::min<Size>(call.sinks, most), first, first_row,
              static_cast<const T*>(call.sink_values) + tile.b * first_row * e);
    if (tile.grouped)
      for_each_unit(opened.by_unit, [&](const Selection* x, Size count) {
        const T* a[ROWS_PER_BLOCK];
        T* c[ROWS_PER_BLOCK];
        for (Size i = 0; i < count; ++i) {
          a[i] = logs + x[i].row * tile.columns + x[i].slot * FAN;
          c[i] = answers + x[i].row * e;
        }
        scattered_product<T, ROWS_PER_BLOCK>(count, e, FAN, a, segment(x->unit) + record.means, c);
      });
    else
      add_means();
    add_dense(most - call.sinks - tile.near_from, near, tile.near_row(),
              static_cast<const T*>(call.raw_values) + (tile.b * call.raw_panels + tile.near_panel) * PANEL * e);
  }

  void write() {
    T *output = static_cast<T*>(call.output), *levels = static_cast<T*>(call.level);
    for (Size r = 0; r < tile.rows; ++r) {
      T total = 0;
      for (Size j = 0; j < PANEL; j += lanes<T>) total += sum<T>(load(totals + r * PANEL + j));
      const T inverse = total > 0 ? 1 / total : T(0);
      T* to = output + strided_row(tile, r, call.output_batch, call.output_group, call.output_token);
      for (Size i = 0; i < e; ++i) to[i] = answers[r * e + i] * inverse;
      if (levels) levels[row_of(call, tile, r)] = total > 0 ? level[r] + std::log(total) : T(INFINITY);
    }
  }
};

inline double multipole_work(const SubquadMultipole& call) {
  const double reads = double(call.top + call.grouped_from + call.window / PANEL) * PANEL;
  return double(call.batch) * call.group * call.queries * 2 * call.width * reads;
}

// Each free thread takes the next tile: the result of a tile does not depend on the thread.
template <class T> bool multipole(const SubquadMultipole& call) {
  const std::vector<TileRange> tiles = tiles_of(call);
  if (tiles.empty()) return true;
  const Size most_sees = *std::max_element(call.sees, call.sees + call.batch * call.queries);
  const Size threads =
      std::max<Size>(1, std::min<Size>({Size(call.threads), Size(tiles.size()),
                                        Size(std::min(multipole_work(call) / MIN_WORK_PER_THREAD, 1024.0))}));
  std::atomic<Size> next{Size(tiles.size())};  // The last tiles, which see the most keys, come first.
  return in_parallel(threads, [&](Size) {
    Multipole<T> tile(call, most_sees);
    for (Size i; (i = --next) >= 0;) tile(tiles[i]);
  });
}

template <class T> bool is_finite(const void* data, Size size) {
  const T* x = static_cast<const T*>(data);
  T parts[PANEL] = {};
  for (Size i = 0; i < size; ++i) parts[i % PANEL] += x[i] * 0;
  return std::accumulate(parts, parts + PANEL, T(0)) == 0;
}

// Append one key of each head to the raw keys, then compute its queries.
template <class T> SubquadResult multipole_step(const SubquadMultipole& call) {
  const Size segment = FAN * call.block, d = call.width, e = call.values;
  if (!is_finite<T>(call.q, call.batch * call.group * d) || !is_finite<T>(call.key, call.batch * d) ||
      !is_finite<T>(call.value, call.batch * e))
    return POISONED;
  for (Size b = 0; b < call.batch; ++b) {
    if (call.keep && !call.keep[b]) continue;
    const Size place = call.filled[b] - call.sinks;  // of the new key, among those after the sinks
    const Size due = std::max<Size>(0, place + 1 - call.window) / segment;
    if (due > call.base[b] || place >= call.base[b] * segment + call.raw_panels * PANEL) return SEGMENT_DUE;
  }
  for (Size b = 0; b < call.batch; ++b) {
    if (call.keep && !call.keep[b]) continue;
    const T *key = static_cast<const T*>(call.key) + b * d, *value = static_cast<const T*>(call.value) + b * e;
    const Size place = call.filled[b]++ - call.sinks;
    const bool is_sink = place < 0;
    const Size t = is_sink ? place + call.sinks : place - call.base[b] * segment;
    const Size panels = is_sink ? whole_panels(call.sinks) : call.raw_panels;
    T* keys = static_cast<T*>(is_sink ? const_cast<void*>(call.sink_keys) : call.raw_keys);
    T* values = static_cast<T*>(is_sink ? const_cast<void*>(call.sink_values) : call.raw_values);
    for (Size i = 0; i < d; ++i) keys[((b * panels + t / PANEL) * d + i) * PANEL + t % PANEL] = key[i];
    std::copy(value, value + e, values + (b * panels * PANEL + t) * e);
  }
  return multipole<T>(call) ? OK : NO_MEMORY;
}

}  // namespace subquad::SUBQUAD_ISA
