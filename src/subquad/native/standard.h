// The standard library, before any instruction set is named: what it defines is shared by all of them, so that none may
// be compiled for a machine that is not there.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>
