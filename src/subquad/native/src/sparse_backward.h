// The gradients of sparse attention, in two passes that both compute the weights again:
//
//   p_ij = exp(x_ij - l_i),   s_ij = p_ij (do_i.v_j - do_i.out_i + dl_i)
//   by tiles of queries    dq_i = sum_j s_ij k_j
//   by tiles of keys       dk_j = sum_i s_ij q_i,   dv_j = sum_i p_ij do_i
//
// A tile owns its gradients, so no sums are shared between threads. With soft-capping, s_ij has one more factor:
// 1 - (x / softcap)^2.
#pragma once

#include <cmath>
#include <numeric>

#include "sparse.h"

namespace subquad::SUBQUAD_ISA {

template <class T> vec<T> slope_of_cap(vec<T> capped, T softcap) {
  const vec<T> t = capped / softcap;
  return T(1) - t * t;
}

// exp(x - level), and 0 for a pair that is not seen, whatever the level is.
template <class T> vec<T> weight(vec<T> x, vec<T> level) { return x > T(-INFINITY) ? share(x - level) : vec<T>{}; }

// The pass by queries; it also writes delta_i = do_i.out_i - dl_i for the other one.
template <class T> class SparseQueryGradient {
 public:
  explicit SparseQueryGradient(const SubquadSparse& call)
      : call(call), seen(call), keys(call.width, strip_size(call.keys)), values(call.values, strip_size(call.keys)),
        queries(call.width, tile_size(call.queries)), grads(call.values, tile_size(call.queries)),
        weights(ROWS_PER_BLOCK * STRIP), slopes(ROWS_PER_BLOCK * STRIP), moves(Seen::TILE * keys.row) {}

  void operator()(const SparseTask& given) {
    task = given;
    seen.look_at(task.b, task.g);
    const Range rows{task.from, task.to};
    queries.read(call.q, task.b, task.g, rows, call.queries, T(call.scale));
    grads.read(call.output_grad, task.b, task.g, rows, call.queries, T(1), true);
    first = (task.b * call.group + task.g) * call.queries;
    find_deltas();
    if (!call.q_grad) return;
    std::fill(moves + 0, moves + (task.to - task.from) * keys.row, T(0));
    seen.find_keys(task.from, task.to, ranges);
    for_each_strip(ranges, [&](Range range) {
      keys.read(call.k, task.b, 0, range, call.keys, T(1));
      keys.pack();
      values.read(call.v, task.b, 0, range, call.keys, T(1));
      values.pack();
      for (Size i = task.from; i < task.to; i += ROWS_PER_BLOCK) meet(i, std::min(i + ROWS_PER_BLOCK, task.to), range);
    });
    T* to = static_cast<T*>(call.q_grad) + (first + task.from) * call.width;
    for (Size r = 0; r < task.to - task.from; ++r)
      for (Size i = 0; i < call.width; ++i) to[r * call.width + i] = moves[r * keys.row + i] * T(call.scale);
  }

 private:
  const SubquadSparse& call;
  SparseTask task{};
  Size first = 0;  // place of the head's first query in (b, g, n)
  Seen seen;
  PackedTokens<T> keys, values, queries, grads;
  Buffer<T> weights, slopes, moves;
  std::vector<Range> ranges;

  void find_deltas() {
    for (Size i = task.from; i < task.to; ++i) {
      const T *output = static_cast<const T*>(call.output) + (first + i) * call.values, *grad = grads.row_of(i);
      T parts[PANEL] = {};
      for (Size j = 0; j < call.values; ++j) parts[j % PANEL] += output[j] * grad[j];
      const T level_grad = call.level_grad ? static_cast<const T*>(call.level_grad)[first + i] : T(0);
      static_cast<T*>(call.delta)[first + i] = std::accumulate(parts, parts + PANEL, T(0)) - level_grad;
    }
  }

  void meet(Size from, Size to, Range range) {
    const Range hull = seen.hull(from, to, range);
    if (hull.is_empty()) return;
    const Size begin = panel_floor(hull.from), end = panel_ceil(hull.to), columns = end - begin, count = to - from;
    panel_logits<T>(count, columns / PANEL, call.width, queries.row_of(from), queries.row, keys.panel_of(begin),
                    call.width * PANEL, weights, STRIP);
    panel_logits<T>(count, columns / PANEL, call.values, grads.row_of(from), grads.row, values.panel_of(begin),
                    call.values * PANEL, slopes, STRIP);
    for (Size r = 0; r < count; ++r)
      differentiate(from + r, begin, end, range, weights + r * STRIP, slopes + r * STRIP);
    add_product<T>(count, keys.row, columns, {slopes, STRIP, 1}, keys.row_of(begin), keys.row,
                   moves + (from - task.from) * keys.row, keys.row);
  }

  void differentiate(Size i, Size begin, Size end, Range range, T* x, T* slope) const {
    const T level = static_cast<const T*>(call.level)[first + i], delta = static_cast<const T*>(call.delta)[first + i];
    const T softcap = T(call.softcap);
    if (softcap > 0) {
      cap_logits<T>(x, end - begin, softcap);
      for (Size j = 0; j < end - begin; j += lanes<T>)
        store(slope + j, (load(slope + j) - delta) * slope_of_cap<T>(load(x + j), softcap));
    } else {
      for (Size j = 0; j < end - begin; j += lanes<T>) store(slope + j, load(slope + j) - delta);
    }
    seen.hide(i, begin, end, range, x);
    hide_keys<T>(call, task.b, begin, end, x);
    for (Size j = 0; j < end - begin; j += lanes<T>) {
      const vec<T> p = weight<T>(load(x + j), all<T>(level));
      store(slope + j, p == T(0) ? vec<T>{} : p * load(slope + j));
    }
  }
};

// The pass by keys: rows are keys, columns are queries.
template <class T> class SparseKeyGradient {
 public:
  explicit SparseKeyGradient(const SubquadSparse& call)
      : call(call), seen(call), keys(call.width, tile_size(call.keys)), values(call.values, tile_size(call.keys)),
        queries(call.width, strip_size(call.queries)), grads(call.values, strip_size(call.queries)),
        weights(ROWS_PER_BLOCK * STRIP), slopes(ROWS_PER_BLOCK * STRIP), key_moves(Seen::TILE * keys.row),
        value_moves(Seen::TILE * values.row), levels(STRIP), deltas(STRIP) {}

  void operator()(const SparseTask& given) {
    task = given;
    keys.read(call.k, task.b, 0, {task.from, task.to}, call.keys, T(1));
    values.read(call.v, task.b, 0, {task.from, task.to}, call.keys, T(1));
    std::fill(key_moves + 0, key_moves + Seen::TILE * keys.row, T(0));
    std::fill(value_moves + 0, value_moves + Seen::TILE * values.row, T(0));
    for (Size g = 0; g < call.group; ++g) {
      seen.look_at(task.b, g);
      seen.find_rows(task.from, task.to, ranges);
      for_each_strip(ranges, [&](Range range) {
        read_queries(g, range);
        for (Size j = task.from; j < task.to; j += ROWS_PER_BLOCK)
          meet(j, std::min(j + ROWS_PER_BLOCK, task.to), range);
      });
    }
    write(call.k_grad, key_moves, keys.row, call.width);
    write(call.v_grad, value_moves, values.row, call.values);
  }

 private:
  const SubquadSparse& call;
  SparseTask task{};
  Seen seen;
  PackedTokens<T> keys, values, queries, grads;
  Buffer<T> weights, slopes, key_moves, value_moves;
  Buffer<T> levels, deltas;  // of the queries of a strip
  std::vector<Range> ranges;

  struct PanelBounds {
    Hulls hulls;   // keys that some query of the panel sees
    Range common;  // keys near all 16 queries
  };
  PanelBounds bounds[STRIP / PANEL];

  void read_queries(Size g, Range range) {
    queries.read(call.q, task.b, g, range, call.queries, T(call.scale));
    queries.pack();
    grads.read(call.output_grad, task.b, g, range, call.queries, T(1), true);
    grads.pack();
    const Size first = (task.b * call.group + g) * call.queries, base = panel_floor(range.from);
    for (Size begin = base; begin < panel_ceil(range.to); begin += PANEL) {
      PanelBounds& own = bounds[(begin - base) / PANEL] = {{}, {0, call.keys}};
      for (Size i = begin; i < begin + PANEL; ++i) {
        const bool is_query = i >= range.from && i < range.to;  // Others have no weight.
        levels[i - base] = is_query ? static_cast<const T*>(call.level)[first + i] : T(INFINITY);
        deltas[i - base] = is_query ? static_cast<const T*>(call.delta)[first + i] : T(0);
        own.common = own.common.inside(is_query ? seen.near_of(i) : Range{0, 0});
      }
      own.hulls = seen.hulls_of(std::max(begin, range.from), std::min(begin + PANEL, range.to));
    }
  }

  // Add the queries of a strip to keys [from, to).
  void meet(Size from, Size to, Range range) {
    const Size base = panel_floor(range.from), panels = (panel_ceil(range.to) - base) / PANEL, count = to - from;
    Size first = 0, last = panels;
    while (first < last && !bounds[first].hulls.meet({from, to})) ++first;
    while (first < last && !bounds[last - 1].hulls.meet({from, to})) --last;
    if (first == last) return;
    const Size begin = base + first * PANEL, columns = (last - first) * PANEL;
    panel_logits<T>(count, last - first, call.width, keys.row_of(from), keys.row, queries.panel_of(begin),
                    call.width * PANEL, weights, STRIP);
    panel_logits<T>(count, last - first, call.values, values.row_of(from), values.row, grads.panel_of(begin),
                    call.values * PANEL, slopes, STRIP);
    for (Size r = 0; r < count; ++r) {
      T *x = weights + r * STRIP, *slope = slopes + r * STRIP;
      if (call.softcap > 0) cap_logits<T>(x, columns, T(call.softcap));
      if (is_hidden(call, task.b, from + r)) {
        std::fill(x, x + columns, T(0));
        std::fill(slope, slope + columns, T(0));
        continue;
      }
      for (Size p = first; p < last; ++p)
        differentiate(from + r, base + p * PANEL, range, bounds[p], p * PANEL, x + (p - first) * PANEL,
                      slope + (p - first) * PANEL);
    }
    add_product<T>(count, keys.row, columns, {slopes, STRIP, 1}, queries.row_of(begin), queries.row,
                   key_moves + (from - task.from) * keys.row, keys.row);
    add_product<T>(count, values.row, columns, {weights, STRIP, 1}, grads.row_of(begin), grads.row,
                   value_moves + (from - task.from) * values.row, values.row);
  }

  // Key j with the 16 queries from `begin` on.
  void differentiate(Size j, Size begin, Range range, const PanelBounds& own, Size place, T* x, T* slope) const {
    if (!(own.common.from <= j && j < own.common.to))
      for (Size i = 0; i < PANEL; ++i)
        if (begin + i >= range.to || begin + i < range.from || !seen.sees(begin + i, j)) x[i] = -INFINITY;
    for (Size i = 0; i < PANEL; i += lanes<T>) {
      const vec<T> logits = load(x + i), p = weight<T>(logits, load(levels + place + i));
      vec<T> s = load(slope + i) - load(deltas + place + i);
      if (call.softcap > 0) s *= slope_of_cap<T>(logits, T(call.softcap));
      store(x + i, p);
      store(slope + i, p == T(0) ? vec<T>{} : p * s);
    }
  }

  void write(void* grad, const T* moves, Size row, Size width) const {
    T* to = static_cast<T*>(grad) + (task.b * call.keys + task.from) * width;
    for (Size r = 0; r < task.to - task.from; ++r) std::copy(moves + r * row, moves + r * row + width, to + r * width);
  }
};

template <class T> bool sparse_backward(const SubquadSparse& call) {
  return share_tasks<SparseQueryGradient<T>>(call, sparse_tasks(call, call.group, call.queries, call.query_block)) &&
         (!call.k_grad || share_tasks<SparseKeyGradient<T>>(call, sparse_tasks(call, 1, call.keys, call.key_block)));
}

}  // namespace subquad::SUBQUAD_ISA
