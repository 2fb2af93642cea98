// For any machine: vectors of 16 bytes, which are NEON on ARM and SSE on x86.
#define SUBQUAD_ISA plain
#define SUBQUAD_BYTES 16
#ifdef __aarch64__
#define SUBQUAD_COLUMNS 4
#else
#define SUBQUAD_COLUMNS 2
#endif
#include "kernels.h"

int run_plain(const SubquadCall& call, int kind) { return subquad::plain::run(call, kind); }
int multipole_plain(const SubquadMultipole& call) { return subquad::plain::run(call); }
