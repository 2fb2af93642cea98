// Feature maps of a chunk of tokens, computed panel by panel where they are used, and never stored as a whole.
//
//   Source   tokens that are summed, token-major:  panel (tokens, features)
//   Reader   tokens that read sums, feature-major: panel (features, tokens), and the backward pass from the gradients
//            of its features to those of its tokens
//
// TAYLOR: a feature is one of its variables times a feature of the next lower degree. In the order of taylor.py (by
// degree, then by the largest variable i) the features of degree p with largest variable i are x_i times the first
// C(i+p-1, p-1) features of degree p-1. That is a contiguous run, so no index table is needed and every product is one
// of whole vectors. Only the lower degrees are kept; the highest degree, which has nearly all features, exists one
// panel at a time. Pairs are computed by the series of q.k. The weight of a feature, 1 over the factorials of its
// exponents, is applied by the reader.
//
// The other maps have few features. They are kept for the whole chunk, and pairs are their dot products. POSITIVE and
// HYPERBOLIC: exp(w.y + c - top), where c is the feature's constant and top the token's largest exponent; a key's
// log-scale is top - |y|^2/2 - log(r)/2.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "call.h"
#include "product.h"

namespace subquad::SUBQUAD_ISA {

constexpr Size PANEL_FEATURES = 128;  // with 64 tokens 32 KiB of float32, and 64 KiB of their sums
static_assert(SUBQUAD_PADDING % lanes<float> == 0, "padded rows are whole vectors");

// The length of a row that the caller pads.
inline Size given_row(Size size) { return (size + SUBQUAD_PADDING - 1) / SUBQUAD_PADDING * SUBQUAD_PADDING; }

// Features [start, start + count) are x[variable] times the features from `parent` on.
struct Run {
  Size start, count, variable, parent;
};

struct Shape {
  const SubquadCall& call;
  Size tokens, chunk;          // of a chunk, and the same rounded up to whole vectors
  Size width, features;        // d and r
  Size panel = 0, panels = 0;  // features of a panel, in whole vectors, and the number of panels
  bool series = false, scaled = false, projected = false;
  bool logged = false;  // whether the log-scale of a key is the column after the width
  Size lower = 0;       // features of all degrees except the highest
  std::vector<Run> runs{};
  std::vector<Size> starts{};  // the first run of each panel

  template <class T> static Shape of(const SubquadCall& call, Size tokens, Size parts) {
    Shape s{call, tokens, padded<T>(tokens), call.query_width, call.features};
    s.series = call.map == TAYLOR;
    s.projected = call.map == POSITIVE || call.map == HYPERBOLIC;
    s.logged = call.key_width > call.query_width || call.tilted;
    s.scaled = s.projected || s.logged;
    const Size at_least =
        std::max<Size>(1, (s.features + PANEL_FEATURES * parts - 1) / (PANEL_FEATURES * parts) * parts);
    s.panel = std::max(lanes<T>, padded<T>((s.features + at_least - 1) / at_least));
    s.panels = (s.features + s.panel - 1) / s.panel;
    if (!s.series) return s;
    Size start = 1 + s.width, previous = 1;  // the first feature of this degree, and of the previous one
    s.lower = start;
    for (Size power = 2; power <= call.degree; ++power) {
      s.lower = start;
      const Size own = start;
      for (Size i = 0, count = 1; i < s.width; ++i) {
        s.runs.push_back({start, count, i, previous});
        start += count;
        count = count * (i + power) / (i + 1);  // C(i+p-1, p-1) -> C(i+p, p-1)
      }
      previous = own;
    }
    for (Size p = 0, run = 0; p < s.panels; ++p) {
      const Size begin = std::max(s.first(p), s.lower);
      while (run < Size(s.runs.size()) && s.runs[run].start + s.runs[run].count <= begin) ++run;
      s.starts.push_back(run);
    }
    return s;
  }

  Size first(Size p) const { return p * panel; }
  Size count(Size p) const { return std::min(panel, features - p * panel); }
  // The length of the dot product of a pair: of variables, or of features.
  Size pair_width() const { return series ? width : features; }
};

// Call body(run, first, end) for the runs of the lower degrees, in reverse order.
template <class Body> void each_lower_run_backwards(const Shape& s, Body body) {
  for (auto run = s.runs.rbegin(); run != s.runs.rend(); ++run)
    if (run->start < s.lower) body(*run, run->start, run->start + run->count);
}

template <class Body> void each_lower_run(const Shape& s, Body body) {
  for (auto run = s.runs.begin(); run != s.runs.end() && run->start < s.lower; ++run)
    body(*run, run->start, run->start + run->count);
}

// The same for the sections of the runs of the highest degree that are in a panel.
template <class Body> void each_run(const Shape& s, Size p, Body body) {
  const Size begin = std::max(s.first(p), s.lower), end = s.first(p) + s.count(p);
  for (auto run = s.runs.begin() + s.starts[p]; run != s.runs.end() && run->start < end; ++run)
    body(*run, std::max(begin, run->start), std::min(end, run->start + run->count));
}

template <class T> T log_count(const Shape& s) { return std::log(T(s.features)) / 2; }

template <class T> class Source {
 public:
  explicit Source(const Shape& s)
      : s(s), row(padded<T>(s.series ? s.lower : s.features) + lanes<T>), panel_row(s.panel + lanes<T>),
        kept(s.chunk * row), made(s.series ? s.chunk * panel_row : 0), log_scale(s.scaled ? s.chunk : 0) {}

  // Take `rows` (chunk, given); the last `chunk - count` rows are zeros.
  void take(const T* rows, Size given, Size count) {
    for (Size t = 0; t < s.chunk; ++t) {
      const T* x = rows + t * given;
      T* y = kept + t * row;
      if (s.series) {
        y[0] = 1;
        std::copy(x, x + s.width, y + 1);
        each_lower_run(s, [&](const Run& run, Size first, Size last) { multiply(y, y + first, run, first, last); });
      } else if (!s.projected) {
        point(x, y);
      }
      if (s.scaled && !s.projected) log_scale[t] = s.logged && t < count ? x[s.width] : T(-INFINITY);
    }
    if (s.projected) project(rows, given, count);
  }

  const T* pairs() const { return s.series ? kept + 1 : kept; }
  Size pair_row() const { return row; }

  const T* panel(Size p) {
    if (!s.series) return kept + s.first(p);
    const Size begin = s.first(p), end = begin + s.count(p);
    for (Size t = 0; t < s.chunk; ++t) {
      const T* x = kept + t * row;
      T* y = made + t * panel_row;
      if (begin < s.lower) std::copy(x + begin, x + std::min(end, s.lower), y);
      each_run(s, p, [&](const Run& run, Size first, Size last) { multiply(x, y + first - begin, run, first, last); });
    }
    return made;
  }
  Size panel_stride() const { return s.series ? panel_row : row; }

 private:
  const Shape& s;
  Size row, panel_row;
  Buffer<T> kept, made;

 public:
  Buffer<T> log_scale;

 private:
  // Whole vectors: what is written past the end of the run is overwritten by the next run, or is in the padding.
  void multiply(const T* x, T* y, const Run& run, Size first, Size last) const {
    const vec<T> variable = all(x[1 + run.variable]);
    const T* parents = x + run.parent + (first - run.start);
    for (Size f = 0; f < last - first; f += lanes<T>) store(y + f, load(parents + f) * variable);
  }

  void point(const T* x, T* y) const {
    for (Size f = 0; f < s.features; f += lanes<T>) {
      vec<T> given = load(x + f);
      if (s.call.map == ELU) given = given > 0 ? given + 1 : exp(given > 0 ? vec<T>{} : given);
      if (s.call.map == RELU) given = given > 0 ? given : vec<T>{};
      store(y + f, given);
    }
  }

  static T highest(const T* y, Size count) {
    vec<T> tops = all(T(-INFINITY));
    Size f = 0;
    for (; f + lanes<T> <= count; f += lanes<T>) tops = larger<T>(tops, load(y + f));
    T top = largest<T>(tops);
    for (; f < count; ++f) top = std::max(top, y[f]);
    return top;
  }

  void project(const T* rows, Size given, Size count) {
    const bool both = s.call.map == HYPERBOLIC;
    const Size drawn = both ? s.features / 2 : s.features, turned_row = given_row(drawn);
    const T *turned = static_cast<const T*>(s.call.turned), *constants = turned + s.width * turned_row;
    set_product<T>(s.chunk, padded<T>(drawn), s.width, {rows, given, 1}, turned, turned_row, kept, row);
    for (Size t = 0; t < s.chunk; ++t) {
      T *y = kept + t * row, norm = 0;
      if (both)
        for (Size f = 0; f < drawn; ++f) y[drawn + f] = constants[f] - y[f];
      // The last vector may reach into the other half, where the padding adds zeros.
      for (Size f = 0; f < drawn; f += lanes<T>) store(y + f, load(y + f) + load(constants + f));
      const T top = highest(y, s.features);
      for (Size i = 0; i < s.width; ++i) norm += rows[t * given + i] * rows[t * given + i];
      for (Size f = 0; f < s.features; f += lanes<T>) store(y + f, exp(load(y + f) - top));
      log_scale[t] = t < count ? top - norm / 2 - log_count<T>(s) : T(-INFINITY);
    }
  }
};

template <class T> class Reader {
 public:
  Reader(const Shape& s, bool differentiated)
      : s(s), weights(s.series ? static_cast<const T*>(s.call.table) : nullptr), rows(s.series ? s.lower : s.features),
        kept(rows * s.chunk), made(s.series ? s.panel * s.chunk : 0), back(differentiated ? (rows + 1) * s.chunk : 0),
        given(differentiated ? s.panel * s.chunk : 0), found(differentiated ? (s.width + 1) * s.chunk : 0),
        log_scale(s.scaled ? s.chunk : 0) {}

  // Take `columns` (width, chunk); the last `chunk - count` columns are zeros.
  void take(const T* columns, Size count) {
    tokens = columns;
    if (s.series) {
      std::fill(kept + 0, kept + s.chunk, T(1));
      std::copy(columns, columns + s.width * s.chunk, kept + s.chunk);
      each_lower_run(
          s, [&](const Run& run, Size first, Size last) { multiply<false>(kept + first * s.chunk, run, first, last); });
    } else if (s.projected) {
      project(count);
    } else {
      for (Size i = 0; i < s.features * s.chunk; i += lanes<T>) {
        vec<T> x = load(columns + i);
        if (s.call.map == ELU) x = x > 0 ? x + 1 : exp(x > 0 ? vec<T>{} : x);
        if (s.call.map == RELU) x = x > 0 ? x : vec<T>{};
        store(kept + i, x);
      }
    }
    if (s.scaled && !s.projected)
      for (Size t = 0; t < s.chunk; ++t)
        log_scale[t] = s.logged && t < count ? columns[s.width * s.chunk + t] : T(-INFINITY);
  }

  const T* pairs() const { return s.series ? kept + s.chunk : kept + 0; }

  const T* panel(Size p) {
    const Size begin = s.first(p), end = begin + s.count(p);
    if (!s.series) return kept + begin * s.chunk;
    for (Size f = begin; f < std::min(end, s.lower); ++f)
      for (Size t = 0; t < s.chunk; t += lanes<T>)
        store(made + (f - begin) * s.chunk + t, load(kept + f * s.chunk + t) * weights[f]);
    each_run(s, p, [&](const Run& run, Size first, Size last) {
      multiply<true>(made + (first - begin) * s.chunk, run, first, last);
    });
    return made;
  }

  // --- Backward pass: forget(); for each panel, in any order, fill panel_gradient() and call follow(); finish().

  void forget() { std::fill(back + 0, back + rows * s.chunk, T(0)); }
  T* pair_gradient() { return s.series ? back + s.chunk : back + 0; }  // (pair width, chunk); add to it
  T* panel_gradient() { return given; }                                // (features of the panel, chunk)

  void follow(Size p) {
    const Size begin = s.first(p), end = begin + s.count(p), kept_end = s.series ? std::min(end, s.lower) : end;
    for (Size f = begin; f < kept_end; ++f)
      for (Size t = 0; t < s.chunk; t += lanes<T>) {
        T* to = back + f * s.chunk + t;
        store(to, load(to) + load(given + (f - begin) * s.chunk + t) * (weights ? weights[f] : T(1)));
      }
    if (s.series)
      each_run(s, p, [&](const Run& run, Size first, Size last) {
        descend<true>(given + (first - begin) * s.chunk, run, first, last);
      });
  }

  // Return the gradients (width, chunk), followed by a row for the gradient of a log-scale, which the caller fills in.
  T* finish() {
    if (s.series) {
      each_lower_run_backwards(
          s, [&](const Run& run, Size first, Size last) { descend<false>(back + first * s.chunk, run, first, last); });
      return back + s.chunk;
    }
    if (s.projected) return project_back();
    for (Size f = 0; f < s.features; ++f)
      for (Size t = 0; t < s.chunk; t += lanes<T>) {
        const vec<T> grad = load(back + f * s.chunk + t), feature = load(kept + f * s.chunk + t);
        const vec<T> x = load(tokens + f * s.chunk + t);
        vec<T> slope = all(T(1));
        if (s.call.map == ELU) slope = x > 0 ? slope : feature;
        if (s.call.map == RELU) slope = x > 0 ? slope : vec<T>{};
        store(found + f * s.chunk + t, grad * slope);
      }
    return found;
  }

 private:
  const Shape& s;
  const T* weights;
  Size rows;
  const T* tokens = nullptr;
  Buffer<T> kept, made, back, given, found;

 public:
  Buffer<T> log_scale;

 private:
  template <bool weighted> void multiply(T* to, const Run& run, Size first, Size last) const {
    const T *x = kept + (1 + run.variable) * s.chunk, *parents = kept + (run.parent + first - run.start) * s.chunk;
    for (Size f = 0; f < last - first; ++f)
      for (Size t = 0; t < s.chunk; t += lanes<T>) {
        const vec<T> y = load(parents + f * s.chunk + t) * load(x + t);
        store(to + f * s.chunk + t, weighted ? y * weights[first + f] : y);
      }
  }

  // Pass the gradients of features [first, last) of a run to its variable and to their parents.
  template <bool weighted> void descend(const T* from, const Run& run, Size first, Size last) {
    const Size parent = run.parent + first - run.start, x = 1 + run.variable;
    for (Size t = 0; t < s.chunk; t += lanes<T>) {
      const vec<T> variable = load(kept + x * s.chunk + t);
      vec<T> total{};
      for (Size f = 0; f < last - first; ++f) {
        vec<T> grad = load(from + f * s.chunk + t);
        if (weighted) grad *= weights[first + f];
        total += grad * load(kept + (parent + f) * s.chunk + t);
        T* to = back + (parent + f) * s.chunk + t;
        store(to, load(to) + grad * variable);
      }
      T* to = back + x * s.chunk + t;
      store(to, load(to) + total);
    }
  }

  void project(Size count) {
    const bool both = s.call.map == HYPERBOLIC;
    const Size drawn = both ? s.features / 2 : s.features, turned_row = given_row(drawn);
    const T *turned = static_cast<const T*>(s.call.turned), *constants = turned + s.width * turned_row;
    set_product<T>(drawn, s.chunk, s.width, {turned, 1, turned_row}, tokens, s.chunk, kept, s.chunk);
    for (Size t = 0; t < s.chunk; t += lanes<T>) {
      vec<T> top = all(T(-INFINITY)), norm{};
      for (Size f = 0; f < drawn; ++f) {
        const vec<T> y = load(kept + f * s.chunk + t);
        top = larger<T>(top, constants[f] + y);
        if (both) top = larger<T>(top, constants[f] - y);
      }
      for (Size i = 0; i < s.width; ++i) {
        const vec<T> x = load(tokens + i * s.chunk + t);
        norm += x * x;
      }
      for (Size f = 0; f < drawn; ++f) {
        const vec<T> y = load(kept + f * s.chunk + t);
        store(kept + f * s.chunk + t, exp(constants[f] + y - top));
        if (both) store(kept + (drawn + f) * s.chunk + t, exp(constants[f] - y - top));
      }
      store(log_scale + t, top - norm / T(2) - log_count<T>(s));
    }
    std::fill(log_scale + count, log_scale + s.chunk, T(-INFINITY));
  }

  // phi = exp(w.y + c - |y|^2/2) times a constant: dy = W' dp - y sum(dp),  dp = dphi phi
  T* project_back() {
    const bool both = s.call.map == HYPERBOLIC;
    const Size drawn = both ? s.features / 2 : s.features;
    for (Size t = 0; t < s.chunk; t += lanes<T>) {
      vec<T> total{};
      for (Size f = 0; f < drawn; ++f) {
        vec<T> up = load(back + f * s.chunk + t) * load(kept + f * s.chunk + t);
        total += up;
        if (both) {
          const vec<T> down = load(back + (drawn + f) * s.chunk + t) * load(kept + (drawn + f) * s.chunk + t);
          total += down;
          up -= down;
        }
        store(back + f * s.chunk + t, up);
      }
      for (Size i = 0; i < s.width; ++i) store(found + i * s.chunk + t, -total * load(tokens + i * s.chunk + t));
    }
    add_product<T>(s.width, s.chunk, drawn, {static_cast<const T*>(s.call.turned), given_row(drawn), 1}, back, s.chunk,
                   found, s.chunk);
    return found;
  }
};

}  // namespace subquad::SUBQUAD_ISA
