// The C interface: chooses the instruction set once, when it is first called; SUBQUAD_INSTRUCTIONS (AVX2 or plain) asks for
// a smaller one than the machine has.
#include "call.h"

#include <cstdlib>
#include <cstring>

int run_plain(const SubquadCall& call, int kind);
int run_avx2(const SubquadCall& call, int kind);
int run_avx512(const SubquadCall& call, int kind);
int multipole_plain(const SubquadMultipole& call);
int multipole_avx2(const SubquadMultipole& call);
int multipole_avx512(const SubquadMultipole& call);

namespace {

struct Choice {
  const char* name;
  int (*run)(const SubquadCall& call, int kind);
  int (*multipole)(const SubquadMultipole& call);
};

Choice choose() {
  const char* wanted = std::getenv("SUBQUAD_INSTRUCTIONS");
  if (wanted && !std::strcmp(wanted, "plain")) return {"plain", run_plain, multipole_plain};
#ifdef __x86_64__
  const bool narrow = wanted && !std::strcmp(wanted, "AVX2");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (wide && !narrow) return {"AVX-512", run_avx512, multipole_avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"AVX2", run_avx2, multipole_avx2};
  return {"SSE", run_plain, multipole_plain};
#elif defined(__aarch64__)
  return {"NEON", run_plain, multipole_plain};
#else
  return {"plain", run_plain, multipole_plain};
#endif
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

int subquad_forward(const SubquadCall* call) { return chosen().run(*call, 0); }
int subquad_backward(const SubquadCall* call) { return chosen().run(*call, 1); }
int subquad_step(const SubquadCall* call) { return chosen().run(*call, 2); }
int subquad_multipole(const SubquadMultipole* call) { return chosen().multipole(*call); }
const char* subquad_instructions(void) { return chosen().name; }
int64_t subquad_call_size(void) { return sizeof(SubquadCall); }
int64_t subquad_multipole_size(void) { return sizeof(SubquadMultipole); }
