// Use PyTorch's own OpenMP threads if Python found them: after an operation of PyTorch they spin while they wait for
// the next one, on the cores that other threads would need. Otherwise start threads for each call; also in a forked
// process, where the OpenMP threads no longer exist and OpenMP would wait for them forever.
#include "workers.h"

#include <unistd.h>

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace {

using Body = void (*)(void* context, std::ptrdiff_t i);
using Parallel = void (*)(void (*member)(void*), void* data, unsigned members, unsigned flags);  // GOMP_parallel

Parallel parallel = nullptr;
pid_t process = 0;  // the process in which `parallel` is valid

struct Tickets {
  const std::ptrdiff_t count;
  const Body body;
  void* const context;
  std::atomic<std::ptrdiff_t> next{0};
};

// The team may be smaller than requested, down to one thread: each member takes tickets until none are left.
void take_tickets(void* data) {
  Tickets& tickets = *static_cast<Tickets*>(data);
  for (std::ptrdiff_t i; (i = tickets.next++) < tickets.count;) tickets.body(tickets.context, i);
}

void in_own_threads(std::ptrdiff_t threads, Body body, void* context) {
  std::vector<std::thread> started;
  std::ptrdiff_t i = 1;
  try {
    started.reserve(threads - 1);
    for (; i < threads; ++i) started.emplace_back(body, context, i);
  } catch (const std::exception&) {  // No more threads, or no memory for them: this thread does the rest.
    for (; i < threads; ++i) body(context, i);
  }
  body(context, 0);
  for (std::thread& thread : started) thread.join();
}

}  // namespace

void subquad::in_threads(std::ptrdiff_t threads, Body body, void* context) {
  if (threads <= 1) {
    body(context, 0);
  } else if (parallel && process == getpid()) {
    Tickets tickets{threads, body, context};
    const unsigned members = 0;  // As many as PyTorch has: any other number would start new threads.
    parallel(take_tickets, &tickets, members, 0);
  } else {
    in_own_threads(threads, body, context);
  }
}

void subquad_use_team(void* gomp_parallel) {
  parallel = reinterpret_cast<Parallel>(gomp_parallel);
  process = getpid();
}
