// Exact softmax over the pairs that are seen, one tile of queries at a time.
//
//   out_i = sum_j exp(x_ij - l_i) v_j,   l_i = ln(exp(a) + sum_j exp(x_ij)),   a the logit of a learned sink, if any
//
// A block of 6 rows meets only the panels of keys between the first and the last key that one of them sees. Keys are
// packed in strips, whose borders are fixed places in the sequence; a row carries its sums from strip to strip. So the
// bits of a row depend neither on the rows beside it nor on keys that it does not see.
#pragma once

#include <atomic>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "parallel.h"
#include "seen.h"
#include "tensor.h"

namespace subquad::SUBQUAD_ISA {

constexpr Size STRIP = 512;   // keys
constexpr Size FEW_ROWS = 4;  // of a call that is computed without panels

struct SparseTask {
  Size b, g, from, to;  // tokens [from, to) of a head
};

// Tiles of `count` tokens, which do not cross the borders of blocks.
inline std::vector<SparseTask> sparse_tasks(const SubquadSparse& call, Size heads, Size count, Size block) {
  std::vector<SparseTask> tasks;
  for (Size b = 0; b < call.batch; ++b)
    for (Size g = 0; g < heads; ++g)
      for (Size from = 0, to; from < count; from = to) {
        to = std::min(from + Seen::TILE, count);
        if (call.layout) to = std::min(to, (from / block + 1) * block);
        tasks.push_back({b, g, from, to});
      }
  return tasks;
}

// Call body(range) for the parts of the ranges that lie in one strip each.
template <class Body> void for_each_strip(const std::vector<Range>& ranges, Body body) {
  for (const Range& range : ranges)
    for (Size from = range.from, to; from < range.to; from = to) {
      to = std::min(range.to, (from / STRIP + 1) * STRIP);
      body(Range{from, to});
    }
}

// The tokens that a strip, or a tile, of at most `count` tokens can hold; a tile may begin inside a panel.
inline Size strip_size(Size count) { return std::min(STRIP, panel_ceil(count)); }
inline Size tile_size(Size count) { return std::min(Seen::TILE, count) + PANEL; }

inline bool is_hidden(const SubquadSparse& call, Size b, Size j) {
  return call.keep && !call.keep[b * call.keep_batch + j];
}

// Set the logits of hidden keys to -infinity, whatever they are.
template <class T> void hide_keys(const SubquadSparse& call, Size b, Size begin, Size end, T* logits) {
  for (Size j = begin; call.keep && j < std::min<Size>(end, call.keys); ++j)
    if (is_hidden(call, b, j)) logits[j - begin] = -INFINITY;
}

template <class T> class SparseForward {
 public:
  explicit SparseForward(const SubquadSparse& call)
      : call(call), seen(call), keys(call.width, strip_size(call.keys)), values(call.values, strip_size(call.keys)),
        queries(call.width, tile_size(call.queries)), answers(tile_size(call.queries) * values.row),
        logits(ROWS_PER_BLOCK * STRIP), totals(tile_size(call.queries) * PANEL) {}

  void operator()(const SparseTask& given) {
    task = given;
    seen.look_at(task.b, task.g);
    queries.read(call.q, task.b, task.g, {task.from, task.to}, call.queries, T(call.scale));
    start();
    seen.find_keys(task.from, task.to, ranges);
    for_each_strip(ranges, [&](Range range) {
      read_keys(range);
      for (Size i = task.from; i < task.to; i += ROWS_PER_BLOCK) meet(i, std::min(i + ROWS_PER_BLOCK, task.to), range);
    });
    write();
  }

 private:
  const SubquadSparse& call;
  SparseTask task{};
  Seen seen;
  PackedTokens<T> keys, values, queries;
  Buffer<T> answers, logits, totals;
  T level[Seen::TILE], poison[Seen::TILE];
  bool sees_keys[Seen::TILE];
  std::vector<Range> ranges;

  void start() {
    const Size rows = task.to - task.from;
    const Size head = (task.b % call.key_heads) * call.group + task.g;
    const T* sinks = static_cast<const T*>(call.sinks);
    std::fill(answers + 0, answers + rows * values.row, T(0));
    std::fill(totals + 0, totals + rows * PANEL, T(0));
    for (Size r = 0; r < rows; ++r) {
      level[r] = sinks ? sinks[head] : T(-INFINITY);
      totals[r * PANEL] = level[r] > T(-INFINITY) ? T(1) : T(0);
      poison[r] = queries.poison_of(task.from + r);
      sees_keys[r] = false;
    }
  }

  void read_keys(Range range) {
    keys.read(call.k, task.b, 0, range, call.keys, T(1));
    if (!has_few_rows()) keys.pack();
    values.read(call.v, task.b, 0, range, call.keys, T(1));
  }

  // Add the keys of a strip to rows [from, to).
  void meet(Size from, Size to, Range range) {
    const Range hull = seen.hull(from, to, range);
    if (hull.is_empty()) return;
    const Size begin = panel_floor(hull.from), end = panel_ceil(hull.to), columns = end - begin, count = to - from;
    const Size row = keys.row;
    if (has_few_rows())
      for (Size r = 0; r < count; ++r)
        row_logits(queries.row_of(from + r), keys.row_of(begin), columns, logits + r * STRIP);
    else
      panel_logits<T>(count, columns / PANEL, call.width, queries.row_of(from), row, keys.panel_of(begin),
                      call.width * PANEL, logits, STRIP);
    for (Size r = 0; r < count; ++r) {
      T* x = logits + r * STRIP;
      if (call.softcap > 0) cap_logits<T>(x, columns, T(call.softcap));
      seen.hide(from + r, begin, end, range, x);
      hide_keys<T>(call, task.b, begin, end, x);
      if (keys.is_poisoned || values.is_poisoned) find_poison(from + r, hull);
      weigh(from + r - task.from, x, columns);
    }
    add_product<T>(count, values.row, columns, {logits, STRIP, 1}, values.row_of(begin), values.row,
                   answers + (from - task.from) * values.row, values.row);
  }

  // A decoding step has too few rows to pay for the panels of its keys.
  bool has_few_rows() const { return call.queries < FEW_ROWS; }

  void row_logits(const T* query, const T* rows, Size count, T* to) const {
    for (Size j = 0; j < count; ++j) {
      vec<T> total{};
      for (Size i = 0; i < keys.row; i += lanes<T>) total += load(query + i) * load(rows + j * keys.row + i);
      to[j] = sum<T>(total);
    }
  }

  void find_poison(Size i, Range keys_seen) {
    for (Size j = keys_seen.from; j < keys_seen.to; ++j)
      if (seen.sees(i, j) && !is_hidden(call, task.b, j))
        poison[i - task.from] += keys.poison_of(j) + values.poison_of(j);
  }

  // Replace the logits of row r by weights relative to its level, which rises if need be.
  void weigh(Size r, T* x, Size columns) {
    vec<T> most = load(x);
    for (Size j = lanes<T>; j < columns; j += lanes<T>) most = larger<T>(most, load(x + j));
    const T highest = largest<T>(most);
    sees_keys[r] = sees_keys[r] || highest > T(-INFINITY);
    T* total = totals + r * PANEL;
    if (highest > level[r]) {
      if (level[r] > T(-INFINITY)) {
        const vec<T> factor = exp(all<T>(level[r] - highest));
        for (Size j = 0; j < PANEL; j += lanes<T>) store(total + j, load(total + j) * factor);
        T* answer = answers + r * values.row;
        for (Size j = 0; j < values.row; j += lanes<T>) store(answer + j, load(answer + j) * factor);
      }
      level[r] = highest;
    }
    const T base = level[r] == T(-INFINITY) ? T(0) : level[r];
    for (Size j = 0; j < columns; j += lanes<T>) {
      const vec<T> w = exp(load(x + j) - base);
      store(x + j, w);
      store(total + j % PANEL, load(total + j % PANEL) + w);
    }
  }

  void write() {
    const Size first = (task.b * call.group + task.g) * call.queries + task.from;
    T *output = static_cast<T*>(call.output) + first * call.values, *levels = static_cast<T*>(call.level) + first;
    for (Size r = 0; r < task.to - task.from; ++r) {
      T total = 0;
      for (Size j = 0; j < PANEL; j += lanes<T>) total += sum<T>(load(totals + r * PANEL + j));
      const T inverse = total > 0 ? 1 / total : total == 0 ? T(0) : T(NAN);
      for (Size i = 0; i < call.values; ++i) output[r * call.values + i] = answers[r * values.row + i] * inverse;
      levels[r] = total == 0 ? T(INFINITY) : level[r] + std::log(total);
      static_cast<T*>(call.poison)[first + r] = sees_keys[r] ? poison[r] : T(0);
    }
  }
};

// Multiply-adds of the pairs between the first and the last key that each row sees.
inline double sparse_work(const SubquadSparse& call) {
  double pairs = 0;
  for (Size i = 0; i < call.queries; ++i)
    pairs += call.bounds[call.queries + i] - call.bounds[i] + call.bounds[3 * call.queries + i] -
             call.bounds[2 * call.queries + i];
  return pairs * double(call.batch) * call.group * double(call.width + call.values);
}

inline Size sparse_threads(const SubquadSparse& call, Size tasks) {
  const double busy = std::min(sparse_work(call) / MIN_WORK_PER_THREAD, 1024.0);
  return std::max<Size>(1, std::min<Size>({Size(call.threads), tasks, Size(busy)}));
}

// Each free thread takes the next task: what a task computes does not depend on the thread.
template <class Worker, class Call> bool share_tasks(const Call& call, const std::vector<SparseTask>& tasks) {
  if (tasks.empty()) return true;
  std::atomic<Size> next{0};
  return in_parallel(sparse_threads(call, tasks.size()), [&](Size) {
    Worker work(call);
    for (Size i; (i = next++) < Size(tasks.size());) work(tasks[i]);
  });
}

template <class T> bool sparse_forward(const SubquadSparse& call) {
  return share_tasks<SparseForward<T>>(call, sparse_tasks(call, call.group, call.queries, call.query_block));
}

}  // namespace subquad::SUBQUAD_ISA
