// The standard library, included before an instruction set is selected: the linker shares its inline functions among
// all instruction sets, so none of them may be compiled for one that the machine may lack.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>
