// Call body(context, i) for i < threads, in parallel as far as threads are available, and wait for all. The bodies must
// not wait for each other, and must not throw.
#pragma once

#include <cstddef>

#include "call.h"

namespace subquad {

void in_threads(std::ptrdiff_t threads, void (*body)(void* context, std::ptrdiff_t i), void* context);

}  // namespace subquad
