// The arguments of the C interface: pointers, sizes and strides, independent of PyTorch.
//
// calls.py mirrors the structures field by field. "Wide" is float64 if q, k and v are float64, else float32.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

enum SubquadMap : int64_t { TAYLOR, POSITIVE, HYPERBOLIC, ELU, RELU, IDENTITY, LOGGED, SEPARABLE };
enum SubquadType : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum SubquadResult : int { OK, NO_MEMORY, POISONED, SEGMENT_DUE };

// The caller pads rows to a multiple of this many numbers: whole vectors in every instruction set.
constexpr int64_t SUBQUAD_PADDING = 16;
constexpr int64_t SUBQUAD_PAIR_BLOCK = 64;  // tokens of a block in pairs.h, which limits the parts of a head
constexpr int64_t SUBQUAD_FAN = 16;         // blocks of a segment of Multipole
constexpr int64_t SUBQUAD_ROUNDS = 2;       // power iterations for the main direction of its keys

struct SubquadTensor {  // strides in elements; keys and values have no groups
  const void* data;
  int64_t type, batch, group, token, element;
};

struct SubquadCall {
  // LOGGED: the features are given. Keys of LOGGED have a last column, the logarithm of their scale; those of TAYLOR
  // may have one too, and then key_width is query_width + 1. SEPARABLE: causal, with equal numbers of queries and keys,
  // and without sums before or after; see separable.h.
  int64_t map;
  int64_t degree;   // of TAYLOR
  int64_t wide;     // 1: q, k and v are FLOAT64; 0: each has one of the other types
  int64_t threads;  // the number of threads to use
  int64_t causal, normalized;
  int64_t chunk;   // tokens of a chunk, above 0
  int64_t pairs;   // 1: compute every pair instead of sums of features; only TAYLOR without sums before or after
  int64_t parts;   // parts of a head: of its features, or by pairs of its rows
  int64_t shared;  // whether several threads share a head
  int64_t batch, group, queries, keys, query_width, key_width, values, features;
  int64_t heads, tilted;  // of the coordinates, 0 if there are none; and whether keys have a log-scale by their tilt
  double query_scale, key_scale;
  SubquadTensor q, k, v;
  const uint8_t* keep;  // (b, m), or null: no key is hidden
  const void* table;    // TAYLOR: the weights (r,); wide
  // POSITIVE, HYPERBOLIC: the projections transposed, (d, rows), and below them the constants (rows,) that are added to
  // the exponents; rows padded to a multiple of SUBQUAD_PADDING with zeros; wide
  const void* turned;
  // The sums over the keys before these, and over all keys: (b, e + 1, r), (b,), (b,); each may be null. Wide. The
  // poison of sums is the number of visible keys, NaN once one of them is not finite.
  const void *before, *before_poison, *before_scale;
  // (heads, 5, d), wide, or null: factor and offset of scaled queries, factor and offset of scaled keys, and the tilt:
  // the log-scale of a key is its product with the tilt. Head b has those of b % heads.
  const void* coordinates;
  void *after, *after_poison, *after_scale;
  // (b, g, n, e), (b, g, n) and (b, g, n), wide. The output is finite, as the backward pass needs it; the caller adds
  // the poison, 0 or NaN. SEPARABLE: the normalizer is 1, or 0 in the rows that PyTorch has to compute.
  void *output, *normalizer, *poison;
  // Only for the backward pass.
  SubquadTensor output_grad;       // wide
  void *q_grad, *k_grad, *v_grad;  // (b, g, n, d), (b, m, d), (b, m, e), wide
  const void* after_grad;          // of the sums over all keys, (b, e + 1, r), or null; wide
  void* before_grad;               // of the sums before these keys, the same
};

// Multipole. The value width `values` is a multiple of SUBQUAD_PADDING; all numbers are wide and finite. Keys are in
// panels (d, 16), see panels.h. Key j of a head, not counting the sinks, belongs to segment j / (16 block).
//
// table: (segments, 2): the address of a segment's record for head 0, and the numbers of T from one head to the next
// roots: (b, root_count, header)
// raw:   the keys after the first `base` (b,) segments, in their order: (b, raw_panels, d, 16); (b, raw_panels 16, e)

// Finish the segments [first, last), (b,) each, of every head.
struct SubquadSegments {
  int64_t wide, threads, batch, width, values, block, raw_panels, root_count, segments;
  const void *raw_keys, *raw_values;
  const int64_t *base, *first, *last, *table;
  void* roots;
  int32_t* order;  // (b, segments, 16 block), or null: the place in the segment from which each key came
};

struct SubquadMultipole {
  int64_t wide, threads, batch, group, queries, width, values;
  int64_t block, sinks, window, top, looks, opened, grouped_from, raw_panels, root_count;
  int64_t query_batch, query_group, query_token;     // strides of the queries, in numbers
  int64_t output_batch, output_group, output_token;  // strides of the output
  double scale;                                      // factor of the queries
  double widest;                                     // cap on the variance of the logits of a block
  const void* q;                                     // (b, g, n, d)
  const void *sink_keys, *sink_values;               // (b, sink panels, d, 16) and (b, sink panels 16, e)
  void *raw_keys, *raw_values;
  const int64_t *base, *sees, *table;  // sees: (b, n), the number of keys that a query sees
  const void* roots;
  void* output;              // (b, g, n, e)
  void* level;               // (b, g, n), or null: the logarithm of the sum of the weights
  int32_t* chosen;           // (b, g, n, top), or null: the blocks that a query read; filled with -1 before
  int32_t* opened_segments;  // (b, g, n, opened), or null: the segments that it opened; filled with -1 before
  // Only for a step, of one query: the new key and value of each head, whether it is visible (or null), and the number
  // of keys that each head has, which the step increases.
  const void *key, *value;
  const uint8_t* keep;
  int64_t* filled;
};

// The gradients of a call with contiguous queries, already scaled, whose output, level, chosen and opened_segments are
// given. `row` is the key width in whole panels, u all blocks, and every array of gradients holds (b, parts, ...),
// filled with 0 before.
struct SubquadMultipoleGradient {
  SubquadMultipole call;
  int64_t segments, parts;
  const void* output_grad;                         // (b, g, n, e)
  const void *sink_rows, *sink_value_panels;       // (b, sinks, row), (b, panels, e, 16)
  const void *raw_rows, *raw_value_panels;         // the same of the raw keys
  const void *block_rows, *block_value_panels;     // (b, u block, row), (b, u, e, 16): keys in sorted order
  const void *centers, *mean_panels;               // (b, u, row), (b, segments, e, 16)
  const void *root_centers, *root_mean_panels;     // (b, roots 16, row), (b, roots, e, 16)
  void* q_grad;                                    // (b, g, n, d)
  void *sink_key_grads, *sink_value_grads;         // (sinks, row), (sinks, e)
  void *raw_key_grads, *raw_value_grads;           // (raw keys, row), (raw keys, e)
  void *block_key_grads, *block_value_grads;       // (u block, row), (u block, e)
  void *center_grads, *mean_grads, *square_grads;  // (u, row), (u, e), (u)
  void *root_center_grads, *root_mean_grads, *root_square_grads;  // (roots 16, row), (roots 16, e), (roots 16)
};

// Exact softmax over some of the pairs; see seen.h and sparse.h. Inputs have any type and strides, other numbers are
// wide.
struct SubquadSparse {
  int64_t wide, threads, batch, key_heads, group, queries, keys, width, values;
  int64_t keep_batch, bounds_batch;                                        // numbers between those of heads; or 0
  int64_t layout_heads, query_blocks, key_blocks, query_block, key_block;  // of the layout
  double scale, softcap;                                                   // softcap 0: none
  SubquadTensor q, k, v;
  const uint8_t* keep;             // (b, m), or null: no key is hidden
  const int32_t* bounds;           // (b, 4, n): first, first_end, near, near_end
  const uint8_t* layout;           // (layout_heads, query_blocks, key_blocks), or null
  const void* sinks;               // (key_heads * group), or null: logits of the learned sinks
  void *output, *level;            // (b, g, n, e) and (b, g, n): the logarithm of the sum of the weights
  void* poison;                    // (b, g, n), 0 or NaN; the output is finite
  SubquadTensor output_grad;       // from here on only for the backward pass
  const void* level_grad;          // (b, g, n), or null: 0
  void* delta;                     // (b, g, n): do.out - dl, also an output
  void *q_grad, *k_grad, *v_grad;  // the first, or the other two, may be null
};

#define SUBQUAD_PUBLIC __attribute__((visibility("default")))

// The first and the third return POISONED if any output is.
SUBQUAD_PUBLIC SubquadResult subquad_forward(const SubquadCall* call);
SUBQUAD_PUBLIC SubquadResult subquad_backward(const SubquadCall* call);
// One token. `after` may be `before`.
SUBQUAD_PUBLIC SubquadResult subquad_step(const SubquadCall* call);
SUBQUAD_PUBLIC SubquadResult subquad_multipole(const SubquadMultipole* call);
SUBQUAD_PUBLIC SubquadResult subquad_multipole_backward(const SubquadMultipoleGradient* call);
SUBQUAD_PUBLIC SubquadResult subquad_segments(const SubquadSegments* call);
// Append one key to the raw keys and compute its queries. Nothing was done if the result is POISONED, because a number
// is not finite, or SEGMENT_DUE, because a segment has to be finished first.
SUBQUAD_PUBLIC SubquadResult subquad_multipole_step(const SubquadMultipole* call);
// The first returns POISONED if any output is.
SUBQUAD_PUBLIC SubquadResult subquad_sparse(const SubquadSparse* call);
SUBQUAD_PUBLIC SubquadResult subquad_sparse_backward(const SubquadSparse* call);

// Run on the OpenMP threads that this GOMP_parallel starts. Null, the initial state: start threads for each call.
SUBQUAD_PUBLIC void subquad_use_team(void* gomp_parallel);

SUBQUAD_PUBLIC const char* subquad_instructions(void);  // the instruction set in use
SUBQUAD_PUBLIC const char* subquad_interface(void);     // everything that the caller must agree on
}
