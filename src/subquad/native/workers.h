// Calls body(context, i) for i < threads, side by side as far as there are threads, and waits for all. None may wait for
// another, or throw.
#pragma once

#include <cstddef>

#include "call.h"

namespace subquad {

void in_threads(std::ptrdiff_t threads, void (*body)(void* context, std::ptrdiff_t i), void* context);

}  // namespace subquad
