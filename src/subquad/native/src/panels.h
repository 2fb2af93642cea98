// Panels: 16 keys side by side, (d, 16), so that the logits of a query are whole vectors; and what Multipole keeps of
// its keys in panels.
//
//   block      up to 16 similar keys: their panel and their values
//   record     a segment of 16 blocks. Its header has one column per block: center, mean value, radius
//   root       16 segments: a header with one column per segment
//
// The radius is the root of the mean squared distance from the center, per dimension.
#pragma once

#include <algorithm>

#include "call.h"
#include "product.h"

namespace subquad::SUBQUAD_ISA {

constexpr Size PANEL = SUBQUAD_PADDING;                       // keys of a panel
constexpr Size FAN = SUBQUAD_FAN;                             // blocks of a segment, segments of a root
template <class T> constexpr int VECTORS = PANEL / lanes<T>;  // of a row of a panel

template <class T> inline T finite(T x) { return x - x == 0 ? x : T(0); }

// Offsets inside a record, in numbers of T. `records.py` has the same.
struct Record {
  Size d, e, block;
  Size means, radius, header;            // the centers come first
  Size scale, bias, look, keys, values;  // `look`: the keys in 8 bits
  Size size;

  template <class T> static Record of(Size d, Size e, Size block) {
    Record r{d, e, block, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    r.means = d * FAN;
    r.radius = r.means + FAN * e;
    r.header = r.radius + FAN;
    r.scale = r.header;
    r.bias = r.scale + FAN;
    r.look = r.bias + FAN * PANEL;
    r.keys = r.look + FAN * look_bytes(d) / Size(sizeof(T));
    r.values = r.keys + FAN * d * PANEL;
    r.size = r.values + FAN * block * e;
    return r;
  }
  static Size look_bytes(Size d) { return (d + 3) / 4 * 4 * PANEL; }  // of a block: (d / 4, 16, 4)
};

// The logits of `rows` queries at arbitrary addresses with one panel (depth, 16). Each logit is the sum of a few
// interleaved sums, so that a single row does not wait for its own additions. All row counts add in the same order.
template <class T, int rows> struct PanelProduct {
  static constexpr int vectors = VECTORS<T>;
  static constexpr int chains = SUBQUAD_COLUMNS == 4 && vectors < 4 ? 4 / vectors : 1;
  vec<T> sums[rows][vectors];

  PanelProduct(Size depth, const T* const* a, const T* b) {
    vec<T> part[chains][rows][vectors] = {};
    Size k = 0;
    for (; k + chains <= depth; k += chains)
#pragma GCC unroll 8
      for (int c = 0; c < chains; ++c) add(part[c], a, b, k + c);
    for (; k < depth; ++k) add(part[0], a, b, k);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < vectors; ++j) {
        sums[i][j] = part[0][i][j];
#pragma GCC unroll 8
        for (int c = 1; c < chains; ++c) sums[i][j] += part[c][i][j];
      }
  }

 private:
  static inline void add(vec<T> (&to)[rows][vectors], const T* const* a, const T* b, Size k) {
    vec<T> right[vectors];
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) right[j] = load(b + k * PANEL + j * lanes<T>);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const vec<T> left = all(a[i][k]);
#pragma GCC unroll 8
      for (int j = 0; j < vectors; ++j) to[i][j] += left * right[j];
    }
  }
};

// C[i][j] = sum_k A[i][k] B[j / 16][k][j % 16]: all rows with `panels` panels, `stride` numbers apart.
template <class T, int rows, int panels>
inline void dense_panels(Size depth, const T* a, Size a_row, const T* b, Size stride, T* c, Size c_row) {
  constexpr int vectors = VECTORS<T>;
  vec<T> sums[rows][panels * vectors] = {};
  for (Size k = 0; k < depth; ++k) {
    vec<T> right[panels * vectors];
#pragma GCC unroll 8
    for (int j = 0; j < panels * vectors; ++j)
      right[j] = load(b + (j / vectors) * stride + k * PANEL + (j % vectors) * lanes<T>);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const vec<T> left = all(a[i * a_row + k]);
#pragma GCC unroll 8
      for (int j = 0; j < panels * vectors; ++j) sums[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < panels * vectors; ++j) store(c + i * c_row + j * lanes<T>, sums[i][j]);
}

template <class T, int rows, int panels>
inline void last_dense(Size count, Size depth, const T* a, Size a_row, const T* b, Size stride, T* c, Size c_row) {
  if constexpr (rows > 0) {
    if (count == rows)
      dense_panels<T, rows, panels>(depth, a, a_row, b, stride, c, c_row);
    else
      last_dense<T, rows - 1, panels>(count, depth, a, a_row, b, stride, c, c_row);
  }
}

template <class T, int panels>
inline void dense_strip(Size rows, Size depth, const T* a, Size a_row, const T* b, Size stride, T* c, Size c_row) {
  Size i = 0;
  for (; i + ROWS_PER_BLOCK <= rows; i += ROWS_PER_BLOCK)
    dense_panels<T, ROWS_PER_BLOCK, panels>(depth, a + i * a_row, a_row, b, stride, c + i * c_row, c_row);
  last_dense<T, ROWS_PER_BLOCK - 1, panels>(rows - i, depth, a + i * a_row, a_row, b, stride, c + i * c_row, c_row);
}

// The logits of `rows` contiguous queries with consecutive panels.
template <class T>
void panel_logits(Size rows, Size panels, Size depth, const T* a, Size a_row, const T* b, Size stride, T* c,
                  Size c_row) {
  constexpr int wide = SUBQUAD_COLUMNS > VECTORS<T> ? SUBQUAD_COLUMNS / VECTORS<T> : 1;
  Size j = 0;
  for (; j + wide <= panels; j += wide)
    dense_strip<T, wide>(rows, depth, a, a_row, b + j * stride, stride, c + j * PANEL, c_row);
  for (; j < panels; ++j) dense_strip<T, 1>(rows, depth, a, a_row, b + j * stride, stride, c + j * PANEL, c_row);
}

}  // namespace subquad::SUBQUAD_ISA
