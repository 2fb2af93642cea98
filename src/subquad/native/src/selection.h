// Selections: the units that each row of a tile chooses by their scores, and products with what they chose.
//
// Selections are sorted by unit, so that the rows of a unit share its panel, up to ROWS_PER_BLOCK in a register block.
// Each row is summed in the order of its units, whatever the other rows chose.
#pragma once

#include <cmath>
#include <utility>
#include <vector>

#include "product.h"

namespace subquad::SUBQUAD_ISA {

// A unit that a row chose, and its position among the row's choices.
struct Selection {
  Size unit, row, slot;
};

// The scores above `limit` are selected, and the first `ties` of those that equal it.
template <class T> struct Threshold {
  T limit;
  Size ties;
};

template <class T> Size count_above(const T* scores, Size size, T limit) {
  mask<T> count{};
  for (Size j = 0; j < size; j += lanes<T>) count -= load(scores + j) > all<T>(limit);
  Size total = 0;
  for (Size i = 0; i < lanes<T>; ++i) total += count[i];
  return total;
}

// The threshold that selects `wanted` of `size` scores (whole vectors), by bisection of their range: a few passes, each
// with one comparison per vector.
template <class T> Threshold<T> find_threshold(const T* scores, Size size, Size wanted) {
  vec<T> most = all<T>(-INFINITY), least = all<T>(INFINITY);
  for (Size j = 0; j < size; j += lanes<T>) {
    const vec<T> x = load(scores + j);
    most = larger<T>(most, x);
    least = x < least && x > all<T>(-INFINITY) ? x : least;
  }
  T high = largest<T>(most), low = -largest<T>(-least);
  const Size over = count_above(scores, size, low);
  if (over < wanted) return {low, wanted - over};
  for (;;) {
    const T middle = low / 2 + high / 2;
    if (!(middle > low && middle < high)) return {high, wanted - count_above(scores, size, high)};
    const Size count = count_above(scores, size, middle);
    if (count == wanted) return {middle, 0};
    (count > wanted ? low : high) = middle;
  }
}

// Counting sort by unit; the rows of a unit keep their order.
class Sorter {
 public:
  void operator()(std::vector<Selection>& selections, Size units) {
    ends.assign(units + 1, 0);
    sorted.resize(selections.size());
    for (const Selection& x : selections) ++ends[x.unit + 1];
    for (Size i = 0; i < units; ++i) ends[i + 1] += ends[i];
    for (const Selection& x : selections) sorted[ends[x.unit]++] = x;
    selections.swap(sorted);
  }

 private:
  std::vector<Selection> sorted;
  std::vector<Size> ends;
};

// C_i[j] (+)= sum_k A_i[k] B[k][j] for `count` <= rows rows at arbitrary addresses.
template <class T, int rows, bool anew>
inline void scattered_rows(Size count, Size columns, Size depth, const T* const* a, const T* b, Size b_row,
                           T* const* c) {
  if constexpr (rows > 0) {
    if (count != rows) return scattered_rows<T, rows - 1, anew>(count, columns, depth, a, b, b_row, c);
    const auto element = [a](Size i, Size k) { return a[i][k]; };
    Size j = 0;
    const auto place = [c, &j](Size i) { return c[i] + j; };
    for (; j + 2 * lanes<T> <= columns; j += 2 * lanes<T>) tile<T, rows, 2, anew>(depth, element, b + j, b_row, place);
    if (j < columns) tile<T, rows, 1, anew>(depth, element, b + j, b_row, place);
  }
}

template <class T> struct Panel {  // B, with contiguous rows
  const T* data;
  Size row;
};

// For each selection: C(selection)[j] (+)= sum_k A(selection)[k] B(unit)[k][j]. The selections are sorted by unit.
template <class T, bool anew, class A, class B, class C>
void selected_product(const std::vector<Selection>& selections, Size columns, Size depth, A a_of, B b_of, C c_of) {
  const Size size = selections.size();
  for (Size i = 0, count; i < size; i += count) {
    const Selection* first = selections.data() + i;
    for (count = 1; count < ROWS_PER_BLOCK && i + count < size && first[count].unit == first->unit;) ++count;
    const T* a[ROWS_PER_BLOCK];
    T* c[ROWS_PER_BLOCK];
    for (Size r = 0; r < count; ++r) {
      a[r] = a_of(first[r]);
      c[r] = c_of(first[r]);
    }
    const Panel<T> b = b_of(first->unit);
    scattered_rows<T, ROWS_PER_BLOCK, anew>(count, columns, depth, a, b.data, b.row, c);
  }
}

}  // namespace subquad::SUBQUAD_ISA
