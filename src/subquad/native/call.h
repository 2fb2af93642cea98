// What a call of the C interface says: pointers, sizes and strides; nothing of torch.
//
// Mirrored, field by field, by `Call` in _library.py. "Wide" is float64 where q, k and v are, and else float32.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

enum SubquadMap : int64_t { TAYLOR, POSITIVE, HYPERBOLIC, ELU, RELU, IDENTITY, LOGGED, SEPARABLE };
enum SubquadType : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

struct SubquadTensor {  // strides in elements; keys and values have no groups
  const void* data;
  int64_t type, batch, group, token, element;
};

struct SubquadCall {
  int64_t map;     // LOGGED: features that are given, keys with a last column, the logarithm of their scale;
                   // SEPARABLE: causal, as many queries as keys, no sums before or after; see separable.h
  int64_t degree;  // of TAYLOR
  int64_t wide;    // whether q, k and v are FLOAT64; else each is one of the others
  int64_t threads, causal, normalized;
  int64_t chunk;   // tokens of a chunk at most, or 0: as many as are best
  int64_t batch, group, queries, keys, query_width, key_width, values, features;
  double query_scale, key_scale;
  SubquadTensor q, k, v;
  const uint8_t* keep;  // (b, m), or null: all keys may be seen
  const void* table;    // TAYLOR: the weights (r,); POSITIVE, HYPERBOLIC: the projections (rows, d); wide
  const void* turned;   // the projections (d, rows), each row padded to a multiple of 16
  // The sums of the keys before these, and of all: (b, e + 1, r), (b,), (b,); any of them may be null. Wide.
  const void *before, *before_poison, *before_scale;
  void *after, *after_poison, *after_scale;
  // (b, g, n, e), (b, g, n) and (b, g, n), wide: what the backward needs is finite; poison, 0 or NaN, belongs on top.
  // SEPARABLE: the normaliser is 1, or 0 in the rows that are left to torch.
  void *output, *normalizer, *poison;
  // For the backward alone.
  SubquadTensor output_grad;       // wide
  void *q_grad, *k_grad, *v_grad;  // (b, g, n, d), (b, m, d), (b, m, e), wide
};

// Moments of units of keys: blocks, or groups of `size` blocks; all wide. `stride` units have room, `count` are there.
struct SubquadLevel {
  int64_t size, rank, count, stride;
  const void *keys, *spread, *values;  // (b, 1 + rank, d, stride), (b, rank (rank + 1) / 2, stride), (b, 1 + rank, stride, e)
};

// Of multipole.h. Values, there and here, have rows of whole vectors of 64 bytes.
struct SubquadMultipole {
  int64_t wide, threads, batch, group, queries, keys, width, values;
  int64_t block, sinks, top, opened, grouped_from, least_group, groups_count, k_batch, v_batch;
  const void *q, *k, *v;      // (b, g, n, d), scaled; (b, m, d) and (b, m, e), heads k_batch and v_batch apart; wide, finite
  const int64_t *sees, *far;  // (b, n): the keys that a query sees, and the blocks among them that count as far
  SubquadLevel blocks, groups[24];
  void* output;  // (b, g, n, e), wide
};

#define SUBQUAD_PUBLIC __attribute__((visibility("default")))

// 0, or 1 where memory ran out.
SUBQUAD_PUBLIC int subquad_forward(const SubquadCall* call);
SUBQUAD_PUBLIC int subquad_backward(const SubquadCall* call);
SUBQUAD_PUBLIC int subquad_step(const SubquadCall* call);  // one token; `after` may be `before`; 2 where it is poisoned

SUBQUAD_PUBLIC int subquad_multipole(const SubquadMultipole* call);
// From now on by threads of the OpenMP whose GOMP_parallel this is; null: by threads of their own, as at the start.
SUBQUAD_PUBLIC void subquad_use_team(void* gomp_parallel);

SUBQUAD_PUBLIC const char* subquad_instructions(void);  // the set that was chosen
SUBQUAD_PUBLIC int64_t subquad_call_size(void);         // so that a mirror of the call can be checked
SUBQUAD_PUBLIC int64_t subquad_multipole_size(void);
}
