// Work shared out among threads, as torch's count of them asks.
#pragma once

#include <atomic>
#include <new>

#include "vector.h"
#include "workers.h"

namespace subquad::SUBQUAD_ISA {

constexpr double WORTH_A_THREAD = 2e6;  // multiply-adds

// body(i) for i < threads; false where memory ran out.
template <class Body> bool shared_out(Size threads, Body body) {
  struct Context {
    Body& body;
    std::atomic<bool> failed;
  } context{body, {false}};
  in_threads(
      threads,
      [](void* of, Size i) {
        Context& context = *static_cast<Context*>(of);
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
