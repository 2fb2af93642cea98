// For x86 with AVX2 and FMA: vectors of 32 bytes, 16 registers. Empty elsewhere.
#ifdef __x86_64__
#include "standard.h"
#pragma GCC target("avx2,fma,popcnt")
#define SUBQUAD_ISA avx2
#define SUBQUAD_BYTES 32
#define SUBQUAD_COLUMNS 2
#include "kernels.h"

SubquadResult run_avx2(const SubquadCall& call, Operation operation) { return subquad::avx2::run(call, operation); }
SubquadResult multipole_avx2(const SubquadMultipole& call, Operation operation) {
  return subquad::avx2::run(call, operation);
}
SubquadResult multipole_backward_avx2(const SubquadMultipoleGradient& call) { return subquad::avx2::run(call); }
SubquadResult segments_avx2(const SubquadSegments& call) { return subquad::avx2::run(call); }
SubquadResult sparse_avx2(const SubquadSparse& call, Operation operation) {
  return subquad::avx2::run(call, operation);
}
#endif
