// For any machine: vectors of 16 bytes (NEON on ARM, SSE on x86).
#define SUBQUAD_ISA plain
#define SUBQUAD_BYTES 16
#ifdef __aarch64__
#define SUBQUAD_COLUMNS 4
#else
#define SUBQUAD_COLUMNS 2
#endif
#include "kernels.h"

SubquadResult run_plain(const SubquadCall& call, Operation operation) { return subquad::plain::run(call, operation); }
SubquadResult multipole_plain(const SubquadMultipole& call, Operation operation) {
  return subquad::plain::run(call, operation);
}
SubquadResult multipole_backward_plain(const SubquadMultipoleGradient& call) { return subquad::plain::run(call); }
SubquadResult segments_plain(const SubquadSegments& call) { return subquad::plain::run(call); }
SubquadResult sparse_plain(const SubquadSparse& call, Operation operation) {
  return subquad::plain::run(call, operation);
}
