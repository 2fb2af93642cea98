// The widest vectors of the instruction set, through the compiler's vector extensions.
//
// A file that includes this header first defines SUBQUAD_ISA (a namespace), SUBQUAD_BYTES (the size of a vector) and
// SUBQUAD_COLUMNS (vectors per row of a register block: with 6 rows, 24 accumulators of 32 registers, or 12 of 16).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace subquad::SUBQUAD_ISA {

using Size = std::ptrdiff_t;  // sizes and strides: their products may not fit into 32 bits

template <class T> struct Vector;
template <> struct Vector<float> {
  typedef float type __attribute__((vector_size(SUBQUAD_BYTES)));
  typedef float loose __attribute__((vector_size(SUBQUAD_BYTES), aligned(4), may_alias));
  typedef int32_t whole __attribute__((vector_size(SUBQUAD_BYTES)));
  typedef uint32_t bits __attribute__((vector_size(SUBQUAD_BYTES)));
};
template <> struct Vector<double> {
  typedef double type __attribute__((vector_size(SUBQUAD_BYTES)));
  typedef double loose __attribute__((vector_size(SUBQUAD_BYTES), aligned(8), may_alias));
  typedef int64_t whole __attribute__((vector_size(SUBQUAD_BYTES)));
  typedef uint64_t bits __attribute__((vector_size(SUBQUAD_BYTES)));
};

template <class T> using vec = typename Vector<T>::type;
template <class T> using mask = typename Vector<T>::whole;  // -1 where true, 0 where not
template <class T> using bits = typename Vector<T>::bits;   // unsigned, so sums may wrap around
template <class T> constexpr Size lanes = SUBQUAD_BYTES / sizeof(T);

template <class T> inline vec<T> load(const T* from) {
  return *reinterpret_cast<const typename Vector<T>::loose*>(from);
}
template <class T> inline void store(T* to, vec<T> x) { *reinterpret_cast<typename Vector<T>::loose*>(to) = x; }
template <class T> inline vec<T> all(T x) { return x - vec<T>{}; }

template <class T> inline Size padded(Size size) { return (size + lanes<T> - 1) / lanes<T> * lanes<T>; }

template <class T> inline T sum(vec<T> x) {
  T parts[lanes<T>];
  std::memcpy(parts, &x, sizeof parts);
  for (Size half = lanes<T> / 2; half > 0; half /= 2)
    for (Size i = 0; i < half; ++i) parts[i] += parts[half + i];
  return parts[0];
}

template <class T> inline T largest(vec<T> x) {
  T parts[lanes<T>];
  std::memcpy(parts, &x, sizeof parts);
  for (Size half = lanes<T> / 2; half > 0; half /= 2)
    for (Size i = 0; i < half; ++i) parts[i] = parts[half + i] > parts[i] ? parts[half + i] : parts[i];
  return parts[0];
}

// start, start + step, start + 2 step, ...
template <class T> inline mask<T> places(Size start, Size step = 1) {
  mask<T> found{};
  for (Size i = 0; i < lanes<T>; ++i) found[i] = start + i * step;
  return found;
}

template <class T> inline vec<T> larger(vec<T> a, vec<T> b) { return a > b ? a : b; }

// Bit i is set where lane i is true.
template <class T> inline uint32_t lanes_of(mask<T> found) {
#if defined(__x86_64__) && SUBQUAD_BYTES == 64
  if constexpr (sizeof(T) == 4) return _mm512_movepi32_mask(reinterpret_cast<__m512i>(found));
  return _mm512_movepi64_mask(reinterpret_cast<__m512i>(found));
#elif defined(__x86_64__) && SUBQUAD_BYTES == 32
  if constexpr (sizeof(T) == 4) return _mm256_movemask_ps(reinterpret_cast<__m256>(found));
  return _mm256_movemask_pd(reinterpret_cast<__m256d>(found));
#else
  uint32_t bits = 0;
  for (Size i = 0; i < lanes<T>; ++i) bits |= uint32_t(found[i] != 0) << i;
  return bits;
#endif
}

// The nearest whole number, half to even, for |x| far below the size of the mantissa.
template <class T> inline T rounded(T x) {
  constexpr T shift = sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0);
  return (x + shift) - shift;
}

// exp(x) for x up to 87 (708 in float64); 0 if the result would be subnormal; NaN stays NaN. Tested in steps of 1e-6
// (5e-6), the error is at most 1.22 units in the last place, or 0.94 with fused multiply-adds.
//   exp(x) = 2^n exp(r),  n = x / ln 2 rounded,  |r| <= ln(2)/2,  exp(r) by its Taylor series
// Adding and subtracting 1.5 * 2^(bits of the mantissa) rounds to an integer, and leaves it in the low bits.
inline vec<float> exp(vec<float> x) {
  const float shift = 12582912.0f;
  vec<float> n = x * 1.44269504088896341f + shift;
  const bits<float> power = reinterpret_cast<bits<float>>(n) << 23;
  n -= shift;
  vec<float> r = x - n * 0.693359375f + n * 2.12194440054690583e-4f;
  vec<float> y = all(1.0f / 5040);
  y = y * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  y = reinterpret_cast<vec<float>>(reinterpret_cast<bits<float>>(y) + power);
  return x < -87.0f ? vec<float>{} : y;
}

inline vec<double> exp(vec<double> x) {
  const double shift = 6755399441055744.0;
  vec<double> n = x * 1.44269504088896340736 + shift;
  const bits<double> power = reinterpret_cast<bits<double>>(n) << 52;
  n -= shift;
  vec<double> r = x - n * 6.93147180369123816490e-1 - n * 1.90821492927058770002e-10;
  double factorial = 6227020800.0;  // 13!
  vec<double> y = all(1 / factorial);
  for (int p = 13; p > 0; --p) {
    factorial /= p;
    y = y * r + 1 / factorial;
  }
  y = reinterpret_cast<vec<double>>(reinterpret_cast<bits<double>>(y) + power);
  return x < -708.0 ? vec<double>{} : y;
}

// exp(x - level) of a weight and the logarithm of the sum that it belongs to, so at most 1. Large logits, computed
// again in another order, exceed their level by rounding, and exp() would then leave its range.
template <class Vector> inline Vector share(Vector exponent) { return exp(exponent > 0 ? Vector{} : exponent); }

}  // namespace subquad::SUBQUAD_ISA
