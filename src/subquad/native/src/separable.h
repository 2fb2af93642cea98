// Separable attention, as a scan over given features:
//
//   out_i = sum_c share_ic sum_j f_jc v_j          over the visible keys j <= i
//   f_jc  = exp(k_jc),    Z_ic = sum_j f_jc,    share_ic = p_ic / Z_ic,    p_i = softmax(q_i)
//
//   dp_ic = dshare_ic / Z_ic,    dq_ic = p_ic (dp_ic - sum_c p_ic dp_ic)
//   dk_jc = f_jc (df_jc - sum_i p_ic dp_ic / Z_ic)          over the rows i >= j
//
// f, Z and share are computed for a whole head, and are in the cache when `Scan` reads them. No maximum is subtracted
// from the exponents: the maximum over the visible keys differs from row to row, and a shared one would let future keys
// change the rounding of earlier rows. Instead the exponents are at most MAX_EXPONENT, so that f, Z, 1/Z^2 and f v are
// in the range of float32. Rows that see a larger one, or a value above MAX_VALUE, are left to PyTorch, which subtracts
// the maximum of each row: their normalizer is 0, that of all other rows is 1.
#pragma once

#include "scan.h"

namespace subquad::SUBQUAD_ISA {

constexpr double MAX_EXPONENT = 32, MAX_VALUE = 1e18;

template <class T> class Separable {
 public:
  Separable(const SubquadCall& call, bool differentiated)
      : call(call), n(call.keys), c(call.key_width), row(padded<T>(c)), kept(differentiated ? n : 1), features(n * row),
        inverses(kept * row), shares(call.group * n * row), poison(call.group * n), token(row),
        value(padded<T>(call.values)), sums(row), given(as_features()), shape(Shape::of<T>(given, call.chunk, 1)),
        scan(shape, 0, 1, 1, differentiated) {}

  void forward(Size b) {
    make(b);
    scan.forward(b, nullptr);
    for (Size i = 0; i < call.group * n; ++i) {
      static_cast<T*>(call.poison)[b * call.group * n + i] += poison[i];
      static_cast<T*>(call.normalizer)[b * call.group * n + i] = i % n < end;
    }
  }

  // Write the gradients (g, n, d), (m, d) and (m, e) of one head. The scan writes those of shares and features to the
  // same memory first.
  void backward(Size b, T* q_grad, T* k_grad, T* v_grad) {
    make(b);
    scan.backward(b, q_grad, k_grad, v_grad);
    std::fill(sums + 0, sums + row, 0.0);  // of p dp / Z, over the rows from the last one backward
    for (Size t = n - 1; t >= 0; --t) {
      for (Size g = 0; g < call.group; ++g) descend_to_query(b, g, t, q_grad + (g * n + t) * c);
      descend_to_key(b, t, k_grad + t * c);
    }
  }

 private:
  const SubquadCall& call;
  const Size n, c, row;                  // tokens; features; features, padded
  const Size kept;                       // tokens whose 1/Z is kept: all, or only the last
  Buffer<T> features, inverses, shares;  // f (n, row), 1/Z (kept, row) and share (g, n, row)
  Buffer<T> poison;                      // (g, n): of the queries and of the keys that they see
  Buffer<T> token, value;                // of one token, scaled
  Buffer<double> sums;                   // over the whole sequence, and therefore in float64
  Size end = 0;                          // of the rows that are not left to PyTorch
  const SubquadCall given;               // the call of the scan; every head has its features in the same buffers
  const Shape shape;
  Scan<T> scan;

  SubquadCall as_features() const {
    SubquadCall scanned = call;
    const int64_t type = sizeof(T) == 8 ? FLOAT64 : FLOAT32;
    scanned.map = IDENTITY;
    scanned.normalized = 0;
    scanned.query_scale = scanned.key_scale = 1;
    scanned.q = {shares, type, 0, n * row, row, 1};
    scanned.k = {features, type, 0, 0, row, 1};
    return scanned;
  }

  bool hidden(Size b, Size t) const { return call.keep && !call.keep[b * n + t]; }

  void make(Size b) {
    std::fill(sums + 0, sums + row, 0.0);
    T seen = 0;
    end = n;
    for (Size t = 0; t < n; ++t) {
      T *feature = features + t * row, *inverse = inverses + t % kept * row;
      if (hidden(b, t) || t >= end || !fits(b, t, seen)) {
        std::fill(feature, feature + row, T(0));
      } else {
        for (Size i = 0; i < row; i += lanes<T>) store(feature + i, exp(load(token + i)));
      }
      for (Size i = 0; i < row; ++i) inverse[i] = T(sums[i] += feature[i]);
      for (Size i = 0; i < row; i += lanes<T>) {
        const vec<T> normalizer = load(inverse + i);
        store(inverse + i, normalizer == 0 ? vec<T>{} : 1 / normalizer);
      }
      for (Size g = 0; g < call.group; ++g) {
        T *share = shares + (g * n + t) * row, own = 0;
        soften(b, g, t, share, &own);
        poison[g * n + t] = row_poison(seen, own);
        for (Size i = 0; i < row; i += lanes<T>) store(share + i, load(share + i) * load(inverse + i));
      }
    }
  }

  // Read a key. If it or its value is too large, end the rows here. Otherwise add 1 to `seen`, NaN if it is not finite.
  bool fits(Size b, Size t, T& seen) {
    T own = 1;
    read_rows(call.k, b, 0, t, 1, c, T(call.key_scale), token + 0, row);
    clean(token + 0, row, 1, c, &own);
    read_rows(call.v, b, 0, t, 1, call.values, T(1), value + 0, 0);
    vec<T> key{}, other{};
    for (Size i = 0; i < row; i += lanes<T>) key = larger<T>(key, larger<T>(load(token + i), -load(token + i)));
    for (Size e = 0; e < call.values; e += lanes<T>) {
      const vec<T> x = load(value + e), size = larger<T>(x, -x);
      other = larger<T>(other, size - size == 0 ? size : vec<T>{});  // The scan poisons nonfinite values.
    }
    if (largest<T>(key) > T(MAX_EXPONENT) || largest<T>(other) > T(MAX_VALUE)) {
      end = t;
      return false;
    }
    seen += own;
    return true;
  }

  // The softmax p of a query; zeros in its padding.
  void soften(Size b, Size g, Size t, T* share, T* own) {
    read_rows(call.q, b, g, t, 1, c, T(call.query_scale), share, row);
    clean(share, row, 1, c, own);
    vec<T> top = all(T(-INFINITY)), total{};
    for (Size i = 0; i < row; i += lanes<T>)
      top = larger<T>(top, places<T>(i) < places<T>(c, 0) ? load(share + i) : top);
    const T level = largest<T>(top);
    for (Size i = 0; i < row; i += lanes<T>) {
      const vec<T> x = load(share + i) - level;
      const vec<T> weight = places<T>(i) < places<T>(c, 0) ? exp(x) : vec<T>{};
      store(share + i, weight);
      total += weight;
    }
    const T inverse = 1 / sum<T>(total);
    for (Size i = 0; i < row; i += lanes<T>) store(share + i, load(share + i) * inverse);
  }

  // Replace the gradient of share by that of q.
  void descend_to_query(Size b, Size g, Size t, T* grad) {
    const T* inverse = inverses + t * row;
    T total = 0, own = 0;
    soften(b, g, t, token, &own);
    for (Size i = 0; i < c; ++i) grad[i] *= inverse[i];  // Rounded now, so a softmax over one feature has no gradient.
    for (Size i = 0; i < c; ++i) {
      total += token[i] * grad[i];
      sums[i] += token[i] * grad[i] * inverse[i];
    }
    for (Size i = 0; i < c; ++i) grad[i] = T(call.query_scale) * token[i] * (grad[i] - total);
    if (own != own) zero_nonfinite(call.q, b, g, t, T(call.query_scale), grad);
  }

  // Replace the gradient of f by that of k.
  void descend_to_key(Size b, Size t, T* grad) {
    const T* feature = features + t * row;
    for (Size i = 0; i < c; ++i)  // A hidden key has no features and no gradient, even if later rows are not finite.
      grad[i] = feature[i] == 0 ? T(0) : T(call.key_scale) * feature[i] * T(grad[i] - sums[i]);
    zero_nonfinite(call.k, b, 0, t, T(call.key_scale), grad);
  }

  // Set the gradient to 0 where the input number is not finite.
  void zero_nonfinite(const SubquadTensor& of, Size b, Size g, Size t, T scale, T* grad) {
    read_rows(of, b, g, t, 1, c, scale, token + 0, row);
    for (Size i = 0; i < c; ++i)
      if (!(token[i] - token[i] == 0)) grad[i] = 0;
  }
};

}  // namespace subquad::SUBQUAD_ISA
