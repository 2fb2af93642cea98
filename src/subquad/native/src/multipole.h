// Far keys through the moments of their blocks, all other keys exactly: one tile of queries at a time, as products.
//
//   a unit (a block of keys, or a group of blocks) of n keys has the logits' mean m and variance s for a query:
//     m = q.mu,  y_p = q.P_p,  s = sum_pq S_pq y_p y_q      one product with its 1 + rank pseudo-keys mu, P_1, ...
//     weight n exp(m + min(s, widest) / 2), value  mean + sum_p y_p X_p
//     likely maximum  m + sqrt(2 s ln n): each query opens the groups, and reads the blocks, that score highest
//
// `widest` caps the variance because a larger one carries little information: a few keys stand out, which a Gaussian
// does not describe.
//
// Rows are the queries of a tile, of all heads that share the keys. Dense products serve the units and keys that all
// rows see, and selection.h those that rows choose individually. Each row is summed in the order of the keys, whatever
// the other rows chose, so neither future keys nor neighboring rows change its bits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "parallel.h"
#include "product.h"
#include "selection.h"
#include "tensor.h"
#include "tiles.h"

namespace subquad::SUBQUAD_ISA {

template <class T> class Multipole {
 public:
  // turned: the transposed keys of all heads, (b, d, padded keys), or null: transpose only the keys that are needed.
  Multipole(const SubquadMultipole& call, const T* turned, Size turned_row)
      : call(call), d(call.width), e(padded<T>(call.values)), turned(turned), turned_row(turned_row),
        capacity(std::max<Size>(TILE_ROWS, call.group)), sinks(std::min(call.sinks, call.keys)),
        panel_row(padded<T>(std::max(std::min(call.block, call.keys), sinks))), panel(d * panel_row),
        queries(capacity * d), answers(capacity * e) {
    Size group = 0, units = 0, planes = 1;
    for (Size i = 0; i < call.groups_count; ++i) {
      group = std::max<Size>(group, call.groups[i].size);
      units = std::max(units, padded<T>(call.groups[i].count));
      planes = std::max(planes, 1 + call.groups[i].rank);
    }
    const Size dense = std::max<Size>(call.grouped_from, 2 * group + TILE_ROWS);
    const Size leaves = padded<T>(std::min<Size>(call.blocks.count, dense)) + call.opened * group;
    leaf = Buffer<T>((1 + call.blocks.rank) * capacity * leaves);
    outer = Buffer<T>(planes * capacity * units);
    score = Buffer<T>(std::max(leaves, units));
    first = Buffer<T>(capacity * padded<T>(sinks));
    chosen_row = call.top * padded<T>(call.block);
    chosen = Buffer<T>(capacity * chosen_row);
  }

  // Write the outputs of queries [from, from + count) of head b, whose groups have the same size.
  void operator()(Size b, Size from, Size count) {
    tile = MultipoleTile::of<T>(call, b, from, count);
    const T* given = static_cast<const T*>(call.q);
    for (Size g = 0; g < call.group; ++g)
      std::memcpy(queries + g * count * d, given + ((b * call.group + g) * call.queries + from) * d,
                  count * d * sizeof(T));
    std::fill(answers + 0, answers + tile.rows * e, T(0));
    top.assign(tile.rows, -INFINITY);
    opened.clear();
    by_row.clear();
    if (tile.wholes) open_groups();
    describe_blocks();
    select_blocks();
    read_keys();
    hide_unseen_keys();
    exponentiate();
    add_values();
    write();
  }

 private:
  const SubquadMultipole& call;
  const Size d, e;
  const T* turned;
  const Size turned_row, capacity, sinks, panel_row;  // capacity: rows of a tile; at least those of one query
  Size near_capacity = 0, chosen_row = 0;
  MultipoleTile tile{};
  Buffer<T> panel, queries, answers;
  Buffer<T> outer, leaf;            // planes of (rows, outer_row) and (rows, leaf_row), for groups and for blocks
  Buffer<T> score;                  // of the units that one row considers
  Buffer<T> first, near, chosen;    // logits of keys: (rows, first_row), (rows, near_row), (rows, chosen_row)
  std::vector<T> top, totals;       // the largest log-weight of each row, and the sum of its weights
  std::vector<Size> choices;        // the number of blocks that each row reads
  std::vector<Selection> opened;    // the groups that rows open, by unit
  std::vector<Selection> by_row;    // the same, by row
  std::vector<Selection> selected;  // the blocks that rows read, by unit
  std::vector<Selection> found;     // those of one row; `slot` is the column of the score
  Sorter sort;

  // --- Moments of units ----------------------------------------------------------------------------------------------

  const T* keys_of(const SubquadLevel& level, Size p) const {
    return static_cast<const T*>(level.keys) + (tile.b * (1 + level.rank) + p) * d * level.stride;
  }

  const T* values_of(const SubquadLevel& level, Size p) const {
    return static_cast<const T*>(level.values) + (tile.b * (1 + level.rank) + p) * level.stride * e;
  }

  // Means and coordinates of the units [from, from + count) for all rows: planes of (rows, row).
  void describe(const SubquadLevel& level, Size from, Size count, T* to, Size row) {
    for (Size p = 0; p <= level.rank; ++p)
      set_product<T>(tile.rows, padded<T>(count), d, {queries, d, 1}, keys_of(level, p) + from, level.stride,
                     to + p * tile.rows * row, row);
  }

  // Replace the means of row r, from `column` on, by log-weights, and write the same columns of `score`.
  void weigh(const SubquadLevel& level, Size from, Size count, T* planes, Size row, Size column, Size r, Size keys) {
    const Size plane = tile.rows * row;
    const T* spread =
        static_cast<const T*>(level.spread) + tile.b * level.rank * (level.rank + 1) / 2 * level.stride + from;
    T *mean = planes + r * row + column, *to = score + column;
    const T log_keys = std::log(T(keys)), reach = std::sqrt(2 * log_keys);
    for (Size j = 0; j < padded<T>(count); j += lanes<T>) {
      vec<T> variance{};
      const T* s = spread + j;
      for (Size p = 0; p < level.rank; ++p) {
        const vec<T> y = load(mean + (p + 1) * plane + j);
        vec<T> along{};
        for (Size q = p; q < level.rank; ++q, s += level.stride) along += load(s) * load(mean + (q + 1) * plane + j);
        variance += y * along;
      }
      store(to + j, larger<T>(variance, vec<T>{}));
    }
    for (Size j = 0; j < padded<T>(count); ++j) to[j] = std::sqrt(to[j]);
    const vec<T> widest = all<T>(call.widest);
    for (Size j = 0; j < padded<T>(count); j += lanes<T>) {
      const vec<T> m = load(mean + j), root = load(to + j), variance = root * root;
      store(to + j, m + reach * root);
      store(mean + j, m + log_keys + T(0.5) * (variance < widest ? variance : widest));
    }
  }

  static void hide_outside(T* row, Size from, Size to, Size size) {
    for (Size j = 0; j < from; ++j) row[j] = -INFINITY;
    for (Size j = std::max<Size>(to, 0); j < size; ++j) row[j] = -INFINITY;
  }

  // --- Selection -----------------------------------------------------------------------------------------------------

  // Append to `found` the columns [from, to) above the threshold, in order; column `from` is the score of `unit`. Never
  // take more than `wanted`: products that overflow give scores without an order.
  void take(Threshold<T>& threshold, Size wanted, Size from, Size to, Size unit, Size r) {
    for (Size j = from; j < to && Size(found.size()) < wanted; ++j) {
      const bool tie = score[j] == threshold.limit && threshold.ties > 0;
      if (!(score[j] > threshold.limit) && !tie) continue;
      threshold.ties -= tie;
      found.push_back({unit + j - from, r, j});
    }
  }

  // All groups through their moments, and the groups that each row opens.
  void open_groups() {
    describe(*tile.groups, 0, tile.wholes, outer, tile.outer_row);
    for (Size r = 0; r < tile.rows; ++r) {
      const Size mine = tile.far[r % tile.count] / tile.size;
      T* logs = outer + r * tile.outer_row;
      weigh(*tile.groups, 0, tile.wholes, outer, tile.outer_row, 0, r, tile.size * call.block);
      hide_outside(logs, 0, mine, tile.outer_row);
      hide_outside(score, 0, mine, tile.outer_row);
      found.clear();
      Threshold<T> threshold = find_threshold<T>(score, tile.outer_row, call.opened);
      take(threshold, call.opened, 0, mine, 0, r);
      for (Size i = 0; i < Size(found.size()); ++i) {
        opened.push_back({found[i].unit, r, i});
        logs[found[i].unit] = -INFINITY;
      }
      raise(r, logs, tile.outer_row);
    }
    by_row = opened;
    sort(opened, tile.wholes);
  }

  // The blocks: a range that all rows consider, followed by those of the groups that each row opened.
  void describe_blocks() {
    if (tile.dense) describe(call.blocks, tile.start, tile.dense, leaf, tile.leaf_row);
    for (Size p = 0; p <= call.blocks.rank; ++p)
      selected_product<T, true>(
          opened, tile.size, d, [&](const Selection& x) { return queries + x.row * d; },
          [&](Size unit) { return Panel<T>{keys_of(call.blocks, p) + unit * tile.size, call.blocks.stride}; },
          [&](const Selection& x) { return opened_blocks(x, p); });
  }

  T* opened_blocks(const Selection& x, Size p) const {
    return leaf + (p * tile.rows + x.row) * tile.leaf_row + tile.dense_row + x.slot * tile.size;
  }

  // The blocks that each row reads.
  void select_blocks() {
    selected.clear();
    Size next = 0;  // in by_row
    for (Size r = 0; r < tile.rows; ++r) {
      const Size mine = tile.far[r % tile.count], own = tile.groups ? mine / tile.size * tile.size : 0;
      const Size mine_first = next;
      T* logs = leaf + r * tile.leaf_row;
      weigh(call.blocks, tile.start, tile.dense, leaf, tile.leaf_row, 0, r, call.block);
      hide_outside(logs, own - tile.start, mine - tile.start, tile.dense_row);
      hide_outside(score, own - tile.start, mine - tile.start, tile.dense_row);
      for (Size slot = 0; slot < tile.slots; ++slot) {
        const Size column = tile.dense_row + slot * tile.size;
        if (next < Size(by_row.size()) && by_row[next].row == r) {
          weigh(call.blocks, by_row[next++].unit * tile.size, tile.size, leaf, tile.leaf_row, column, r, call.block);
        } else {
          hide_outside(logs + column, 0, 0, tile.size);
          hide_outside(score + column, 0, 0, tile.size);
        }
      }
      found.clear();
      Threshold<T> threshold = find_threshold<T>(score, tile.leaf_row, call.top);
      for (Size i = mine_first; i < next; ++i) {
        const Size column = tile.dense_row + by_row[i].slot * tile.size;
        take(threshold, call.top, column, column + tile.size, by_row[i].unit * tile.size, r);
      }
      take(threshold, call.top, own - tile.start, mine - tile.start, own, r);  // These blocks follow those of groups.
      for (Size i = 0; i < Size(found.size()); ++i) {
        selected.push_back({found[i].unit, r, i});
        logs[found[i].slot] = -INFINITY;
      }
      raise(r, logs, tile.leaf_row);
    }
    sort(selected, tile.most_far);
  }

  // --- Keys that are read exactly ------------------------------------------------------------------------------------

  Panel<T> columns_of(Size from, Size count) {
    if (turned) return {turned + tile.b * d * turned_row + from, turned_row};
    const T* k = static_cast<const T*>(call.k) + tile.b * call.k_batch + from * d;
    for (Size t = 0; t < count; ++t)
      for (Size i = 0; i < d; ++i) panel[i * panel_row + t] = k[t * d + i];
    return {panel, panel_row};
  }

  void read_range(Size from, Size count, T* to, Size row) {
    const Size most = turned ? count : panel_row;
    for (Size j = 0; j < count; j += most) {
      const Size some = std::min(most, count - j);
      const Panel<T> columns = columns_of(from + j, std::min<Size>(some, call.keys - from - j));
      set_product<T>(tile.rows, padded<T>(some), d, {queries, d, 1}, columns.data, columns.row, to + j, row);
    }
  }

  // Logits of the sinks, of the near keys, and of the keys of the selected blocks.
  void read_keys() {
    if (near_capacity < capacity * tile.near_row) near = Buffer<T>(near_capacity = capacity * tile.near_row);
    if (sinks) read_range(0, sinks, first, tile.first_row);
    if (tile.nears) read_range(tile.near_from, tile.nears, near, tile.near_row);
    selected_product<T, true>(
        selected, tile.block_row, d, [&](const Selection& x) { return queries + x.row * d; },
        [&](Size unit) { return columns_of(call.sinks + unit * call.block, call.block); },
        [&](const Selection& x) { return chosen + x.row * chosen_row + x.slot * tile.block_row; });
    choices.assign(tile.rows, 0);
    for (const Selection& x : selected) choices[x.row] = std::max(choices[x.row], x.slot + 1);
  }

  void hide_unseen_keys() {
    for (Size r = 0; r < tile.rows; ++r) {
      const Size t = tile.sees[r % tile.count], begin = call.sinks + tile.far[r % tile.count] * call.block;
      T *first_logs = first + r * tile.first_row, *near_logs = near + r * tile.near_row,
        *logs = chosen + r * chosen_row;
      hide_outside(first_logs, 0, std::min<Size>(sinks, t), tile.first_row);
      if (tile.nears) hide_outside(near_logs, std::min(begin, t) - tile.near_from, t - tile.near_from, tile.near_row);
      for (Size i = 0; i < choices[r]; ++i) hide_outside(logs + i * tile.block_row, 0, call.block, tile.block_row);
      raise(r, first_logs, tile.first_row);
      raise(r, near_logs, tile.near_row);
      raise(r, logs, choices[r] * tile.block_row);
    }
  }

  // --- Weights and values --------------------------------------------------------------------------------------------

  void raise(Size r, const T* logs, Size size) {
    if (!size) return;
    vec<T> most = load(logs);
    for (Size j = lanes<T>; j < size; j += lanes<T>) most = larger<T>(most, load(logs + j));
    top[r] = std::max(top[r], largest<T>(most));
  }

  // Replace log-weights by weights, and return their sum.
  static T weights(T* logs, Size size, T level) {
    vec<T> total{};
    for (Size j = 0; j < size; j += lanes<T>) {
      const vec<T> w = exp(load(logs + j) - level);
      store(logs + j, w);
      total += w;
    }
    return sum<T>(total);
  }

  // Multiply the coordinates of row r by the weights; 0 where the weight is 0.
  void weigh_coordinates(Size rank, T* planes, Size row, Size r) {
    for (Size p = 1; p <= rank; ++p)
      for (Size j = 0; j < row; j += lanes<T>) {
        const vec<T> w = load(planes + r * row + j);
        T* y = planes + (p * tile.rows + r) * row + j;
        store(y, w == 0 ? vec<T>{} : w * load(y));
      }
  }

  void exponentiate() {
    totals.assign(tile.rows, 0);
    for (Size r = 0; r < tile.rows; ++r) {
      const T level = top[r] == -INFINITY ? T(0) : top[r];
      totals[r] += weights(outer + r * tile.outer_row, tile.outer_row, level);
      weigh_coordinates(tile.groups ? tile.groups->rank : 0, outer, tile.outer_row, r);
      totals[r] += weights(first + r * tile.first_row, tile.first_row, level);
      totals[r] += weights(leaf + r * tile.leaf_row, tile.leaf_row, level);
      weigh_coordinates(call.blocks.rank, leaf, tile.leaf_row, r);
      totals[r] += weights(chosen + r * chosen_row, choices[r] * tile.block_row, level);
      totals[r] += weights(near + r * tile.near_row, tile.near_row, level);
    }
  }

  // answers += weights (rows, row) values (count, e)
  void add_dense(Size count, const T* weights, Size row, const T* values) {
    if (count) add_product<T>(tile.rows, e, count, {weights, row, 1}, values, e, answers, e);
  }

  void add_values() {
    const T* v = static_cast<const T*>(call.v) + tile.b * call.v_batch;
    const auto answer = [&](const Selection& x) { return answers + x.row * e; };
    for (Size p = 0; tile.wholes && p <= tile.groups->rank; ++p)
      add_dense(tile.wholes, outer + p * tile.rows * tile.outer_row, tile.outer_row, values_of(*tile.groups, p));
    add_dense(sinks, first, tile.first_row, v);
    for (Size p = 0; p <= call.blocks.rank; ++p) {
      const T* values = values_of(call.blocks, p);
      selected_product<T, false>(
          opened, e, tile.size, [&](const Selection& x) { return opened_blocks(x, p); },
          [&](Size unit) { return Panel<T>{values + unit * tile.size * e, e}; }, answer);
      add_dense(tile.dense, leaf + p * tile.rows * tile.leaf_row, tile.leaf_row, values + tile.start * e);
    }
    selected_product<T, false>(
        selected, e, call.block,
        [&](const Selection& x) { return chosen + x.row * chosen_row + x.slot * tile.block_row; },
        [&](Size unit) { return Panel<T>{v + (call.sinks + unit * call.block) * e, e}; }, answer);
    add_dense(tile.nears, near, tile.near_row, v + tile.near_from * e);
  }

  void write() {
    T* output = static_cast<T*>(call.output);
    for (Size r = 0; r < tile.rows; ++r) {
      const T inverse = totals[r] > 0 ? 1 / totals[r] : T(0);
      const Size row = (tile.b * call.group + r / tile.count) * call.queries + tile.from + r % tile.count;
      for (Size i = 0; i < call.values; ++i) output[row * call.values + i] = answers[r * e + i] * inverse;
    }
  }
};

// Each free thread takes the next tile: the result of a tile does not depend on the thread.
template <class T> bool multipole(const SubquadMultipole& call) {
  const Size m = call.keys, d = call.width, rows = call.group * call.queries;
  const bool many = rows >= TILE_ROWS;  // With fewer rows, transpose only the keys that are needed.
  const Size turned_row = padded<T>(m) + lanes<T>;
  Buffer<T> turned(many ? call.batch * d * turned_row : 0);
  const std::vector<TileRange> tiles = tiles_of(call);
  const double work = double(call.batch) * rows * (2 * d) * (call.top * call.block + 2 * call.blocks.count);
  const Size threads =
      std::max<Size>(1, std::min<Size>(call.threads, Size(std::min(work / MIN_WORK_PER_THREAD, 1024.0))));
  const T* k = static_cast<const T*>(call.k);
  const auto transpose = [&](Size thread) {
    for (Size b = 0; b < call.batch; ++b) {
      const Size from = m * thread / threads, to = m * (thread + 1) / threads;
      turn(k + b * call.k_batch + from * d, d, to - from, d, turned + b * d * turned_row + from, turned_row);
    }
  };
  if (many && !in_parallel(threads, transpose)) return false;
  std::atomic<Size> next{Size(tiles.size())};  // The last tiles, which see the most keys, come first.
  return in_parallel(threads, [&](Size) {
    Multipole<T> tile(call, many ? turned + 0 : nullptr, turned_row);
    for (Size i; (i = --next) >= 0;) tile(tiles[i].b, tiles[i].from, tiles[i].count);
  });
}

}  // namespace subquad::SUBQUAD_ISA
