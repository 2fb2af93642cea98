// Calls body(context, i) for i < threads, each in a thread of its own, and waits for all.
#pragma once

#include <cstddef>

namespace subquad {

void in_threads(std::ptrdiff_t threads, void (*body)(void* context, std::ptrdiff_t i), void* context);

}  // namespace subquad
