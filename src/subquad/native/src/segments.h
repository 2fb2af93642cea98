// Finish a segment: sort its keys so that similar keys are in the same block, and describe the blocks.
//
// Bisection: take the main direction of the keys around their mean (a few power iterations), put the lower half of the
// projections before the upper half, and repeat in both halves, until blocks are left. The halves keep the order in
// time, so only the set of keys in a block depends on rounding. Nothing but the segment's own keys matters.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#include "buffer.h"
#include "panels.h"
#include "parallel.h"

namespace subquad::SUBQUAD_ISA {

template <class T> class SegmentMaker {
 public:
  explicit SegmentMaker(const SubquadSegments& call)
      : call(call), record(Record::of<T>(call.width, call.values, call.block)), d(call.width), row(padded<T>(d)),
        size(FAN * call.block), keys(size * row), offsets(size * row), mean(row), direction(row), places(size),
        order(size), index(size), halves(size) {}

  // Segment s of head b, whose keys begin at panel `from` of the raw keys.
  void operator()(Size b, Size s, Size from) {
    const T* panels = static_cast<const T*>(call.raw_keys) + (b * call.raw_panels + from) * d * PANEL;
    const T* values = static_cast<const T*>(call.raw_values) + (b * call.raw_panels + from) * PANEL * call.values;
    for (Size t = 0; t < size; ++t)
      for (Size i = 0; i < d; ++i) keys[t * row + i] = panels[(t / PANEL * d + i) * PANEL + t % PANEL];
    for (Size t = 0; t < size; ++t) index[t] = t;
    bisect(0, size);
    T* to = reinterpret_cast<T*>(call.table[2 * s]) + b * call.table[2 * s + 1];
    std::fill(to, to + record.size, T(0));
    T* root = static_cast<T*>(call.roots) + (b * call.root_count + s / FAN) * record.header;
    for (Size i = 0; i < FAN; ++i) write_block(i, values, to);
    describe(index.data(), size, values, root, s % FAN);
    if (call.order)
      for (Size t = 0; t < size; ++t) call.order[(b * call.segments + s) * size + t] = int32_t(index[t]);
  }

 private:
  const SubquadSegments& call;
  const Record record;
  const Size d, row, size;
  Buffer<T> keys, offsets, mean, direction;
  std::vector<T> places;
  std::vector<Size> order, index, halves;

  void average(const Size* chosen, Size count) {
    std::fill(mean + 0, mean + row, T(0));
    for (Size t = 0; t < count; ++t)
      for (Size i = 0; i < row; i += lanes<T>) store(mean + i, load(mean + i) + load(keys + chosen[t] * row + i));
    for (Size i = 0; i < row; ++i) mean[i] /= T(count);
  }

  static void add_scaled(T* to, const T* x, T factor, Size row) {
    for (Size i = 0; i < row; i += lanes<T>) store(to + i, load(to + i) + factor * load(x + i));
  }

  static T dot(const T* a, const T* b, Size row) {
    vec<T> total{};
    for (Size i = 0; i < row; i += lanes<T>) total += load(a + i) * load(b + i);
    return sum<T>(total);
  }

  void normalize() {
    const T norm = std::sqrt(dot(direction, direction, row)), inverse = 1 / std::max(norm, T(1e-20));
    for (Size i = 0; i < row; ++i) direction[i] = finite(direction[i] * inverse);
  }

  // Project the offsets of the keys in [begin, begin + count) on their main direction.
  void project(Size begin, Size count) {
    const Size* chosen = index.data() + begin;
    average(chosen, count);
    std::fill(direction + 0, direction + row, T(0));
    for (Size t = 0; t < count; ++t) {
      T* x = offsets + t * row;
      for (Size i = 0; i < row; i += lanes<T>) store(x + i, load(keys + chosen[t] * row + i) - load(mean + i));
      add_scaled(direction, x, t % 2 ? T(-1) : T(1), row);
    }
    normalize();
    Buffer<T>& next = mean;  // no longer needed
    for (int round = 0; round < SUBQUAD_ROUNDS; ++round) {
      std::fill(next + 0, next + row, T(0));
      for (Size t = 0; t < count; ++t) add_scaled(next, offsets + t * row, dot(offsets + t * row, direction, row), row);
      std::copy(next + 0, next + row, direction + 0);
      normalize();
    }
    for (Size t = 0; t < count; ++t) places[t] = finite(dot(offsets + t * row, direction, row));
  }

  void bisect(Size begin, Size count) {
    if (count <= call.block) return;
    project(begin, count);
    const Size half = count / 2;
    for (Size t = 0; t < count; ++t) order[t] = t;
    std::nth_element(order.begin(), order.begin() + half, order.begin() + count,
                     [this](Size a, Size b) { return places[a] < places[b] || (places[a] == places[b] && a < b); });
    std::sort(order.begin(), order.begin() + half);
    std::sort(order.begin() + half, order.begin() + count);
    for (Size t = 0; t < count; ++t) halves[t] = index[begin + order[t]];
    std::copy(halves.begin(), halves.begin() + count, index.begin() + begin);
    bisect(begin, half);
    bisect(begin + half, half);
  }

  // Write center, mean value and radius of some keys into one column of a header. Overflows become 0: an infinity
  // would be NaN in the rows that do not see these keys.
  void describe(const Size* chosen, Size count, const T* values, T* header, Size column) {
    average(chosen, count);
    for (Size i = 0; i < row; ++i) mean[i] = finite(mean[i]);
    T squares = 0;
    for (Size t = 0; t < count; ++t) {
      const T* k = keys + chosen[t] * row;
      vec<T> total{};
      for (Size i = 0; i < row; i += lanes<T>) {
        const vec<T> x = load(k + i) - load(mean + i);
        total += x * x;
      }
      squares += sum<T>(total);
    }
    header[record.radius + column] = std::sqrt(finite(squares / T(count * d)));
    for (Size i = 0; i < d; ++i) header[i * FAN + column] = mean[i];
    T* u = header + record.means + column * record.e;
    std::fill(u, u + record.e, T(0));
    for (Size t = 0; t < count; ++t)
      for (Size j = 0; j < record.e; ++j) u[j] += values[chosen[t] * record.e + j];
    for (Size j = 0; j < record.e; ++j) u[j] = finite(u[j] / T(count));
  }

  void write_block(Size i, const T* values, T* to) {
    const Size* chosen = index.data() + i * call.block;
    describe(chosen, call.block, values, to, i);  // leaves the center in `mean`
    T *panel = to + record.keys + i * d * PANEL, *bias = to + record.bias + i * PANEL, largest = 0;
    for (Size t = 0; t < call.block; ++t) {
      const T* k = keys + chosen[t] * row;
      for (Size j = 0; j < d; ++j) {
        panel[j * PANEL + t] = k[j];
        largest = std::max(largest, std::abs(k[j] - mean[j]));
      }
      std::copy(values + chosen[t] * record.e, values + (chosen[t] + 1) * record.e,
                to + record.values + (i * call.block + t) * record.e);
    }
    const T scale = finite(largest / 127), inverse = scale > 0 ? 1 / scale : T(0);
    to[record.scale + i] = scale;
    int8_t* look = reinterpret_cast<int8_t*>(to + record.look) + i * Record::look_bytes(d);
    for (Size t = 0; t < call.block; ++t) {
      int32_t total = 0;
      for (Size j = 0; j < d; ++j) {
        const int8_t x = int8_t(rounded(finite((keys[chosen[t] * row + j] - mean[j]) * inverse)));
        look[(j / 4 * PANEL + t) * 4 + j % 4] = x;
        total += x;
      }
      bias[t] = T(128 * total);  // The query's bytes are unsigned: 128 too large.
    }
  }
};

// Each head b finishes the segments [first[b], last[b]).
template <class T> bool finish_segments(const SubquadSegments& call) {
  std::vector<std::pair<Size, Size>> tasks;
  for (Size b = 0; b < call.batch; ++b)
    for (Size s = call.first[b]; s < call.last[b]; ++s) tasks.push_back({b, s});
  const Size threads = std::max<Size>(1, std::min<Size>(call.threads, Size(tasks.size())));
  std::atomic<Size> next{0};
  return in_parallel(threads, [&](Size) {
    SegmentMaker<T> make(call);
    for (Size i; (i = next++) < Size(tasks.size());) {
      const auto [b, s] = tasks[i];
      make(b, s, (s - call.base[b]) * call.block);
    }
  });
}

}  // namespace subquad::SUBQUAD_ISA
