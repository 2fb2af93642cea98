// The entry points of each instruction set, among which interface.cpp chooses.
#pragma once

#include "call.h"

enum class Operation { FORWARD, BACKWARD, STEP };

SubquadResult run_plain(const SubquadCall& call, Operation operation);
SubquadResult run_avx2(const SubquadCall& call, Operation operation);
SubquadResult run_avx512(const SubquadCall& call, Operation operation);
SubquadResult multipole_plain(const SubquadMultipole& call);
SubquadResult multipole_avx2(const SubquadMultipole& call);
SubquadResult multipole_avx512(const SubquadMultipole& call);
