// The entry points of each instruction set, among which interface.cpp chooses.
#pragma once

#include "call.h"

enum class Operation { FORWARD, BACKWARD, STEP };

SubquadResult run_plain(const SubquadCall& call, Operation operation);
SubquadResult run_avx2(const SubquadCall& call, Operation operation);
SubquadResult run_avx512(const SubquadCall& call, Operation operation);
SubquadResult multipole_plain(const SubquadMultipole& call, Operation operation);
SubquadResult multipole_backward_plain(const SubquadMultipoleGradient& call);
SubquadResult segments_plain(const SubquadSegments& call);
SubquadResult sparse_plain(const SubquadSparse& call, Operation operation);
SubquadResult multipole_avx2(const SubquadMultipole& call, Operation operation);
SubquadResult multipole_backward_avx2(const SubquadMultipoleGradient& call);
SubquadResult segments_avx2(const SubquadSegments& call);
SubquadResult sparse_avx2(const SubquadSparse& call, Operation operation);
SubquadResult multipole_avx512(const SubquadMultipole& call, Operation operation);
SubquadResult multipole_backward_avx512(const SubquadMultipoleGradient& call);
SubquadResult segments_avx512(const SubquadSegments& call);
SubquadResult sparse_avx512(const SubquadSparse& call, Operation operation);
