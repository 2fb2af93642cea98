// Read the tokens of a tensor of any of four types, with any strides, as rows of wide numbers; transpose rows.
#pragma once

#include "call.h"
#include "vector.h"

namespace subquad::SUBQUAD_ISA {

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

struct BFloat16 {
  uint16_t bits;
  operator float() const { return from_bits(uint32_t(bits) << 16); }
};

struct Float16 {
  uint16_t bits;
  operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    const float small = from_bits(rest << 13) * 0x1p112f;  // shifts the exponent, also of subnormal numbers
    return sign ? -small : small;
  }
};

template <class T, class Given>
void read_rows(const Given* from, Size token, Size element, Size count, Size width, T scale, T* to, Size row) {
  for (Size t = 0; t < count; ++t) {
    const Given* x = from + t * token;
    T* y = to + t * row;
    if (element == 1)
      for (Size i = 0; i < width; ++i) y[i] = T(x[i]) * scale;
    else
      for (Size i = 0; i < width; ++i) y[i] = T(x[i * element]) * scale;
  }
}

// Read `count` tokens from `first` on, times `scale`.
template <class T>
void read_rows(const SubquadTensor& from, Size b, Size g, Size first, Size count, Size width, T scale, T* to,
               Size row) {
  const Size start = b * from.batch + g * from.group + first * from.token;
  if constexpr (sizeof(T) == 8) {
    read_rows(static_cast<const double*>(from.data) + start, from.token, from.element, count, width, scale, to, row);
  } else if (from.type == FLOAT32) {
    read_rows(static_cast<const float*>(from.data) + start, from.token, from.element, count, width, scale, to, row);
  } else if (from.type == BFLOAT16) {
    read_rows(static_cast<const BFloat16*>(from.data) + start, from.token, from.element, count, width, scale, to, row);
  } else {
    read_rows(static_cast<const Float16*>(from.data) + start, from.token, from.element, count, width, scale, to, row);
  }
}

// Replace nonfinite numbers by 0, and add NaN to the poison of their tokens.
template <class T> void clean(T* rows, Size row, Size count, Size width, T* poison) {
  for (Size t = 0; t < count; ++t) {
    vec<T> found{};
    T* x = rows + t * row;
    for (Size i = 0; i < padded<T>(width); i += lanes<T>) found += load(x + i) * T(0);
    poison[t] += sum<T>(found);
    if (poison[t] != poison[t])
      for (Size i = 0; i < width; ++i)
        if (!(x[i] - x[i] == 0)) x[i] = 0;
  }
}

// Transpose rows (count, width) to columns (width, count), in blocks that stay in the cache.
template <class T> void turn(const T* rows, Size row, Size count, Size width, T* columns, Size column) {
  constexpr Size block = 16;  // tokens
  for (Size t0 = 0; t0 < count; t0 += block)
    for (Size i = 0; i < width; ++i)
      for (Size t = t0; t < (t0 + block < count ? t0 + block : count); ++t) columns[i * column + t] = rows[t * row + i];
}

}  // namespace subquad::SUBQUAD_ISA
