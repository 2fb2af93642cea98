// Every pair of a query and a key, for sequences so short that sums of features would cost more: O(n m), no features.
//
//   o_i = sum_j w_ij v_j,   w_ij = (1 + x + ... + x^p/p!) exp(c_j - top_i),   x = q_i.k_j
//
// c_j is the log-scale of a key, if it has one, and top_i the largest that row i sees. For a block of keys that a row
// sees as a whole, the factor is exp(c_j - largest of the block) exp(largest of the block - top_i): no exponential for
// every pair.
//
// Blocks of 64 queries (columns) and 64 keys (rows) have 64 x 64 weights, which stay in the first-level cache. The
// backward pass does the same for the gradients of queries, and then with the sides exchanged for those of keys. All
// keys of the head, and in the backward pass its queries, are read once at the beginning.
#pragma once

#include "head.h"
#include "product.h"

namespace subquad::SUBQUAD_ISA {

constexpr Size BLOCK_TOKENS = SUBQUAD_PAIR_BLOCK;

template <class T> class Pairs {
 public:
  Pairs(const SubquadCall& call, bool differentiated)
      : call(call), head(call), rows(head.rows), value_row(head.value_row), token_row(head.token_row),
        keys(call.keys * token_row), values(call.keys * value_row), key_poison(call.keys),
        queries(differentiated ? call.group * call.queries * token_row : BLOCK_TOKENS * token_row),
        grads(differentiated ? call.group * call.queries * value_row : 0),
        query_poison(differentiated ? call.group * call.queries : BLOCK_TOKENS), columns(token_row * BLOCK_TOKENS),
        value_columns(rows * BLOCK_TOKENS), answers(rows * BLOCK_TOKENS), found(token_row * BLOCK_TOKENS),
        weights(BLOCK_TOKENS * BLOCK_TOKENS), slopes(BLOCK_TOKENS * BLOCK_TOKENS),
        logged(call.key_width > call.query_width || call.tilted), key_scale(logged ? call.keys + BLOCK_TOKENS : 0),
        near(logged ? call.keys + BLOCK_TOKENS : 0), block_top(logged ? call.keys / BLOCK_TOKENS + 1 : 0),
        top(logged ? call.queries + BLOCK_TOKENS : 0), far(logged ? BLOCK_TOKENS : 0), within_block(BLOCK_TOKENS) {}

  // Consecutive blocks of queries go to different parts, because later blocks see more keys.
  void forward(Size b, Size part, Size parts) {
    read_keys(b);
    T before = 0, everything = 0;
    for (Size t = 0; t < call.keys; ++t) everything += key_poison[t];
    for (Size first = 0; first < call.queries; first += BLOCK_TOKENS) {
      const Size count = std::min(BLOCK_TOKENS, Size(call.queries) - first);
      for (Size g = 0; g < call.group && first / BLOCK_TOKENS % parts == part; ++g) {
        head.read_queries(b, g, first, count, queries, query_poison);
        put_columns(queries, token_row, count, call.query_width, columns);
        std::fill(answers + 0, answers + rows * BLOCK_TOKENS, T(0));
        for (Size k = 0; k < (call.causal ? first + count : call.keys); k += BLOCK_TOKENS) {
          const Size others = std::min(BLOCK_TOKENS, Size(call.keys) - k);
          meet<false>(keys + k * token_row, others, first, k);
          add_product<T>(rows, BLOCK_TOKENS, others, {values + k * value_row, 1, value_row}, weights, BLOCK_TOKENS,
                         answers, BLOCK_TOKENS);
        }
        head.write_answers(b, g, first, count, answers, BLOCK_TOKENS);
        head.write_poison(b, g, first, count, call.causal ? before : everything,
                          call.causal ? key_poison + first : nullptr, query_poison);
      }
      for (Size t = first; call.causal && t < first + count; ++t) before += key_poison[t];
    }
  }

  void backward(Size b, Size part, Size parts, T* q_grad, T* k_grad, T* v_grad) {
    read_keys(b);
    for (Size g = 0; g < call.group; ++g) {
      const Size start = g * call.queries;
      head.read_queries(b, g, 0, call.queries, queries + start * token_row, query_poison + start);
      head.read_grads(b, g, 0, call.queries, grads + start * value_row);
    }
    for (Size first = 0; first < call.queries; first += BLOCK_TOKENS) {
      const Size count = std::min(BLOCK_TOKENS, Size(call.queries) - first);
      for (Size g = 0; g < call.group && first / BLOCK_TOKENS % parts == part; ++g) {
        const Size start = g * call.queries + first;
        put_columns(queries + start * token_row, token_row, count, call.query_width, columns);
        put_columns(grads + start * value_row, value_row, count, rows, value_columns);
        std::fill(found + 0, found + token_row * BLOCK_TOKENS, T(0));
        for (Size k = 0; k < (call.causal ? first + count : call.keys); k += BLOCK_TOKENS) {
          const Size others = std::min(BLOCK_TOKENS, Size(call.keys) - k);
          meet<true>(keys + k * token_row, others, first, k);
          descend(keys + k * token_row, values + k * value_row, others);
        }
        head.write_grads(call.q, b, g, first, count, call.query_width, T(call.query_scale), found, BLOCK_TOKENS,
                         query_poison + start, false, q_grad + start * call.query_width, coordinate<T>(call, b, 0));
      }
    }
    for (Size first = 0; first < call.keys; first += BLOCK_TOKENS) {
      if (first / BLOCK_TOKENS % parts != part) continue;
      const Size count = std::min(BLOCK_TOKENS, Size(call.keys) - first);
      put_columns(keys + first * token_row, token_row, count, call.query_width, columns);
      put_columns(values + first * value_row, value_row, count, rows, value_columns);
      std::fill(found + 0, found + token_row * BLOCK_TOKENS, T(0));
      std::fill(answers + 0, answers + rows * BLOCK_TOKENS, T(0));
      for (Size g = 0; g < call.group; ++g)
        for (Size q = call.causal ? first : 0; q < call.queries; q += BLOCK_TOKENS) {
          const Size start = g * call.queries + q, others = std::min(BLOCK_TOKENS, Size(call.queries) - q);
          meet<true, true>(queries + start * token_row, others, q, first);
          add_product<T>(rows, BLOCK_TOKENS, others, {grads + start * value_row, 1, value_row}, weights, BLOCK_TOKENS,
                         answers, BLOCK_TOKENS);
          descend(queries + start * token_row, grads + start * value_row, others);
        }
      if (logged) head.log_scale_grads(value_columns, answers, BLOCK_TOKENS, found + call.query_width * BLOCK_TOKENS);
      head.write_grads(call.k, b, 0, first, count, call.key_width, T(call.key_scale), found, BLOCK_TOKENS,
                       key_poison + first, true, k_grad + first * call.key_width, coordinate<T>(call, b, 2),
                       call.tilted ? coordinate<T>(call, b, 4) : nullptr);
      head.write_grads(call.v, b, 0, first, count, call.values, T(1), answers, BLOCK_TOKENS, key_poison + first, true,
                       v_grad + first * call.values);
    }
  }

 private:
  const SubquadCall& call;
  const Head<T> head;
  const Size rows, value_row, token_row;
  Buffer<T> keys, values, key_poison;      // of the whole head
  Buffer<T> queries, grads, query_poison;  // of the whole head; in the forward pass, of one block
  Buffer<T> columns, value_columns;        // (width, BLOCK_TOKENS) and (rows, BLOCK_TOKENS): the reading tokens
  Buffer<T> answers, found;                // (rows, BLOCK_TOKENS), and the gradients of the tokens
  Buffer<T> weights, slopes;               // (BLOCK_TOKENS, BLOCK_TOKENS): the other tokens by the reading tokens
  const bool logged;                       // whether the log-scale of a key is its last column
  Buffer<T> key_scale, near;               // of all keys: c, and exp(c - block_top)
  Buffer<T> block_top, top, far;  // largest c of a block of keys, and of a row; exp(block_top - top) of 64 rows
  PairFactors<T> within_block;    // of the pairs inside a causal block

  void read_keys(Size b) {
    head.read_keys(b, 0, call.keys, keys, values, key_poison);
    if (!logged) return;
    T highest = -INFINITY;
    for (Size first = 0; first < call.keys; first += BLOCK_TOKENS) {
      const Size end = std::min(first + BLOCK_TOKENS, Size(call.keys));
      T& most = block_top[first / BLOCK_TOKENS] = -INFINITY;
      for (Size t = first; t < end; ++t) {
        key_scale[t] = head.hidden(b, t) ? T(-INFINITY) : keys[t * token_row + call.query_width];
        most = std::max(most, key_scale[t]);
        highest = std::max(highest, key_scale[t]);
        if (call.causal) top[t] = highest == T(-INFINITY) ? T(0) : highest;
      }
      for (Size t = first; t < end; ++t) near[t] = raised(key_scale[t], most);
    }
    for (Size t = 0; !call.causal && t < call.queries; ++t) top[t] = highest == T(-INFINITY) ? T(0) : highest;
  }

  // exp(block_top - top) of the rows from `first` on, for the block of keys at `key`; 0 if all of its keys are hidden.
  void find_far(Size first, Size key) {
    const T most = block_top[key / BLOCK_TOKENS];
    for (Size t = 0; t < BLOCK_TOKENS; t += lanes<T>)
      store(far + t, most == T(-INFINITY) ? vec<T>{} : exp(not_above<T>(most - load(top + first + t), T(0))));
  }

  void put_columns(const T* from, Size row, Size count, Size width, T* to) const {
    if (count < BLOCK_TOKENS) std::fill(to, to + width * BLOCK_TOKENS, T(0));
    turn(from, row, count, width, to, BLOCK_TOKENS);
  }

  // Weights and slopes of `others`, keys for reading queries or, if `reversed`, queries for reading keys; the queries
  // begin at `query` and the keys at `key`. Within a causal block a query sees the keys up to its own position.
  template <bool with_slopes, bool reversed = false> void meet(const T* others, Size count, Size query, Size key) {
    const bool within = call.causal && query == key;
    if (logged && within) within_block.find(key_scale + key, top + query, BLOCK_TOKENS);
    if (logged && !within) find_far(query, key);
    set_product<T>(count, BLOCK_TOKENS, call.query_width, {others, token_row, 1}, columns, BLOCK_TOKENS, weights,
                   BLOCK_TOKENS);
    for (Size i = 0; i < count; ++i)
      for (Size t = 0; t < BLOCK_TOKENS; t += lanes<T>) {
        const vec<T> x = load(weights + i * BLOCK_TOKENS + t);
        vec<T> weight = series<T>(x, call.degree), slope{};
        if (with_slopes) slope = series<T>(x, call.degree - 1);
        if (logged) {
          const vec<T> factor = factors<reversed>(within, i, t, query, key);
          weight *= factor;
          slope *= factor;
        }
        if (within) {
          const mask<T> seen = reversed ? places<T>(t) <= places<T>(i, 0) : places<T>(t) >= places<T>(i, 0);
          weight = seen ? weight : vec<T>{};
          slope = seen ? slope : vec<T>{};
        }
        store(weights + i * BLOCK_TOKENS + t, weight);
        if (with_slopes) store(slopes + i * BLOCK_TOKENS + t, slope);
      }
  }

  // exp(c - top) of pairs: a query and several keys if `reversed`, else a key and several queries.
  template <bool reversed> vec<T> factors(bool within, Size i, Size t, Size query, Size key) const {
    if (!within) return reversed ? load(near + key + t) * far[i] : load(far + t) * near[key + i];
    const T *above = within_block.above, *below = within_block.below, *tops = top + query, *scales = key_scale + key;
    if (reversed) return within_block.of(load(scales + t), load(above + t), all(tops[i]), all(below[i]));
    return within_block.of(all(scales[i]), all(above[i]), load(tops + t), load(below + t));
  }

  void descend(const T* others, const T* of_others, Size count) {
    set_product<T>(count, BLOCK_TOKENS, rows, {of_others, value_row, 1}, value_columns, BLOCK_TOKENS, weights,
                   BLOCK_TOKENS);
    for (Size i = 0; i < count * BLOCK_TOKENS; i += lanes<T>)
      store(weights + i, sloped<T>(load(weights + i), load(slopes + i)));
    add_product<T>(call.query_width, BLOCK_TOKENS, count, {others, 1, token_row}, weights, BLOCK_TOKENS, found,
                   BLOCK_TOKENS);
  }
};

}  // namespace subquad::SUBQUAD_ISA
