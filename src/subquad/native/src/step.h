// One token: add its key to the sums, and answer its queries. The inner loop of decoding.
//
//   S[e][:] = fade S[e][:] + v[e] phi(k),    o[e] = S[e][:].phi(q)
//
// S is (e + 1, r), so each row is one long vector that is loaded and stored once, while the features of the key and the
// query stay in the first-level cache. In place if `after` is `before`. If r is not a whole number of vectors, the last
// vector of a row overlaps the previous one: it is loaded before that one is stored, and its overlapping lanes do not
// count in products.
#pragma once

#include "maps.h"
#include "scan.h"

namespace subquad::SUBQUAD_ISA {

template <class T> class Step {
 public:
  explicit Step(const Shape& s)  // a chunk is the key and the queries of a group
      : s(s), call(s.call), rows(call.values + 1),
        row(padded<T>(std::max(call.query_width, call.key_width + call.tilted))),
        wide(padded<T>(s.features) + lanes<T>), source(s), tokens(s.chunk * row), value(padded<T>(rows)),
        features(s.chunk * wide), lasts(s.chunk * lanes<T>), poison(s.chunk + 1) {}

  void operator()(Size b) {
    const Size group = call.group;
    std::fill(poison + 0, poison + s.chunk + 1, T(0));
    take(call.k, b, 0, call.key_width, T(call.key_scale), tokens, poison);
    align(call, b, 2, tokens + 0, row, 1);
    for (Size g = 0; g < group; ++g)
      take(call.q, b, g, call.query_width, T(call.query_scale), tokens + (1 + g) * row, poison + 1 + g);
    align(call, b, 0, tokens + row, row, group);
    take(call.v, b, 0, call.values, T(1), value, poison + s.chunk);
    value[call.values] = 1;
    source.take(tokens, row, 1);
    for (Size p = 0; p < s.panels; ++p) {
      const T* panel = source.panel(p);
      for (Size t = 0; t <= group; ++t)
        std::copy(panel + t * source.panel_stride(), panel + t * source.panel_stride() + s.count(p),
                  features + t * wide + s.first(p));
    }
    const Size whole = s.features / lanes<T> * lanes<T>, shared = lanes<T> - (s.features - whole);
    for (Size g = 0; g < group && last() >= 0; ++g)
      for (Size i = 0; i < lanes<T>; ++i)
        lasts[g * lanes<T> + i] = i < shared ? T(0) : features[(1 + g) * wide + last() + i];
    T* key = features;
    if (s.series)
      for (Size f = 0; f < s.features; ++f) key[f] *= static_cast<const T*>(call.table)[f];

    T fade = 1, own = 1;
    if (s.scaled) {
      const T before = static_cast<const T*>(call.before_scale)[b], now = std::max(before, source.log_scale[0]);
      fade = raised(before, now);
      own = raised(source.log_scale[0], now);
      static_cast<T*>(call.after_scale)[b] = now;
    }
    const T seen = static_cast<const T*>(call.before_poison)[b] + (1 + poison[0] + poison[s.chunk]);
    static_cast<T*>(call.after_poison)[b] = seen;
    for (Size g = 0; g < group; ++g) static_cast<T*>(call.poison)[b * group + g] = row_poison(seen, poison[1 + g]);

    const T* before = static_cast<const T*>(call.before) + b * rows * s.features;
    T* after = static_cast<T*>(call.after) + b * rows * s.features;
    T* output = static_cast<T*>(call.output) + b * group * call.values;
    T* normalizer = static_cast<T*>(call.normalizer) + b * group;
    for (Size e = 0; e < rows; ++e) {
      const T first = advance(before + e * s.features, after + e * s.features, key, fade, own * value[e]);
      for (Size g = 0; g < group; ++g) {
        const T total = g == 0 ? first : dot(after + e * s.features, g);
        (e == call.values ? normalizer[g] : output[g * call.values + e]) = total;
      }
    }
    for (Size g = 0; call.normalized && g < group; ++g) {
      const T inverse = normalizer[g] == 0 ? T(0) : 1 / normalizer[g];
      for (Size e = 0; e < call.values; ++e) output[g * call.values + e] *= inverse;
    }
  }

 private:
  const Shape& s;
  const SubquadCall& call;
  const Size rows, row, wide;
  Source<T> source;
  Buffer<T> tokens, value, features, lasts, poison;

  void take(const SubquadTensor& from, Size b, Size g, Size width, T scale, T* to, T* found) {
    read_rows(from, b, g, 0, 1, width, scale, to, row);
    clean(to, row, 1, width, found);
  }

  // The start of the last vector of a row; negative if a row is shorter than a vector.
  Size last() const { return s.features - lanes<T>; }

  // Update a row of the sums, and return its product with the first query.
  T advance(const T* before, T* after, const T* key, T fade, T factor) const {
    const T* query = features + wide;
    if (last() < 0) {
      for (Size f = 0; f < s.features; ++f) after[f] = before[f] * fade + key[f] * factor;
      return dot(after, 0);
    }
    const vec<T> end = load(before + last()) * fade + load(key + last()) * factor;
    vec<T> sums[4] = {};
    const auto next = [&](Size f, vec<T>& total) {
      const vec<T> now = load(before + f) * fade + load(key + f) * factor;
      store(after + f, now);
      total += now * load(query + f);
    };
    Size f = 0;
    for (; f + 4 * lanes<T> <= s.features; f += 4 * lanes<T>)
      for (int i = 0; i < 4; ++i) next(f + i * lanes<T>, sums[i]);
    for (; f + lanes<T> <= s.features; f += lanes<T>) next(f, sums[0]);
    if (f < s.features) {
      store(after + last(), end);
      sums[1] += end * load(lasts + 0);
    }
    return sum<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  T dot(const T* row, Size g) const {
    const T* query = features + (1 + g) * wide;
    T total = 0;
    if (last() < 0) {
      for (Size f = 0; f < s.features; ++f) total += row[f] * query[f];
      return total;
    }
    vec<T> sums[4] = {};
    Size f = 0;
    for (; f + 4 * lanes<T> <= s.features; f += 4 * lanes<T>)
      for (int i = 0; i < 4; ++i) sums[i] += load(row + f + i * lanes<T>) * load(query + f + i * lanes<T>);
    for (; f + lanes<T> <= s.features; f += lanes<T>) sums[0] += load(row + f) * load(query + f);
    if (f < s.features) sums[1] += load(row + last()) * load(lasts + g * lanes<T>);
    return sum<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
};

}  // namespace subquad::SUBQUAD_ISA
