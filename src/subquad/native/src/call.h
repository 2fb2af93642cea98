// The arguments of the C interface: pointers, sizes and strides, independent of PyTorch.
//
// calls.py mirrors the structures field by field. "Wide" is float64 if q, k and v are float64, else float32.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

enum SubquadMap : int64_t { TAYLOR, POSITIVE, HYPERBOLIC, ELU, RELU, IDENTITY, LOGGED, SEPARABLE };
enum SubquadType : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum SubquadResult : int { OK, NO_MEMORY, POISONED };

// The caller pads rows to a multiple of this many numbers: whole vectors in every instruction set.
constexpr int64_t SUBQUAD_PADDING = 16;
constexpr int64_t SUBQUAD_PAIR_BLOCK = 64;  // tokens of a block in pairs.h, which limits the parts of a head
constexpr int64_t SUBQUAD_LEVELS = 24;      // group sizes in a call of Multipole, at most

struct SubquadTensor {  // strides in elements; keys and values have no groups
  const void* data;
  int64_t type, batch, group, token, element;
};

struct SubquadCall {
  // LOGGED: the features are given; keys have a last column, the logarithm of their scale.
  // SEPARABLE: causal, with equal numbers of queries and keys, and without sums before or after; see separable.h.
  int64_t map;
  int64_t degree;   // of TAYLOR
  int64_t wide;     // 1: q, k and v are FLOAT64; 0: each has one of the other types
  int64_t threads;  // the number of threads to use
  int64_t causal, normalized;
  int64_t chunk;  // tokens of a chunk, above 0
  int64_t pairs;  // 1: compute every pair instead of sums of features; only TAYLOR without sums before or after
  int64_t parts;  // parts of a head, each computed by one thread
  int64_t batch, group, queries, keys, query_width, key_width, values, features;
  double query_scale, key_scale;
  SubquadTensor q, k, v;
  const uint8_t* keep;  // (b, m), or null: no key is hidden
  const void* table;    // TAYLOR: the weights (r,); POSITIVE, HYPERBOLIC: the projections (rows, d); wide
  const void* turned;   // the projections transposed, (d, rows), with rows padded to a multiple of SUBQUAD_PADDING
  // The sums over the keys before these, and over all keys: (b, e + 1, r), (b,), (b,); each may be null. Wide.
  const void *before, *before_poison, *before_scale;
  void *after, *after_poison, *after_scale;
  // (b, g, n, e), (b, g, n) and (b, g, n), wide. The output is finite, as the backward pass needs it; the caller adds
  // the poison, 0 or NaN. SEPARABLE: the normalizer is 1, or 0 in the rows that PyTorch has to compute.
  void *output, *normalizer, *poison;
  // Only for the backward pass.
  SubquadTensor output_grad;       // wide
  void *q_grad, *k_grad, *v_grad;  // (b, g, n, d), (b, m, d), (b, m, e), wide
};

// Moments of units of keys, where a unit is a block or a group of `size` blocks; all wide. `count` units are valid, and
// there is space for `stride`.
struct SubquadLevel {
  int64_t size, rank, count, stride;
  const void* keys;    // (b, 1 + rank, d, stride)
  const void* spread;  // (b, rank (rank + 1) / 2, stride)
  const void* values;  // (b, 1 + rank, stride, e)
};

// See multipole.h. The value width `values` is a multiple of SUBQUAD_PADDING.
struct SubquadMultipole {
  int64_t wide, threads, batch, group, queries, keys, width, values;
  int64_t block, sinks, top, opened, grouped_from, least_group, groups_count, k_batch, v_batch;
  double widest;        // cap on the variance of the logits of a unit
  const void* q;        // (b, g, n, d), scaled; wide and finite, as are k and v
  const void *k, *v;    // (b, m, d) and (b, m, e); consecutive heads are k_batch and v_batch elements apart
  const int64_t* sees;  // (b, n): the number of keys that a query sees
  const int64_t* far;   // (b, n): the number of blocks among them that count as far
  SubquadLevel blocks;
  SubquadLevel groups[SUBQUAD_LEVELS];
  void* output;  // (b, g, n, e), wide
};

#define SUBQUAD_PUBLIC __attribute__((visibility("default")))

// The first and the third return POISONED if any output is.
SUBQUAD_PUBLIC SubquadResult subquad_forward(const SubquadCall* call);
SUBQUAD_PUBLIC SubquadResult subquad_backward(const SubquadCall* call);
// One token. `after` may be `before`.
SUBQUAD_PUBLIC SubquadResult subquad_step(const SubquadCall* call);
SUBQUAD_PUBLIC SubquadResult subquad_multipole(const SubquadMultipole* call);

// Run on the OpenMP threads that this GOMP_parallel starts. Null, the initial state: start threads for each call.
SUBQUAD_PUBLIC void subquad_use_team(void* gomp_parallel);

SUBQUAD_PUBLIC const char* subquad_instructions(void);  // the instruction set in use
SUBQUAD_PUBLIC const char* subquad_interface(void);     // everything that the caller must agree on
}
