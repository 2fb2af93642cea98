// A look at the keys of a block in 8 bits, to choose the blocks that are read: a few per cent of the price of reading.
//
//   logit of key j = m + sum_i q8_i k8_ij  (query scale) (block scale),    k8 the offset from the block's center
//
// Bytes are multiplied in groups of 4. The query's are unsigned, 128 too large, which `bias` takes back. The sums are
// integers, so every instruction set finds the same.
#pragma once

#include <cmath>

#include "panels.h"

namespace subquad::SUBQUAD_ISA {

// largest(): for several queries (quads, 4), the largest of the `block` logits above m, in units of the scales.
struct PlainProducts {
  template <class T>
  static inline void largest(Size count, const int8_t* look, const uint8_t* const* queries, Size quads, const T* bias,
                             Size block, T* found) {
    for (Size r = 0; r < count; ++r) {
      int32_t sums[PANEL] = {};
      for (Size i = 0; i < quads; ++i)
        for (Size t = 0; t < PANEL; ++t)
          for (Size j = 0; j < 4; ++j) sums[t] += int32_t(queries[r][4 * i + j]) * look[(i * PANEL + t) * 4 + j];
      found[r] = largest_of(sums, bias, block);
    }
  }

  template <class T> static inline T largest_of(const int32_t* sums, const T* bias, Size block) {
    T most = T(sums[0]) - bias[0];
    for (Size t = 1; t < block; ++t) most = std::max(most, T(sums[t]) - bias[t]);
    return most;
  }
};

#if defined(__x86_64__) && SUBQUAD_BYTES == 64
// For machines with AVX-512 VNNI, whose functions need this attribute.
#define SUBQUAD_BYTE_PRODUCTS __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma,popcnt")))

struct ByteProducts {
  static bool available() {
    static const bool found = __builtin_cpu_supports("avx512vnni");
    return found;
  }

  template <class T>
  SUBQUAD_BYTE_PRODUCTS static inline void largest(Size count, const int8_t* look, const uint8_t* const* queries,
                                                   Size quads, const T* bias, Size block, T* found) {
    rows<T, ROWS_PER_BLOCK>(count, look, queries, quads, bias, block, found);
  }

 private:
  template <class T, int rows_>
  SUBQUAD_BYTE_PRODUCTS static inline void rows(Size count, const int8_t* look, const uint8_t* const* queries,
                                                Size quads, const T* bias, Size block, T* found) {
    if constexpr (rows_ > 0) {
      if (count != rows_) return rows<T, rows_ - 1>(count, look, queries, quads, bias, block, found);
      __m512i sums[rows_];
      for (int r = 0; r < rows_; ++r) sums[r] = _mm512_setzero_si512();
      for (Size i = 0; i < quads; ++i) {
        const __m512i keys = _mm512_loadu_si512(look + i * 4 * PANEL);
#pragma GCC unroll 8
        for (int r = 0; r < rows_; ++r) {
          int32_t four;
          std::memcpy(&four, queries[r] + 4 * i, 4);
          sums[r] = _mm512_dpbusd_epi32(sums[r], _mm512_set1_epi32(four), keys);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows_; ++r) found[r] = largest_of(sums[r], bias, block);
    }
  }

  template <class T> SUBQUAD_BYTE_PRODUCTS static inline T largest_of(__m512i total, const T* bias, Size block) {
    if constexpr (sizeof(T) == sizeof(float)) {
      const __m512 above = _mm512_sub_ps(_mm512_cvtepi32_ps(total), _mm512_loadu_ps(bias));
      return _mm512_mask_reduce_max_ps(__mmask16((1u << block) - 1), above);
    }
    int32_t sums[PANEL];
    _mm512_storeu_si512(sums, total);
    return PlainProducts::largest_of<T>(sums, bias, block);
  }
};
#endif

// The query in 8 bits, (quads, 4), and its scale.
template <class T> T to_bytes(const T* query, Size d, uint8_t* bytes) {
  T largest = 0;
  for (Size i = 0; i < d; ++i) largest = std::max(largest, std::abs(query[i]));
  const T scale = largest / 127, inverse = scale > 0 ? 1 / scale : T(0);
  for (Size i = 0; i < d; ++i) bytes[i] = uint8_t(int32_t(rounded(finite(query[i] * inverse))) + 128);
  for (Size i = d; i < (d + 3) / 4 * 4; ++i) bytes[i] = 128;
  return scale;
}

}  // namespace subquad::SUBQUAD_ISA
