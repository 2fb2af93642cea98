// Threads of torch's own OpenMP, where Python has found them: after a call of torch they wait in a loop for the next, on the
// very cores that others would need. Else, and in a process that was forked, where OpenMP's threads are gone and it would
// wait for them forever, threads that live as long as the call.
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
pid_t process = 0;  // in which it was found

struct Tickets {
  const std::ptrdiff_t count;
  const Body body;
  void* const context;
  std::atomic<std::ptrdiff_t> next{0};
};

// The team may be smaller than asked for, down to one: whoever is there takes what is left.
void take_tickets(void* of) {
  Tickets& tickets = *static_cast<Tickets*>(of);
  for (std::ptrdiff_t i; (i = tickets.next++) < tickets.count;) tickets.body(tickets.context, i);
}

void in_own_threads(std::ptrdiff_t threads, Body body, void* context) {
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

}  // namespace

void subquad::in_threads(std::ptrdiff_t threads, Body body, void* context) {
  if (threads <= 1) {
    body(context, 0);
  } else if (parallel && process == getpid()) {
    Tickets tickets{threads, body, context};
    parallel(take_tickets, &tickets, 0, 0);  // 0: as many members as torch has, since another number costs new threads.
  } else {
    in_own_threads(threads, body, context);
  }
}

void subquad_use_team(void* gomp_parallel) {
  parallel = reinterpret_cast<Parallel>(gomp_parallel);
  process = getpid();
}
