// For x86 with AVX-512: vectors of 64 bytes, 32 registers. Empty elsewhere.
#ifdef __x86_64__
#include "standard.h"
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt")
#define SUBQUAD_ISA avx512
#define SUBQUAD_BYTES 64
#define SUBQUAD_COLUMNS 4
#include "kernels.h"

SubquadResult run_avx512(const SubquadCall& call, Operation operation) { return subquad::avx512::run(call, operation); }
SubquadResult multipole_avx512(const SubquadMultipole& call, Operation operation) {
  return subquad::avx512::run(call, operation);
}
SubquadResult multipole_backward_avx512(const SubquadMultipoleGradient& call) { return subquad::avx512::run(call); }
SubquadResult segments_avx512(const SubquadSegments& call) { return subquad::avx512::run(call); }
SubquadResult sparse_avx512(const SubquadSparse& call, Operation operation) {
  return subquad::avx512::run(call, operation);
}
#endif
