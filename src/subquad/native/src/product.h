// The block product, on which all kernels are built:
//
//   C[i][j] += sum_k A[i][k] B[k][j]          B and C have contiguous rows; A may have any strides
//
// A register block of 6 rows x 4 vectors (2 with 16 registers) stays in registers for the whole depth: each step loads
// 4 vectors of B and broadcasts 6 numbers of A for 24 multiply-adds, so neither the loads nor the latency of the
// multiply-adds is the bottleneck. Nothing is packed: the operands are computed where they are used, and fit the cache.
// Every element is summed over k in the same order, wherever it is, so the sizes of the matrices do not change its
// bits. It is summed separately before it is added to C, which reduces the rounding error of long sums: 8,192 keys in
// chunks of 32 are rounded 32 and 256 times, not 8,192 times.
#pragma once

#include "vector.h"

namespace subquad::SUBQUAD_ISA {

constexpr Size ROWS_PER_BLOCK = 6;

template <class T> struct Matrix {  // A: element (i, k) at data[i * row + k * column]
  const T* data;
  Size row, column;
  T operator()(Size i, Size k) const { return data[i * row + k * column]; }
};
template <class T> struct Rows {  // C
  T* data;
  Size row;
  T* operator()(Size i) const { return data + i * row; }
};

// a(i, k) returns an element and c(i) a row, since the rows of Multipole are at arbitrary addresses.
template <class T, int rows, int columns, bool anew, class A, class C>
inline void tile(Size depth, const A& a, const T* b, Size b_row, const C& c) {
  vec<T> sums[rows][columns] = {};
  for (Size k = 0; k < depth; ++k) {
    vec<T> right[columns];
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) right[j] = load(b + k * b_row + j * lanes<T>);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const vec<T> left = all(a(i, k));
#pragma GCC unroll 8
      for (int j = 0; j < columns; ++j) sums[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) {
      T* to = c(i) + j * lanes<T>;
      store(to, anew ? sums[i][j] : load(to) + sums[i][j]);
    }
}

template <class T, int rows, int columns, bool anew>
inline void last_rows(Size count, Size depth, Matrix<T> a, const T* b, Size b_row, T* c, Size c_row) {
  if constexpr (rows > 0) {
    if (count == rows)
      tile<T, rows, columns, anew>(depth, a, b, b_row, Rows<T>{c, c_row});
    else
      last_rows<T, rows - 1, columns, anew>(count, depth, a, b, b_row, c, c_row);
  }
}

template <class T, int columns, bool anew>
void strip(Size rows, Size depth, Matrix<T> a, const T* b, Size b_row, T* c, Size c_row) {
  Size i = 0;
  for (; i + ROWS_PER_BLOCK <= rows; i += ROWS_PER_BLOCK)
    tile<T, ROWS_PER_BLOCK, columns, anew>(depth, Matrix<T>{a.data + i * a.row, a.row, a.column}, b, b_row,
                                           Rows<T>{c + i * c_row, c_row});
  last_rows<T, ROWS_PER_BLOCK - 1, columns, anew>(rows - i, depth, {a.data + i * a.row, a.row, a.column}, b, b_row,
                                                  c + i * c_row, c_row);
}

template <class T, int columns, bool anew>
inline void last_columns(Size count, Size rows, Size depth, Matrix<T> a, const T* b, Size b_row, T* c, Size c_row) {
  if constexpr (columns > 0) {
    if (count == columns)
      strip<T, columns, anew>(rows, depth, a, b, b_row, c, c_row);
    else
      last_columns<T, columns - 1, anew>(count, rows, depth, a, b, b_row, c, c_row);
  }
}

// `columns` is a multiple of the number of lanes. `anew`: overwrite C instead of adding to it.
template <class T, bool anew>
void product(Size rows, Size columns, Size depth, Matrix<T> a, const T* b, Size b_row, T* c, Size c_row) {
  constexpr Size wide = SUBQUAD_COLUMNS * lanes<T>;
  Size j = 0;
  for (; j + wide <= columns; j += wide) strip<T, SUBQUAD_COLUMNS, anew>(rows, depth, a, b + j, b_row, c + j, c_row);
  last_columns<T, SUBQUAD_COLUMNS - 1, anew>((columns - j) / lanes<T>, rows, depth, a, b + j, b_row, c + j, c_row);
}

template <class T>
inline void add_product(Size rows, Size columns, Size depth, Matrix<T> a, const T* b, Size b_row, T* c, Size c_row) {
  product<T, false>(rows, columns, depth, a, b, b_row, c, c_row);
}

template <class T>
inline void set_product(Size rows, Size columns, Size depth, Matrix<T> a, const T* b, Size b_row, T* c, Size c_row) {
  product<T, true>(rows, columns, depth, a, b, b_row, c, c_row);
}

}  // namespace subquad::SUBQUAD_ISA
