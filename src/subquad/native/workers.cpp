// Threads live as long as the call (some 20 microseconds to start one, against milliseconds of work), so that nothing is
// left behind that a fork could break, and none waits in a loop for work that torch's own threads could do.
#include "workers.h"

#include <exception>
#include <thread>
#include <vector>

void subquad::in_threads(std::ptrdiff_t threads, void (*body)(void* context, std::ptrdiff_t i), void* context) {
  std::vector<std::thread> started;
  std::ptrdiff_t i = 1;
  try {
    started.reserve(threads - 1);
    for (; i < threads; ++i) started.emplace_back(body, context, i);
  } catch (const std::exception&) {  // No more threads, or memory for them, are to be had: this one does the rest.
    for (; i < threads; ++i) body(context, i);
  }
  body(context, 0);
  for (std::thread& thread : started) thread.join();
}
