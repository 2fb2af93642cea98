// Execute a call on several threads: each takes whole heads or, if there are too few heads, a part of a head.
//
// The caller decides how: the call holds the number of threads, the parts of a head, whether threads share a head,
// pairs or sums, and the size of a chunk. The order of all sums follows from the sizes of one head alone: neither other
// heads nor the number of threads change a bit.
#pragma once

#include <memory>

#include "dispatch.h"
#include "multipole.h"
#include "multipole_backward.h"
#include "pairs.h"
#include "parallel.h"
#include "scan.h"
#include "segments.h"
#include "separable.h"
#include "sparse_backward.h"
#include "step.h"

namespace subquad::SUBQUAD_ISA {

// Each thread takes whole heads; body(separable, head).
template <class T, class Body> bool separable(const SubquadCall& call, bool differentiated, Body body) {
  const Size threads = std::min<Size>(call.batch, call.threads);
  return in_parallel(threads, [&](Size thread) {
    Separable<T> heads(call, differentiated);
    for (Size b = thread; b < call.batch; b += threads) body(heads, b);
  });
}

// Add the shares (parts, tokens, e + 1) of the parts of each head, and divide by the normalizers.
template <class T> bool join_parts(const SubquadCall& call, T* shares) {
  const Size threads = call.threads, parts = call.parts, rows = call.values + 1, tokens = call.group * call.queries;
  T *outputs = static_cast<T*>(call.output), *normalizers = static_cast<T*>(call.normalizer);
  return in_parallel(threads, [&](Size thread) {
    for (Size b = 0; b < call.batch; ++b)
      for (Size t = tokens * thread / threads; t < tokens * (thread + 1) / threads; ++t) {
        T* total = shares + (b * parts * tokens + t) * rows;
        for (Size part = 1; part < parts; ++part)
          for (Size e = 0; e < rows; ++e) total[e] += total[part * tokens * rows + e];
        const T normalizer = normalizers[b * tokens + t] = total[call.values];
        const T inverse = !call.normalized ? T(1) : normalizer == 0 ? T(0) : 1 / normalizer;
        for (Size e = 0; e < call.values; ++e) outputs[(b * tokens + t) * call.values + e] = total[e] * inverse;
      }
  });
}

template <class T> bool forward(const SubquadCall& call) {
  if (call.map == SEPARABLE) return separable<T>(call, false, [](Separable<T>& heads, Size b) { heads.forward(b); });
  const Size threads = call.threads, parts = call.parts, tasks = call.batch * parts;
  if (call.pairs)
    return in_parallel(std::min(threads, tasks), [&](Size thread) {
      Pairs<T> pairs(call, false);
      for (Size task = thread; task < tasks; task += threads) pairs.forward(task / parts, task % parts, parts);
    });
  const Shape s = Shape::of<T>(call, call.chunk, parts);
  const Size scans = call.shared ? parts : 1, share = call.group * call.queries * (call.values + 1);  // of a head
  Buffer<T> shares(scans > 1 ? tasks * share : 0);
  const bool done = in_parallel(std::min(threads, call.batch * scans), [&](Size thread) {
    std::unique_ptr<Scan<T>> scan;
    for (Size task = thread; task < call.batch * scans; task += threads) {
      const Size part = task % scans;
      if (!scan || scans > 1) scan = std::make_unique<Scan<T>>(s, part, scans > 1 ? part + 1 : parts, parts, false);
      scan->forward(task / scans, shares + task * share);
    }
  });
  return done && (scans == 1 || join_parts<T>(call, shares));
}

// The gradients of q, k and v of one head.
template <class T> struct Gradients {
  T *q, *k, *v;

  Gradients(const SubquadCall& call, Size b)
      : q(static_cast<T*>(call.q_grad) + b * call.group * call.queries * call.query_width),
        k(static_cast<T*>(call.k_grad) + b * call.keys * call.key_width),
        v(static_cast<T*>(call.v_grad) + b * call.keys * call.values) {}
};

template <class T> bool backward(const SubquadCall& call) {
  const Size threads = call.threads, parts = call.parts, tasks = call.batch * parts;
  if (call.map == SEPARABLE)
    return separable<T>(call, true, [&](Separable<T>& heads, Size b) {
      const Gradients<T> to(call, b);
      heads.backward(b, to.q, to.k, to.v);
    });
  if (call.pairs)  // Parts write different rows.
    return in_parallel(std::min(threads, tasks), [&](Size thread) {
      Pairs<T> pairs(call, true);
      for (Size task = thread; task < tasks; task += threads) {
        const Gradients<T> to(call, task / parts);
        pairs.backward(task / parts, task % parts, parts, to.q, to.k, to.v);
      }
    });
  const Shape s = Shape::of<T>(call, call.chunk, 1);
  const Size passes = call.shared ? 2 : 1;
  return in_parallel(std::min(threads, call.batch * passes), [&](Size thread) {
    Scan<T> scan(s, 0, 1, 1, true);
    for (Size task = thread; task < call.batch * passes; task += threads) {
      const Size b = task / passes;
      const Gradients<T> to(call, b);
      if (passes == 1)
        scan.backward(b, to.q, to.k, to.v);
      else if ((task + b) % passes == 0)  // so that each thread gets passes of both kinds
        scan.backward_queries(b, to.q);
      else
        scan.backward_keys(b, to.k, to.v);
    }
  });
}

template <class T> bool step(const SubquadCall& call) {
  Shape s = Shape::of<T>(call, 1 + call.group, 1);
  s.chunk = s.tokens;  // The key and the queries of a group, token-major: no padding is needed.
  const Size threads = std::min<Size>(call.batch, call.threads);
  const bool done = in_parallel(threads, [&](Size thread) {
    Step<T> step(s);
    for (Size b = thread; b < call.batch; b += threads) step(b);
  });
  return done;
}

// Poison is 0 or NaN, so a sum that is not 0 has some in it.
template <class T, class Call> bool is_poisoned(const Call& call) {
  T total = 0;
  for (Size i = 0; i < call.batch * call.group * call.queries; ++i) total += static_cast<const T*>(call.poison)[i];
  return total != 0;
}

template <class T> SubquadResult run(const SubquadCall& call, Operation operation) {
  const bool done = operation == Operation::FORWARD    ? forward<T>(call)
                    : operation == Operation::BACKWARD ? backward<T>(call)
                                                       : step<T>(call);
  if (!done) return NO_MEMORY;
  return operation != Operation::BACKWARD && is_poisoned<T>(call) ? POISONED : OK;
}

inline SubquadResult run(const SubquadCall& call, Operation operation) {
  try {
    return call.wide ? run<double>(call, operation) : run<float>(call, operation);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

inline SubquadResult run(const SubquadMultipole& call, Operation operation) {
  try {
    if (operation == Operation::STEP) return call.wide ? multipole_step<double>(call) : multipole_step<float>(call);
    return (call.wide ? multipole<double>(call) : multipole<float>(call)) ? OK : NO_MEMORY;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

inline SubquadResult run(const SubquadMultipoleGradient& call) {
  try {
    return (call.call.wide ? multipole_backward<double>(call) : multipole_backward<float>(call)) ? OK : NO_MEMORY;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

inline SubquadResult run(const SubquadSegments& call) {
  try {
    return (call.wide ? finish_segments<double>(call) : finish_segments<float>(call)) ? OK : NO_MEMORY;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

template <class T> SubquadResult run_sparse(const SubquadSparse& call, Operation operation) {
  const bool is_forward = operation == Operation::FORWARD;
  if (!(is_forward ? sparse_forward<T>(call) : sparse_backward<T>(call))) return NO_MEMORY;
  return is_forward && is_poisoned<T>(call) ? POISONED : OK;
}

inline SubquadResult run(const SubquadSparse& call, Operation operation) {
  try {
    return call.wide ? run_sparse<double>(call, operation) : run_sparse<float>(call, operation);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

}  // namespace subquad::SUBQUAD_ISA
