// Far keys by the moments of their blocks, the others exactly: a tile of queries at a time, all of it products.
//
//   a unit (a block of keys, or a group of blocks) of n keys has the logits' mean m and variance s for a query:
//     m = q.mu,  y_p = q.P_p,  s = sum_pq S_pq y_p y_q      one product with its 1 + rank pseudo-keys mu, P_1, ...
//     weight n exp(m + min(s, 4) / 2), value  mean + sum_p y_p X_p
//     likely maximum  m + sqrt(2 s ln n): by this each query chooses the groups that it opens and the blocks it reads
//
// Rows are the queries of a tile, of all heads that share the keys. Dense products serve units and keys that all rows
// see; what rows choose for themselves is sorted by unit, so that the rows of a unit share its panel, up to 6 in a
// register block. Each row is summed in the order of the keys, whatever the others chose: nothing of the future, and
// nothing of a neighbour, changes its bits.
//
// 48 rows: 8 register blocks deep enough to pay for reading the pseudo-keys from the second-level cache, and still few
// enough that their logits (48 x 1,536 numbers at 8,192 keys) stay there too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "product.h"
#include "shared.h"
#include "tensor.h"

namespace subquad::SUBQUAD_ISA {

constexpr Size TILE = 48, SHARED = 6;
constexpr double WIDEST = 4;  // variances above it say little: a few keys stand out, and a Gaussian does not know them

// C_i[j] (+)= sum_k A_i[k] B[k][j] for a few rows that lie anywhere.
template <class T, int rows, bool anew>
inline void scattered_rows(Size count, Size columns, Size depth, const T* const* a, const T* b, Size b_row, T* const* c) {
  if constexpr (rows > 0) {
    if (count != rows) return scattered_rows<T, rows - 1, anew>(count, columns, depth, a, b, b_row, c);
    const auto element = [a](Size i, Size k) { return a[i][k]; };
    Size j = 0;
    const auto place = [c, &j](Size i) { return c[i] + j; };
    for (; j + 2 * lanes<T> <= columns; j += 2 * lanes<T>) tile<T, rows, 2, anew>(depth, element, b + j, b_row, place);
    if (j < columns) tile<T, rows, 1, anew>(depth, element, b + j, b_row, place);
  }
}

// Blocks in a group, for a query with so many far blocks; 1: none. As `group_size` in _multipole.py.
inline Size group_size(const SubquadMultipole& call, Size far) {
  if (far < call.grouped_from) return 1;
  Size size = call.least_group;
  while (call.opened * 4 * size * size <= far) size *= 2;
  return size;
}

// A row and a place in it, of a unit that it chose.
struct Choice {
  Size unit, row, slot;
};

template <class T> class Multipole {
 public:
  // turned: the keys of all heads as columns, (b, d, padded keys), or null: those that are needed are turned one by one.
  Multipole(const SubquadMultipole& call, const T* turned, Size turned_row)
      : call(call), d(call.width), e(padded<T>(call.values)), turned(turned), turned_row(turned_row),
        room(std::max<Size>(TILE, call.group)), sinks(std::min(call.sinks, call.keys)),
        panel_row(padded<T>(std::max(std::min(call.block, call.keys), sinks))), panel(d * panel_row), queries(room * d),
        answers(room * e) {
    const Size group = call.groups_count ? largest_group() : 0;
    const Size dense = std::max<Size>(call.grouped_from, 2 * group + TILE);
    leaf_room = padded<T>(std::min<Size>(call.blocks.count, dense)) + call.opened * group;
    Size units = 0, planes = 1;
    for (Size i = 0; i < call.groups_count; ++i) {
      units = std::max(units, padded<T>(call.groups[i].count));
      planes = std::max(planes, 1 + call.groups[i].rank);
    }
    leaf = Buffer<T>((1 + call.blocks.rank) * room * leaf_room);
    outer = Buffer<T>(planes * room * units);
    score = Buffer<T>(std::max(leaf_room, units));
    first = Buffer<T>(room * padded<T>(sinks));
    chosen_row = call.top * padded<T>(call.block);
    chosen = Buffer<T>(room * chosen_row);
  }

  // Queries from `from` on, `count` of them, whose groups have the same size.
  void operator()(Size b, Size from, Size count) {
    const Size rows = call.group * count, n = call.queries;
    const int64_t *sees = call.sees + b * n + from, *far = call.far + b * n + from;
    const T* given = static_cast<const T*>(call.q);
    for (Size g = 0; g < call.group; ++g)
      std::memcpy(queries + g * count * d, given + ((b * call.group + g) * n + from) * d, count * d * sizeof(T));
    const Size least = *std::min_element(far, far + count), most = *std::max_element(far, far + count);
    const SubquadLevel* groups = nullptr;
    const Size size = group_size(call, most);
    for (Size i = 0; i < call.groups_count; ++i)
      if (call.groups[i].size == size) groups = &call.groups[i];
    std::fill(answers + 0, answers + rows * e, T(0));
    top.assign(rows, -INFINITY);

    // The groups, all of them by their moments, and those that each row opens.
    const Size wholes = groups ? most / size : 0, outer_row = padded<T>(wholes);
    opened.clear();
    by_row.clear();
    if (wholes) {
      describe(*groups, b, 0, wholes, rows, outer, outer_row, 0);
      for (Size r = 0; r < rows; ++r) {
        const Size mine = far[r % count] / size;
        weigh(*groups, b, 0, wholes, rows, outer, outer_row, 0, r, size * call.block);
        hide(outer + r * outer_row, 0, mine, outer_row);
        hide(score, 0, mine, outer_row);
        found.clear();
        auto limit = threshold(score, outer_row, call.opened);
        take(limit, call.opened, 0, mine, 0, r);
        for (Size i = 0; i < Size(found.size()); ++i) {
          opened.push_back({found[i].unit, r, i});
          outer[r * outer_row + found[i].unit] = -INFINITY;
        }
        raise(r, outer + r * outer_row, outer_row);
      }
      by_row = opened;
      sort(opened, wholes);
    }

    // The blocks: a range that all rows look at, and those of the groups that each opened, side by side.
    const Size start = groups ? least / size * size : 0, dense = most - start, dense_row = padded<T>(dense);
    const Size slots = wholes ? std::min<Size>(call.opened, wholes) : 0, leaf_row = dense_row + slots * size;
    if (dense) describe(call.blocks, b, start, dense, rows, leaf, leaf_row, 0);
    for (Size p = 0; p <= call.blocks.rank; ++p)
      each_unit(opened, [&](Size unit, Size shared, const Choice* who) {
        const T* a[SHARED];
        T* c[SHARED];
        for (Size i = 0; i < shared; ++i) {
          a[i] = queries + who[i].row * d;
          c[i] = leaf + (p * rows + who[i].row) * leaf_row + dense_row + who[i].slot * size;
        }
        const T* plane = keys_of(call.blocks, b, p) + unit * size;
        scattered_rows<T, SHARED, true>(shared, size, d, a, plane, call.blocks.stride, c);
      });
    chosen_blocks.clear();
    Size next = 0;
    for (Size r = 0; r < rows; ++r) {
      const Size mine = far[r % count], own = groups ? mine / size * size : 0;
      weigh(call.blocks, b, start, dense, rows, leaf, leaf_row, 0, r, call.block);
      T* logs = leaf + r * leaf_row;
      hide(logs, own - start, mine - start, dense_row);
      hide(score, own - start, mine - start, dense_row);
      const Size mine_first = next;
      for (Size slot = 0; slot < slots; ++slot) {
        const Size column = dense_row + slot * size;
        if (next < Size(by_row.size()) && by_row[next].row == r) {
          weigh(call.blocks, b, by_row[next++].unit * size, size, rows, leaf, leaf_row, column, r, call.block);
        } else {
          hide(logs + column, 0, 0, size);
          hide(score + column, 0, 0, size);
        }
      }
      found.clear();
      auto limit = threshold(score, leaf_row, call.top);
      for (Size i = mine_first; i < next; ++i)
        take(limit, call.top, dense_row + by_row[i].slot * size, dense_row + (by_row[i].slot + 1) * size,
             by_row[i].unit * size, r);
      take(limit, call.top, own - start, mine - start, own, r);  // The groups come before it.
      for (Size i = 0; i < Size(found.size()); ++i) {
        chosen_blocks.push_back({found[i].unit, r, i});
        logs[found[i].slot] = -INFINITY;
      }
      raise(r, logs, leaf_row);
    }
    sort(chosen_blocks, most);

    // Keys that are read one by one: the first, the near ones, and those of the chosen blocks.
    const Size near_from = std::min<Size>(call.sinks + least * call.block, call.keys);
    const Size near_to = *std::max_element(sees, sees + count), nears = std::max<Size>(0, near_to - near_from);
    const Size near_row = padded<T>(nears), first_row = padded<T>(sinks), block_row = padded<T>(call.block);
    if (near_room < room * near_row) near = Buffer<T>(near_room = room * near_row);
    if (sinks) exact(b, 0, sinks, rows, first, first_row);
    if (nears) exact(b, near_from, nears, rows, near, near_row);
    each_unit(chosen_blocks, [&](Size unit, Size shared, const Choice* who) {
      const T* a[SHARED];
      T* c[SHARED];
      for (Size i = 0; i < shared; ++i) {
        a[i] = queries + who[i].row * d;
        c[i] = chosen + who[i].row * chosen_row + who[i].slot * block_row;
      }
      Size row;
      const T* columns = columns_of(b, call.sinks + unit * call.block, call.block, row);
      scattered_rows<T, SHARED, true>(shared, block_row, d, a, columns, row, c);
    });
    std::vector<Size> choices(rows, 0);
    for (const Choice& x : chosen_blocks) choices[x.row] = std::max(choices[x.row], x.slot + 1);
    for (Size r = 0; r < rows; ++r) {
      const Size t = sees[r % count], begin = call.sinks + far[r % count] * call.block;
      hide(first + r * first_row, 0, std::min<Size>(sinks, t), first_row);
      if (nears) hide(near + r * near_row, std::min(begin, t) - near_from, t - near_from, near_row);
      for (Size i = 0; i < choices[r]; ++i) hide(chosen + r * chosen_row + i * block_row, 0, call.block, block_row);
      raise(r, first + r * first_row, first_row);
      raise(r, near + r * near_row, near_row);
      raise(r, chosen + r * chosen_row, choices[r] * block_row);
    }

    // Weights, their sums, and the values.
    std::vector<T> totals(rows, 0);
    for (Size r = 0; r < rows; ++r) {
      const T level = top[r] == -INFINITY ? T(0) : top[r];
      totals[r] += weights(outer + r * outer_row, outer_row, level);
      spread_out(groups ? groups->rank : 0, rows, outer, outer_row, r);
      totals[r] += weights(first + r * first_row, first_row, level);
      totals[r] += weights(leaf + r * leaf_row, leaf_row, level);
      spread_out(call.blocks.rank, rows, leaf, leaf_row, r);
      totals[r] += weights(chosen + r * chosen_row, choices[r] * block_row, level);
      totals[r] += weights(near + r * near_row, near_row, level);
    }
    const T* v = static_cast<const T*>(call.v) + b * call.v_batch;
    for (Size p = 0; wholes && p <= groups->rank; ++p)
      add_product<T>(rows, e, wholes, {outer + p * rows * outer_row, outer_row, 1}, values_of(*groups, b, p), e, answers, e);
    if (sinks) add_product<T>(rows, e, sinks, {first, first_row, 1}, v, e, answers, e);
    for (Size p = 0; p <= call.blocks.rank; ++p) {
      each_unit(opened, [&](Size unit, Size shared, const Choice* who) {
        const T* a[SHARED];
        T* c[SHARED];
        for (Size i = 0; i < shared; ++i) {
          a[i] = leaf + (p * rows + who[i].row) * leaf_row + dense_row + who[i].slot * size;
          c[i] = answers + who[i].row * e;
        }
        scattered_rows<T, SHARED, false>(shared, e, size, a, values_of(call.blocks, b, p) + unit * size * e, e, c);
      });
      if (dense)
        add_product<T>(rows, e, dense, {leaf + p * rows * leaf_row, leaf_row, 1},
                       values_of(call.blocks, b, p) + start * e, e, answers, e);
    }
    each_unit(chosen_blocks, [&](Size unit, Size shared, const Choice* who) {
      const T* a[SHARED];
      T* c[SHARED];
      for (Size i = 0; i < shared; ++i) {
        a[i] = chosen + who[i].row * chosen_row + who[i].slot * block_row;
        c[i] = answers + who[i].row * e;
      }
      scattered_rows<T, SHARED, false>(shared, e, call.block, a, v + (call.sinks + unit * call.block) * e, e, c);
    });
    if (nears) add_product<T>(rows, e, nears, {near, near_row, 1}, v + near_from * e, e, answers, e);
    T* output = static_cast<T*>(call.output);
    for (Size r = 0; r < rows; ++r) {
      const T inverse = totals[r] > 0 ? 1 / totals[r] : T(0);
      T* to = output + ((b * call.group + r / count) * n + from + r % count) * call.values;
      for (Size i = 0; i < call.values; ++i) to[i] = answers[r * e + i] * inverse;
    }
  }

 private:
  Size largest_group() const {
    Size size = 0;
    for (Size i = 0; i < call.groups_count; ++i) size = std::max<Size>(size, call.groups[i].size);
    return size;
  }

  const T* keys_of(const SubquadLevel& level, Size b, Size p) const {
    return static_cast<const T*>(level.keys) + (b * (1 + level.rank) + p) * d * level.stride;
  }
  const T* values_of(const SubquadLevel& level, Size b, Size p) const {
    return static_cast<const T*>(level.values) + (b * (1 + level.rank) + p) * level.stride * e;
  }

  // Means and coordinates of all rows for some units: planes of (rows, row).
  void describe(const SubquadLevel& level, Size b, Size from, Size count, Size rows, T* to, Size row, Size column) {
    for (Size p = 0; p <= level.rank; ++p)
      set_product<T>(rows, padded<T>(count), d, {queries, d, 1}, keys_of(level, b, p) + from, level.stride,
                     to + p * rows * row + column, row);
  }

  // The first plane of a row becomes log-weights, from `column` on; scores go to the same places of `score`.
  void weigh(const SubquadLevel& level, Size b, Size from, Size count, Size rows, T* planes, Size row, Size column,
             Size r, Size keys) {
    const T* spread = static_cast<const T*>(level.spread) + b * level.rank * (level.rank + 1) / 2 * level.stride + from;
    T *mean = planes + r * row + column, *to = score + column;
    const T log_keys = std::log(T(keys)), reach = std::sqrt(2 * log_keys);
    for (Size j = 0; j < padded<T>(count); j += lanes<T>) {
      vec<T> variance{};
      const T* s = spread + j;
      for (Size p = 0; p < level.rank; ++p) {
        const vec<T> y = load(mean + (p + 1) * rows * row + j);
        vec<T> along{};
        for (Size q = p; q < level.rank; ++q, s += level.stride) along += load(s) * load(mean + (q + 1) * rows * row + j);
        variance += y * along;
      }
      store(to + j, larger<T>(variance, vec<T>{}));
    }
    for (Size j = 0; j < padded<T>(count); ++j) to[j] = std::sqrt(to[j]);
    for (Size j = 0; j < padded<T>(count); j += lanes<T>) {
      const vec<T> m = load(mean + j), root = load(to + j), variance = root * root, widest = all<T>(WIDEST);
      store(to + j, m + reach * root);
      store(mean + j, m + log_keys + T(0.5) * (variance < widest ? variance : widest));
    }
  }

  static void hide(T* row, Size from, Size to, Size size) {  // all but [from, to)
    for (Size j = 0; j < from; ++j) row[j] = -INFINITY;
    for (Size j = std::max<Size>(to, 0); j < size; ++j) row[j] = -INFINITY;
  }

  // A score such that at most `wanted` of `size` (whole vectors) are above it, and how many that equal it belong to them.
  // By halving the range of scores: a few passes, each a comparison a vector.
  std::pair<T, Size> threshold(const T* scores, Size size, Size wanted) const {
    vec<T> most = all<T>(-INFINITY), least = all<T>(INFINITY);
    for (Size j = 0; j < size; j += lanes<T>) {
      const vec<T> x = load(scores + j);
      most = larger<T>(most, x);
      least = x < least && x > all<T>(-INFINITY) ? x : least;
    }
    T high = largest<T>(most), low = -largest<T>(-least);
    const Size over = above(scores, size, low);
    if (over < wanted) return {low, wanted - over};
    for (;;) {
      const T middle = low / 2 + high / 2;
      if (!(middle > low && middle < high)) return {high, wanted - above(scores, size, high)};
      const Size count = above(scores, size, middle);
      if (count == wanted) return {middle, 0};
      (count > wanted ? low : high) = middle;
    }
  }
  static Size above(const T* scores, Size size, T limit) {
    mask<T> count{};
    for (Size j = 0; j < size; j += lanes<T>) count -= load(scores + j) > all<T>(limit);
    Size total = 0;
    for (Size i = 0; i < lanes<T>; ++i) total += count[i];
    return total;
  }
  // Those of a stretch, the first unit of which is `unit`, that are above the threshold, in the order of their places.
  // Never more than `wanted`: products that overflow leave scores without an order.
  void take(std::pair<T, Size>& limit, Size wanted, Size from, Size to, Size unit, Size r) {
    for (Size j = from; j < to && Size(found.size()) < wanted; ++j) {
      const bool equal = score[j] == limit.first && limit.second > 0;
      if (!(score[j] > limit.first) && !equal) continue;
      limit.second -= equal;
      found.push_back({unit + j - from, r, j});
    }
  }

  // By unit, and rows as they were: a count of each unit, and its place from that.
  void sort(std::vector<Choice>& choices, Size units) {
    ends.assign(units + 1, 0);
    sorted.resize(choices.size());
    for (const Choice& x : choices) ++ends[x.unit + 1];
    for (Size i = 0; i < units; ++i) ends[i + 1] += ends[i];
    for (const Choice& x : choices) sorted[ends[x.unit]++] = x;
    choices.swap(sorted);
  }
  template <class Body> static void each_unit(const std::vector<Choice>& choices, Body body) {
    for (Size i = 0, shared; i < Size(choices.size()); i += shared) {
      for (shared = 1; shared < SHARED && i + shared < Size(choices.size()) && choices[i + shared].unit == choices[i].unit;)
        ++shared;
      body(choices[i].unit, shared, choices.data() + i);
    }
  }

  const T* columns_of(Size b, Size from, Size count, Size& row) {
    if (turned) {
      row = turned_row;
      return turned + b * d * turned_row + from;
    }
    row = panel_row;
    const T* k = static_cast<const T*>(call.k) + b * call.k_batch + from * d;
    for (Size t = 0; t < count; ++t)
      for (Size i = 0; i < d; ++i) panel[i * row + t] = k[t * d + i];
    return panel;
  }
  void exact(Size b, Size from, Size count, Size rows, T* to, Size row) {
    const Size most = turned ? count : panel_row;
    for (Size j = 0; j < count; j += most) {
      Size column;
      const Size few = std::min(most, count - j);
      const T* columns = columns_of(b, from + j, std::min<Size>(few, call.keys - from - j), column);
      set_product<T>(rows, padded<T>(few), d, {queries, d, 1}, columns, column, to + j, row);
    }
  }

  void raise(Size r, const T* logs, Size size) {
    if (!size) return;
    vec<T> most = load(logs);
    for (Size j = lanes<T>; j < size; j += lanes<T>) most = larger<T>(most, load(logs + j));
    top[r] = std::max(top[r], largest<T>(most));
  }
  static T weights(T* logs, Size size, T level) {
    vec<T> total{};
    for (Size j = 0; j < size; j += lanes<T>) {
      const vec<T> w = exp(load(logs + j) - level);
      store(logs + j, w);
      total += w;
    }
    return sum<T>(total);
  }
  // The planes of coordinates become weights times coordinates; where there is no weight, 0.
  static void spread_out(Size rank, Size rows, T* planes, Size row, Size r) {
    for (Size p = 1; p <= rank; ++p)
      for (Size j = 0; j < row; j += lanes<T>) {
        const vec<T> w = load(planes + r * row + j);
        T* y = planes + (p * rows + r) * row + j;
        store(y, w == 0 ? vec<T>{} : w * load(y));
      }
  }

  const SubquadMultipole& call;
  const Size d, e;
  const T* turned;
  const Size turned_row, room, sinks, panel_row;  // room for rows: a query has at least those of its group
  Buffer<T> panel, queries, answers, leaf, outer, score, first, near, chosen;
  Size leaf_room = 0, near_room = 0, chosen_row = 0;
  std::vector<T> top;
  std::vector<Choice> opened, by_row, chosen_blocks, found, sorted;
  std::vector<Size> ends;
};

// Tiles are taken by whichever thread is free: what one computes does not depend on the others.
template <class T> bool multipole(const SubquadMultipole& call) {
  const Size n = call.queries, m = call.keys, d = call.width, rows = std::max<Size>(1, TILE / call.group);
  const bool many = call.group * n >= TILE;  // else the keys that are needed are turned one by one
  const Size turned_row = padded<T>(m) + lanes<T>;
  Buffer<T> turned(many ? call.batch * d * turned_row : 0);
  struct Work {
    Size b, from, count;
  };
  std::vector<Work> work;
  for (Size b = 0; b < call.batch; ++b) {
    const int64_t* far = call.far + b * n;
    for (Size from = 0, to; from < n; from = to) {
      for (to = from + 1; to < n && to - from < rows && group_size(call, far[to]) == group_size(call, far[from]);) ++to;
      work.push_back({b, from, to - from});
    }
  }
  const double all = double(call.batch) * call.group * n * (2 * d) * (call.top * call.block + 2 * call.blocks.count);
  const Size threads = std::max<Size>(1, std::min<Size>(call.threads, Size(std::min(all / WORTH_A_THREAD, 1024.0))));
  const T* k = static_cast<const T*>(call.k);
  if (many && !shared_out(threads, [&](Size thread) {
        for (Size b = 0; b < call.batch; ++b) {
          const Size from = m * thread / threads, to = m * (thread + 1) / threads;
          turn(k + b * call.k_batch + from * d, d, to - from, d, turned + b * d * turned_row + from, turned_row);
        }
      }))
    return false;
  std::atomic<Size> next{Size(work.size())};  // the last, which sees most, first
  return shared_out(threads, [&](Size) {
    Multipole<T> tile(call, many ? turned + 0 : nullptr, turned_row);
    for (Size i; (i = --next) >= 0;) tile(work[i].b, work[i].from, work[i].count);
  });
}

}  // namespace subquad::SUBQUAD_ISA
