// Selections: the units that each row of a tile chooses by their scores, and products with what they chose.
//
// Selections are sorted by unit, so that the rows of a unit share its panel, up to ROWS_PER_BLOCK in a register block.
// Each row is summed in the order of its units, whatever the other rows chose.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "product.h"

namespace subquad::SUBQUAD_ISA {

// A unit that a row chose, and its position among the row's choices.
struct Selection {
  int32_t unit, row, slot;
};

// Write the numbers first + i of the set bits i to `to`, in order, and return how many there are. `to` has room for one
// whole vector more.
template <class T> inline Size write_places(uint32_t bits, Size first, int32_t* to) {
#if defined(__x86_64__) && SUBQUAD_BYTES == 64
  // Without a branch: how many bits are set cannot be predicted.
  if constexpr (sizeof(T) == 4) {
    const __m512i places = _mm512_add_epi32(_mm512_set1_epi32(int32_t(first)),
                                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(__mmask16(bits), places));
    return __builtin_popcount(bits);
  }
#endif
  Size count = 0;
  for (; bits; bits &= bits - 1) to[count++] = int32_t(first + __builtin_ctz(bits));
  return count;
}

// The scores above `limit` are selected, and the first `ties` of those that equal it.
template <class T> struct Threshold {
  T limit;
  Size ties;
};

template <class T> Size count_above(const T* scores, Size size, T limit) {
  Size total = 0;
  for (Size j = 0; j < size; j += lanes<T>) total += __builtin_popcount(lanes_of<T>(load(scores + j) > all<T>(limit)));
  return total;
}

// The threshold that selects `wanted` of `size` scores (whole vectors). Each pass, with one comparison per vector,
// narrows the range: by interpolation between the counts at its ends, and by bisection now and then.
template <class T> Threshold<T> find_threshold(const T* scores, Size size, Size wanted) {
  vec<T> most = all<T>(-INFINITY), least = all<T>(INFINITY);
  for (Size j = 0; j < size; j += lanes<T>) {
    const vec<T> x = load(scores + j);
    most = larger<T>(most, x);
    least = x < least && x > all<T>(-INFINITY) ? x : least;
  }
  T high = largest<T>(most), low = -largest<T>(-least);
  Size above_low = count_above(scores, size, low), above_high = 0;
  if (above_low < wanted) return {low, wanted - above_low};
  for (int round = 0;; ++round) {
    const T share = (T(above_low - wanted) + T(0.5)) / T(above_low - above_high + 1);
    T middle = low / 2 + high / 2;
    if (!(middle > low && middle < high)) return {high, wanted - count_above(scores, size, high)};
    if (const T guess = low + share * (high - low); round % 3 < 2 && guess > low && guess < high) middle = guess;
    const Size count = count_above(scores, size, middle);
    if (count == wanted) return {middle, 0};
    (count > wanted ? low : high) = middle;
    (count > wanted ? above_low : above_high) = count;
  }
}

// Write the columns of the `wanted` highest scores among the first `size` to `found`, in order, and return how many
// there are. Never more than that: products that overflow give scores without an order. Scores beyond `size`, up to a
// whole number of vectors, are -infinity.
template <class T> Size take_best(const T* scores, Size size, Size wanted, std::vector<int32_t>& found) {
  found.resize(size + 2 * lanes<T>);
  if (size <= wanted) {
    std::iota(found.begin(), found.begin() + size, 0);
    return size;
  }
  Threshold<T> threshold = find_threshold<T>(scores, (size + lanes<T> - 1) / lanes<T> * lanes<T>, wanted);
  Size count = 0;
  for (Size j = 0; j < size; j += lanes<T>) {
    const vec<T> x = load(scores + j);
    uint32_t bits = lanes_of<T>(x > all<T>(threshold.limit));
    if (threshold.ties > 0) {
      for (uint32_t equal = lanes_of<T>(x == all<T>(threshold.limit)); equal && threshold.ties > 0;
           equal &= equal - 1) {
        bits |= equal & -equal;
        --threshold.ties;
      }
    }
    count += write_places<T>(bits, j, found.data() + count);
  }
  while (count > 0 && found[count - 1] >= size) --count;
  return std::min(count, wanted);
}

// What the rows of a tile chose, row by row and unit by unit; the rows of a unit keep their order.
class Selections {
 public:
  std::vector<Selection> by_row, by_unit;

  void clear() {
    by_row.clear();
    by_unit.clear();
  }

  // Room for the selections of one more row. (push_back would be a call: the library's code is for any processor.)
  Selection* add(Size count) {
    by_row.resize(by_row.size() + count);
    return by_row.data() + by_row.size() - count;
  }

  // Counting sort of `by_row` into `by_unit`.
  void sort(Size units) {
    ends.assign(units + 1, 0);
    by_unit.resize(by_row.size());
    for (const Selection& x : by_row) ++ends[x.unit + 1];
    for (Size i = 0; i < units; ++i) ends[i + 1] += ends[i];
    for (const Selection& x : by_row) by_unit[ends[x.unit]++] = x;
  }

 private:
  std::vector<Size> ends;
};

// C_i[j] += sum_k A_i[k] B[k][j] for `count` <= rows rows at arbitrary addresses; B has contiguous rows of `columns`.
template <class T, int rows>
inline void scattered_product(Size count, Size columns, Size depth, const T* const* a, const T* b, T* const* c) {
  if constexpr (rows > 0) {
    if (count != rows) return scattered_product<T, rows - 1>(count, columns, depth, a, b, c);
    constexpr Size wide = SUBQUAD_COLUMNS * lanes<T>;
    const auto element = [a](Size i, Size k) { return a[i][k]; };
    Size j = 0;
    const auto place = [c, &j](Size i) { return c[i] + j; };
    for (; j + wide <= columns; j += wide) tile<T, rows, SUBQUAD_COLUMNS, false>(depth, element, b + j, columns, place);
    for (; j < columns; j += lanes<T>) tile<T, rows, 1, false>(depth, element, b + j, columns, place);
  }
}

// Call body(first, count) for the runs of selections of one unit, of at most ROWS_PER_BLOCK rows each.
template <class Body> void for_each_unit(const std::vector<Selection>& selections, Body body) {
  const Size size = selections.size();
  for (Size i = 0, count; i < size; i += count) {
    const Selection* first = selections.data() + i;
    for (count = 1; count < ROWS_PER_BLOCK && i + count < size && first[count].unit == first->unit;) ++count;
    body(first, count);
  }
}

}  // namespace subquad::SUBQUAD_ISA
