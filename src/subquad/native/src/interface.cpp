// The C interface. The first call chooses the instruction set; the environment variable SUBQUAD_INSTRUCTIONS (AVX2 or
// plain) selects a smaller one than the machine supports.
#include <cstdlib>
#include <cstring>
#include <string>

#include "dispatch.h"

namespace {

struct InstructionSet {
  const char* name;
  SubquadResult (*run)(const SubquadCall& call, Operation operation);
  SubquadResult (*multipole)(const SubquadMultipole& call, Operation operation);
  SubquadResult (*multipole_backward)(const SubquadMultipoleGradient& call);
  SubquadResult (*segments)(const SubquadSegments& call);
  SubquadResult (*sparse)(const SubquadSparse& call, Operation operation);
};

InstructionSet choose() {
  const char* wanted = std::getenv("SUBQUAD_INSTRUCTIONS");
  if (wanted && !std::strcmp(wanted, "plain"))
    return {"plain", run_plain, multipole_plain, multipole_backward_plain, segments_plain, sparse_plain};
#ifdef __x86_64__
  const bool narrow = wanted && !std::strcmp(wanted, "AVX2");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (wide && !narrow)
    return {"AVX-512", run_avx512, multipole_avx512, multipole_backward_avx512, segments_avx512, sparse_avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {"AVX2", run_avx2, multipole_avx2, multipole_backward_avx2, segments_avx2, sparse_avx2};
  return {"SSE", run_plain, multipole_plain, multipole_backward_plain, segments_plain, sparse_plain};
#elif defined(__aarch64__)
  return {"NEON", run_plain, multipole_plain, multipole_backward_plain, segments_plain, sparse_plain};
#else
  return {"plain", run_plain, multipole_plain, multipole_backward_plain, segments_plain, sparse_plain};
#endif
}

const InstructionSet& chosen() {
  static const InstructionSet set = choose();
  return set;
}

// The names are in the order of their values. `INTERFACE` in calls.py is the same text.
std::string describe() {
  static_assert(FLOAT32 == 0 && FLOAT64 == 1 && BFLOAT16 == 2 && FLOAT16 == 3);
  static_assert(TAYLOR == 0 && POSITIVE == 1 && HYPERBOLIC == 2 && ELU == 3 && RELU == 4 && IDENTITY == 5 &&
                LOGGED == 6 && SEPARABLE == 7);
  static_assert(OK == 0 && NO_MEMORY == 1 && POISONED == 2 && SEGMENT_DUE == 3);
  return "types float32 float64 bfloat16 float16; "
         "maps taylor positive hyperbolic elu relu identity logged separable; "
         "results ok no_memory poisoned segment_due; projections with constants; poison counts keys; padding " +
         std::to_string(SUBQUAD_PADDING) + "; pair block " + std::to_string(SUBQUAD_PAIR_BLOCK) + "; fan " +
         std::to_string(SUBQUAD_FAN) + "; rounds " + std::to_string(SUBQUAD_ROUNDS) + "; call " +
         std::to_string(sizeof(SubquadCall)) + "; multipole " + std::to_string(sizeof(SubquadMultipole)) +
         "; gradient " + std::to_string(sizeof(SubquadMultipoleGradient)) + "; segments " +
         std::to_string(sizeof(SubquadSegments)) + "; sparse " + std::to_string(sizeof(SubquadSparse));
}

}  // namespace

SubquadResult subquad_forward(const SubquadCall* call) { return chosen().run(*call, Operation::FORWARD); }
SubquadResult subquad_backward(const SubquadCall* call) { return chosen().run(*call, Operation::BACKWARD); }
SubquadResult subquad_step(const SubquadCall* call) { return chosen().run(*call, Operation::STEP); }
SubquadResult subquad_multipole(const SubquadMultipole* call) { return chosen().multipole(*call, Operation::FORWARD); }
SubquadResult subquad_multipole_step(const SubquadMultipole* call) {
  return chosen().multipole(*call, Operation::STEP);
}
SubquadResult subquad_multipole_backward(const SubquadMultipoleGradient* call) {
  return chosen().multipole_backward(*call);
}
SubquadResult subquad_segments(const SubquadSegments* call) { return chosen().segments(*call); }
SubquadResult subquad_sparse(const SubquadSparse* call) { return chosen().sparse(*call, Operation::FORWARD); }
SubquadResult subquad_sparse_backward(const SubquadSparse* call) { return chosen().sparse(*call, Operation::BACKWARD); }
const char* subquad_instructions(void) { return chosen().name; }
const char* subquad_interface(void) {
  static const std::string text = describe();
  return text.c_str();
}
