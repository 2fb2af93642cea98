// Read and write the tokens of a head: clean and mask them as they are read, normalize outputs as they are written.
#pragma once

#include <algorithm>
#include <cmath>

#include "buffer.h"
#include "tensor.h"

namespace subquad::SUBQUAD_ISA {

// exp(scale - level), where level is the largest scale; 0 if scale is -inf, the log-scale of no keys. The passes of the
// backward round scales differently: of huge ones, the difference may be far above 0.
template <class T> T raised(T scale, T level) {
  const T exponent = scale - level;
  return scale == T(-INFINITY) ? T(0) : std::exp(exponent > 0 ? T(0) : exponent);
}

// One of the coordinates of head b: 0 and 1 for queries, 2 and 3 for keys, 4 the tilt; null if there are none.
template <class T> const T* coordinate(const SubquadCall& call, Size b, Size which) {
  if (!call.coordinates) return nullptr;
  return static_cast<const T*>(call.coordinates) + (b % call.heads * 5 + which) * call.query_width;
}

// Bring rows of scaled tokens to the coordinates of head b; `which` is 0 for queries and 2 for keys.
template <class T> void align(const SubquadCall& call, Size b, Size which, T* rows, Size row, Size count) {
  if (!call.coordinates) return;
  const T *factor = coordinate<T>(call, b, which), *offset = coordinate<T>(call, b, which + 1);
  const bool tilted = which == 2 && call.tilted;
  const T* tilt = coordinate<T>(call, b, 4);  // its product with a key is the log-scale
  const Size width = call.query_width;
  for (Size t = 0; t < count; ++t) {
    T* x = rows + t * row;
    vec<T> sums{};
    Size i = 0;
    for (; i + lanes<T> <= width; i += lanes<T>) {
      const vec<T> moved = load(x + i) * load(factor + i) + load(offset + i);
      store(x + i, moved);
      sums += moved * load(tilt + i);
    }
    T total = tilted ? sum<T>(sums) : T(0);
    for (; i < width; ++i) {
      x[i] = x[i] * factor[i] + offset[i];
      total += x[i] * tilt[i];
    }
    if (tilted) x[width] = total;
  }
}

template <class T> vec<T> not_above(vec<T> x, T limit) { return x > limit ? all(limit) : x; }

constexpr float MAX_RISE = 20;  // of the tops of a block, up to which exp(c - top) is a product of two factors

// exp(c - top) of the keys and rows of a causal block without an exponential for every pair: c is the log-scale of a
// key, top the largest one that a row sees. Rows far from the first one have `below` 0, and exponentials of their own.
// Which way a row is computed depends on the first row and on its own top, never on later keys.
template <class T> struct PairFactors {
  Buffer<T> above, below;  // exp(c - first top), exp(first top - top)

  explicit PairFactors(Size count) : above(count), below(count) {}

  void find(const T* key_scale, const T* top, Size count) {
    for (Size t = 0; t < count; t += lanes<T>) {
      const vec<T> rise = load(top + t) - top[0];
      store(above + t, exp(not_above<T>(load(key_scale + t) - top[0], T(MAX_RISE))));
      store(below + t, rise > MAX_RISE || rise < -MAX_RISE ? vec<T>{} : exp(-rise));
    }
  }

  // Of a key and several rows, or of several keys and a row; meaningless where the row does not see the key.
  static vec<T> of(vec<T> key_scale, vec<T> above, vec<T> top, vec<T> below) {
    const mask<T> far = below == 0;
    if (!lanes_of<T>(far)) return above * below;
    return far ? exp(not_above<T>(key_scale - top, T(0))) : above * below;
  }
};

// Of a row that sees this number of keys, NaN if one of them is not finite: 0 if it sees none, whatever its query is.
template <class T> T row_poison(T seen, T of_query) { return seen == 0 ? T(0) : seen * T(0) + of_query; }

template <class T> struct Head {
  const SubquadCall& call;
  const Size rows, value_row, token_row;  // the value width plus 1; padded lengths of a value and of a token
  Buffer<T> spare{std::max(token_row, value_row)};

  explicit Head(const SubquadCall& call)
      : call(call), rows(call.values + 1), value_row(padded<T>(rows)),
        token_row(padded<T>(std::max(call.query_width, call.key_width + call.tilted))) {}

  bool hidden(Size b, Size t) const { return call.keep && !call.keep[b * call.keys + t]; }

  // Read rows of keys, and of values followed by a 1; zeros if a key is hidden. Poison is 1 if a key is visible, NaN if
  // it or its value is not finite; 0 if it is hidden.
  void read_keys(Size b, Size first, Size count, T* tokens, T* values, T* poison) const {
    std::fill(poison, poison + count, T(1));
    read_rows(call.k, b, 0, first, count, call.key_width, T(call.key_scale), tokens, token_row);
    clean(tokens, token_row, count, Size(call.key_width), poison);
    align(call, b, 2, tokens, token_row, count);
    read_rows(call.v, b, 0, first, count, call.values, T(1), values, value_row);
    clean(values, value_row, count, Size(call.values), poison);
    for (Size t = 0; t < count; ++t) values[t * value_row + call.values] = 1;
    for (Size t = 0; call.keep && t < count; ++t)
      if (hidden(b, first + t)) {
        std::fill(tokens + t * token_row, tokens + (t + 1) * token_row, T(0));
        std::fill(values + t * value_row, values + (t + 1) * value_row, T(0));
        poison[t] = 0;
      }
  }

  void read_queries(Size b, Size g, Size first, Size count, T* tokens, T* poison) const {
    std::fill(poison, poison + count, T(0));
    read_rows(call.q, b, g, first, count, call.query_width, T(call.query_scale), tokens, token_row);
    clean(tokens, token_row, count, Size(call.query_width), poison);
    align(call, b, 0, tokens, token_row, count);
  }

  // o = N / D:  dN = do / D,  dD = -(do.o) / D
  void read_grads(Size b, Size g, Size first, Size count, T* grads) const {
    read_rows(call.output_grad, b, g, first, count, call.values, T(1), grads, value_row);
    if (!call.normalized) return;
    const Size start = (b * call.group + g) * call.queries + first;
    for (Size t = 0; t < count; ++t) {
      const T* output = static_cast<const T*>(call.output) + (start + t) * call.values;
      const T inverse = inverse_of(static_cast<const T*>(call.normalizer)[start + t]);
      T *grad = grads + t * value_row, total = 0;
      for (Size e = 0; e < call.values; ++e) {
        total += grad[e] * output[e];
        grad[e] *= inverse;
      }
      grad[call.values] = -total * inverse;
    }
  }

  T inverse_of(T normalizer) const { return !call.normalized ? T(1) : normalizer == 0 ? T(0) : 1 / normalizer; }

  // Write outputs and normalizers from answers (rows, c).
  void write_answers(Size b, Size g, Size first, Size count, const T* answers, Size c) const {
    const Size start = (b * call.group + g) * call.queries + first;
    T *output = static_cast<T*>(call.output) + start * call.values,
      *normalizer = static_cast<T*>(call.normalizer) + start;
    for (Size t = 0; t < count; ++t) {
      normalizer[t] = answers[call.values * c + t];
      const T inverse = inverse_of(normalizer[t]);
      for (Size e = 0; e < call.values; ++e) output[t * call.values + e] = answers[e * c + t] * inverse;
    }
  }

  // A row sees all keys before the chunk, and if causal, the keys of the chunk up to it.
  void write_poison(Size b, Size g, Size first, Size count, T seen, const T* of_keys, const T* of_queries) const {
    T* poison = static_cast<T*>(call.poison) + (b * call.group + g) * call.queries + first;
    for (Size t = 0; t < count; ++t) {
      if (of_keys) seen += of_keys[t];
      poison[t] = row_poison(seen, of_queries[t]);
    }
  }

  // The gradient of a key's log-scale c, which multiplies w v by exp(c): v.dv, over the value and the 1 behind it.
  void log_scale_grads(const T* value_columns, const T* value_grads, Size c, T* to) const {
    for (Size t = 0; t < c; t += lanes<T>) {
      vec<T> total{};
      for (Size e = 0; e < rows; ++e) total += load(value_columns + e * c + t) * load(value_grads + e * c + t);
      store(to + t, total);
    }
  }

  // Write columns (width, c) to `to` (count, width); 0 if the token is hidden or the input number is not finite. The
  // factor of coordinates, and the tilt with the row of gradients behind the columns, are null where there are none.
  void write_grads(const SubquadTensor& of, Size b, Size g, Size first, Size count, Size width, T scale,
                   const T* columns, Size c, const T* poison, bool of_keys, T* to, const T* factor = nullptr,
                   const T* tilt = nullptr) const {
    for (Size t = 0; t < count; ++t) {
      T* grad = to + t * width;
      if (of_keys && hidden(b, first + t)) {
        std::fill(grad, grad + width, T(0));
        continue;
      }
      for (Size i = 0; i < width; ++i) grad[i] = columns[i * c + t] * scale;
      for (Size i = 0; tilt && i < width; ++i) grad[i] += tilt[i] * columns[width * c + t] * scale;
      for (Size i = 0; factor && i < width; ++i) grad[i] *= factor[i];
      if (poison[t] == poison[t]) continue;
      read_rows(of, b, g, first + t, 1, width, scale, spare + 0, token_row);
      for (Size i = 0; i < width; ++i)
        if (!(spare[i] - spare[i] == 0)) grad[i] = 0;
    }
  }
};

// A slope of 0 masks: a nonfinite gradient must not pass there.
template <class T> vec<T> sloped(vec<T> grad, vec<T> slope) { return slope != 0 ? grad * slope : vec<T>{}; }

// 1 + x (1 + x/2 (1 + x/3 ...))
template <class T> vec<T> series(vec<T> x, Size degree) {
  vec<T> result = all(T(1));
  for (Size power = degree; power > 0; --power) result = result * x * (T(1) / power) + T(1);
  return result;
}

}  // namespace subquad::SUBQUAD_ISA
