// Parallel execution that reports a lack of memory in any thread.
#pragma once

#include <atomic>
#include <new>

#include "vector.h"
#include "workers.h"

namespace subquad::SUBQUAD_ISA {

constexpr double MIN_WORK_PER_THREAD = 2e6;  // multiply-adds

// Call body(i) for i < threads. Returns false if memory ran out.
template <class Body> bool in_parallel(Size threads, Body body) {
  struct Context {
    Body& body;
    std::atomic<bool> failed;
  } context{body, {false}};
  in_threads(
      threads,
      [](void* data, Size i) {
        Context& context = *static_cast<Context*>(data);
        try {
          context.body(i);
        } catch (const std::bad_alloc&) {
          context.failed = true;
        }
      },
      &context);
  return !context.failed;
}

}  // namespace subquad::SUBQUAD_ISA
