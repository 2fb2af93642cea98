// A call, spread over threads: whole heads to each, or, where heads are too few, panels of features of the same head.
//
// Which thread does what depends on the sizes alone: equal calls, equal bits.
#pragma once

#include <memory>

#include "multipole.h"
#include "pairs.h"
#include "scan.h"
#include "separable.h"
#include "shared.h"
#include "step.h"

namespace subquad::SUBQUAD_ISA {

// Multiply-adds of a call by sums of features, or by pairs; `products`: how many of either kind a pass makes.
inline double work_by_sums(const SubquadCall& call, double products) {
  return products * call.batch * (call.group * call.queries + call.keys) / 2 * call.features * (call.values + 1);
}

inline double work_by_pairs(const SubquadCall& call, double products) {
  const double seen = double(call.batch) * call.group * call.queries * call.keys / (call.causal ? 2 : 1);
  return products * seen * (call.query_width + call.values + 1) / 2;
}

struct Plan {
  bool pairs;
  Size threads, parts;  // parts of a head

  Plan(const SubquadCall& call, double sum_products, double pair_products) {
    const double by_sums = work_by_sums(call, sum_products), by_pairs = work_by_pairs(call, pair_products);
    pairs = call.map == TAYLOR && !call.before && !call.after && !call.chunk && by_pairs < by_sums;
    const double work = pairs ? by_pairs : by_sums;
    threads = std::max<Size>(1, std::min<Size>(call.threads, Size(std::min(work / WORTH_A_THREAD, 1024.0))));
    const bool even = call.batch % threads == 0 || call.batch >= 4 * threads;
    const Size most = pairs ? (call.queries + BLOCK - 1) / BLOCK : (call.features + 15) / 16;
    parts = even ? 1 : std::min<Size>(threads, most);
  }
};

inline Size tokens_of(const SubquadCall& call) {
  return std::min<Size>(call.chunk ? call.chunk : best_chunk(call.features), std::max(call.queries, call.keys));
}

// Each thread takes whole heads; body(separable, head).
template <class T, class Body> bool separable(const SubquadCall& call, double products, Body body) {
  const double work = work_by_sums(call, products);
  const Size threads = std::min<Size>(call.batch, Size(std::min<double>(call.threads, 1 + work / WORTH_A_THREAD)));
  return shared_out(threads, [&](Size thread) {
    Separable<T> heads(call, tokens_of(call), products > 2);
    for (Size b = thread; b < call.batch; b += threads) body(heads, b);
  });
}

template <class T> bool forward(const SubquadCall& call) {
  if (call.map == SEPARABLE) return separable<T>(call, 2, [](Separable<T>& heads, Size b) { heads.forward(b); });
  const Plan d(call, 2, 2);
  const Size tasks = call.batch * d.parts, rows = call.values + 1, tokens = call.group * call.queries;
  if (d.pairs)
    return shared_out(std::min(d.threads, tasks), [&](Size thread) {
      Pairs<T> pairs(call, false);
      for (Size task = thread; task < tasks; task += d.threads) pairs.forward(task / d.parts, task % d.parts, d.parts);
    });
  const Shape s = Shape::of<T>(call, tokens_of(call), d.parts);
  Buffer<T> shares(d.parts > 1 ? tasks * tokens * rows : 0);
  const bool done = shared_out(std::min(d.threads, tasks), [&](Size thread) {
    std::unique_ptr<Scan<T>> scan;
    for (Size task = thread; task < tasks; task += d.threads) {
      if (!scan || d.parts > 1) scan = std::make_unique<Scan<T>>(s, task % d.parts, d.parts, false);
      scan->forward(task / d.parts, shares + task * tokens * rows);
    }
  });
  if (!done || d.parts == 1) return done;
  T *outputs = static_cast<T*>(call.output), *normalizers = static_cast<T*>(call.normalizer);
  return shared_out(d.threads, [&](Size thread) {
    for (Size b = 0; b < call.batch; ++b)
      for (Size t = tokens * thread / d.threads; t < tokens * (thread + 1) / d.threads; ++t) {
        T* total = shares + (b * d.parts * tokens + t) * rows;
        for (Size part = 1; part < d.parts; ++part)
          for (Size e = 0; e < rows; ++e) total[e] += total[part * tokens * rows + e];
        const T normalizer = normalizers[b * tokens + t] = total[call.values];
        const T inverse = !call.normalized ? T(1) : normalizer == 0 ? T(0) : 1 / normalizer;
        for (Size e = 0; e < call.values; ++e) outputs[(b * tokens + t) * call.values + e] = total[e] * inverse;
      }
  });
}

template <class T> bool backward(const SubquadCall& call) {
  const Plan d(call, 5, 7);
  const Size tasks = call.batch * d.parts;
  const Size q = call.group * call.queries * call.query_width, k = call.keys * call.key_width, v = call.keys * call.values;
  if (call.map == SEPARABLE)
    return separable<T>(call, 5, [&](Separable<T>& heads, Size b) {
      heads.backward(b, static_cast<T*>(call.q_grad) + b * q, static_cast<T*>(call.k_grad) + b * k,
                     static_cast<T*>(call.v_grad) + b * v);
    });
  if (d.pairs)
    return shared_out(std::min(d.threads, tasks), [&](Size thread) {
      Pairs<T> pairs(call, true);
      for (Size task = thread; task < tasks; task += d.threads) {
        const Size b = task / d.parts;
        pairs.backward(b, task % d.parts, d.parts, static_cast<T*>(call.q_grad) + b * q,
                       static_cast<T*>(call.k_grad) + b * k, static_cast<T*>(call.v_grad) + b * v);
      }
    });
  const Shape s = Shape::of<T>(call, tokens_of(call), d.parts);
  // The first part of a head writes the gradients themselves, each other a share of its own.
  Buffer<T> shares((tasks - call.batch) * (q + k + v));
  auto place = [&](Size task, Size kind) {
    const Size b = task / d.parts, part = task % d.parts;
    const Size sizes[] = {q, k, v}, starts[] = {0, q, q + k};
    void* const given[] = {call.q_grad, call.k_grad, call.v_grad};
    if (part == 0) return static_cast<T*>(given[kind]) + b * sizes[kind];
    return shares + (b * (d.parts - 1) + part - 1) * (q + k + v) + starts[kind];
  };
  const bool done = shared_out(std::min(d.threads, tasks), [&](Size thread) {
    std::unique_ptr<Scan<T>> scan;
    for (Size task = thread; task < tasks; task += d.threads) {
      if (!scan || d.parts > 1) scan = std::make_unique<Scan<T>>(s, task % d.parts, d.parts, true);
      scan->backward(task / d.parts, place(task, 0), place(task, 1), place(task, 2));
    }
  });
  for (Size task = 0; done && task < tasks; ++task)
    for (Size kind = 0; task % d.parts && kind < 3; ++kind) {
      T *total = place(task - task % d.parts, kind), *share = place(task, kind);
      for (Size i = 0; i < (kind == 0 ? q : kind == 1 ? k : v); ++i) total[i] += share[i];
    }
  return done;
}

template <class T> int step(const SubquadCall& call) {
  Shape s = Shape::of<T>(call, 1 + call.group, 1);
  s.chunk = s.tokens;  // The key and the queries of a group, token-major: there is nothing to pad.
  const Size threads = std::min<Size>(call.batch, Size(std::min<double>(call.threads, 1 + work_by_sums(call, 2) / WORTH_A_THREAD)));
  const bool done = shared_out(threads, [&](Size thread) {
    Step<T> step(s);
    for (Size b = thread; b < call.batch; b += threads) step(b);
  });
  T poison = 0;
  for (Size i = 0; i < call.batch * call.group; ++i) poison += static_cast<const T*>(call.poison)[i];
  return !done ? 1 : poison == 0 ? 0 : 2;
}

inline int run(const SubquadCall& call, int kind) {
  try {
    if (kind == 2) return call.wide ? step<double>(call) : step<float>(call);
    if (kind == 1) return (call.wide ? backward<double>(call) : backward<float>(call)) ? 0 : 1;
    return (call.wide ? forward<double>(call) : forward<float>(call)) ? 0 : 1;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

inline int run(const SubquadMultipole& call) {
  try {
    return (call.wide ? multipole<double>(call) : multipole<float>(call)) ? 0 : 1;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace subquad::SUBQUAD_ISA
