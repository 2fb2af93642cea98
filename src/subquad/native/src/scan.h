// Attention through sums of features, forward and backward, chunk by chunk.
//
//   S[e][f] = sum_j v_j[e] phi_f(k_j)     over the keys before a chunk; v ends with a 1 for the normalizer
//   o_i     = sum_f S[:, f] phi_f(q_i) + sum_j w(q_i, k_j) v_j     over the keys j <= i of the chunk itself
//
// The backward pass needs S of every chunk, and the corresponding sum of gradients over the queries after it,
// dS[e][f] = sum_i do_i[e] phi_f(q_i). S grows forward and dS backward, so there are two passes over the chunks:
// neither stores states, and neither recovers one by subtraction. dS begins as the gradient of the sums over all keys,
// if they were returned, and ends as the gradient of the sums before these keys. In both passes, one side is summed
// (`Source`, token-major) and the other side reads the sums (`Reader`, feature-major), so nearly all work is in three
// block products whose vectors run over features or over tokens:
//
//   absorb    S[e][f]   += V[t][e] phi[t][f]       add a chunk to the sums
//   answer    O[e][t]   += S[e][f] phi[f][t]       read the sums
//   descend   dphi[f][t] = S[e][f] dO[e][t]        the gradient of what was read
//
// Vectors never run over e, so no value width wastes lanes, and the normalizer is one more row. S (0.6 MB for Taylor(2)
// at width 64) stays in the second-level cache, which keeps up with the arithmetic because 32 or 64 tokens use each
// number that is loaded. Pairs inside a chunk are 3 % of the work of Taylor(2) at width 64, and 13 % at width 16.
//
// Keys with a log-scale c: sums are relative to `level`, the largest c so far, and each row to the largest c it sees.
#pragma once

#include "head.h"
#include "maps.h"

namespace subquad::SUBQUAD_ISA {

template <class T> class Scan {
 public:
  // Scan the parts [part, end_part) of a head's features. Each part is summed up by itself, then the parts are added in
  // their order: so it makes no difference to any bit whether one thread has all parts, or each thread one of them.
  Scan(const Shape& s, Size part, Size end_part, Size parts, bool differentiated)
      : s(s), call(s.call), c(s.chunk), part(part), end_part(end_part), parts(parts), first_panel(panel_of(part)),
        end_panel(panel_of(end_part)), head(call), rows(head.rows), value_row(head.value_row),
        token_row(head.token_row), source(s), reader(s, differentiated),
        sums((end_panel - first_panel) * rows * s.panel), tokens(c * token_row), columns(token_row * c),
        values(c * value_row), value_columns(rows * c), grads(c * value_row), grad_columns(rows * c),
        faded(c * value_row), faded_columns(rows * c), answers(rows * c), total(end_part - part > 1 ? rows * c : 0),
        weights(c * c), slopes(differentiated ? c * c : 0), query_poison(c), key_poison(c), key_scale(c), top(c),
        fade(c), near(c) {}

  // Write outputs (g, n, e) and normalizers (g, n). If this is not all parts, write the unnormalized sums of both to
  // `share` (g, n, e + 1) instead.
  void forward(Size b, T* share) {
    begin(b);
    if (!call.causal) absorb_all_keys(b);
    for (Size first = 0; first < call.queries; first += s.tokens) {
      if (call.causal) take_keys_as_source(b, first);
      find_tops();
      for (Size g = 0; g < call.group; ++g) {
        take_queries_as_reader(b, g, first);
        for (Size own = part; own < end_part; ++own) {
          answer(panel_of(own), panel_of(own + 1));
          if (call.causal && first / s.tokens % parts == own) {
            meet_source_keys<false>();
            add_product<T>(rows, c, key_count, {values, 1, value_row}, weights, c, answers, c);
          }
          if (end_part - part > 1) add_to_total(own == part);
        }
        write_answers(b, g, first, end_part - part > 1 ? total : answers, share);
      }
      if (call.causal) absorb_keys(first + s.tokens < call.queries || call.after);
    }
    end(b);
  }

  // Write the gradients (g, n, d), (m, d) and (m, e) of one head; all parts.
  void backward(Size b, T* q_grad, T* k_grad, T* v_grad) {
    const Buffer<T> levels(chunks_of_keys() + 1);  // before each chunk, and after the last
    differentiate_queries(b, q_grad, levels);
    differentiate_keys(b, k_grad, v_grad, levels);
  }

  // The two passes of `backward` by themselves, for two threads that share a head: the same bits.
  void backward_queries(Size b, T* q_grad) {
    const Buffer<T> levels(chunks_of_keys() + 1);
    differentiate_queries(b, q_grad, levels);
  }

  void backward_keys(Size b, T* k_grad, T* v_grad) {
    const Buffer<T> levels(chunks_of_keys() + 1);
    begin(b);
    for (Size i = 0; i < chunks_of_keys(); ++i) {
      levels[i] = level;
      if (s.scaled) take_keys_as_source(b, i * s.tokens);
      absorb_keys(false);
    }
    levels[chunks_of_keys()] = level;
    differentiate_keys(b, k_grad, v_grad, levels);
  }

 private:
  const Shape& s;
  const SubquadCall& call;
  const Size c, part, end_part, parts, first_panel, end_panel;
  const Head<T> head;
  const Size rows, value_row, token_row;  // rows: of S, the value width plus 1
  Source<T> source;
  Reader<T> reader;
  Buffer<T> sums;                      // one panel after another, each (rows, s.panel)
  Buffer<T> tokens, columns;           // (c, token_row), and transposed: inputs of the maps
  Buffer<T> values, value_columns;     // of keys, followed by a 1
  Buffer<T> grads, grad_columns;       // of the numerator and of the normalizer
  Buffer<T> faded, faded_columns;      // values or gradients, times a factor per token
  Buffer<T> answers, total;            // (rows, c): of one part, and of the parts so far
  Buffer<T> weights, slopes;           // (c, c): source tokens by reader tokens
  Buffer<T> query_poison, key_poison;  // as `Head` reads them
  Buffer<T> key_scale, top, fade;      // c of the keys; the largest c each row sees; exp(level - top)
  PairFactors<T> near;                 // of the pairs inside a chunk
  bool nothing = true;                 // whether no token has been added to the sums
  T level = 0, seen_poison = 0;
  Size query_count = 0, key_count = 0;  // valid tokens of the chunk; the rest are zeros

  T* panel_sums(Size p) { return sums + (p - first_panel) * rows * s.panel; }
  Size chunks_of_keys() const { return (call.keys + s.tokens - 1) / s.tokens; }
  Size panel_of(Size own) const { return s.panels * own / parts; }

  // --- Passes of the backward ----------------------------------------------------------------------------------------

  // Forward over the chunks: S, and the gradients of queries. Keep the levels for the other pass.
  void differentiate_queries(Size b, T* q_grad, T* levels) {
    begin(b);
    if (!call.causal) absorb_all_keys(b);
    for (Size first = 0; first < call.queries; first += s.tokens) {
      if (call.causal) take_keys_as_source(b, first);
      if (call.causal) levels[first / s.tokens] = level;
      find_tops();
      for (Size g = 0; g < call.group; ++g) {
        take_queries_as_reader(b, g, first);
        take_grads(b, g, first);
        turn(grads + 0, value_row, c, rows, grad_columns + 0, c);
        reader.forget();
        descend(times_columns(grad_columns, fade, faded_columns));
        if (call.causal) {
          meet_source_keys<true>();
          descend_pairs({values, value_row, 1}, key_count, grad_columns);
        }
        head.write_grads(call.q, b, g, first, query_count, call.query_width, T(call.query_scale), reader.finish(), c,
                         query_poison, false, q_grad + (g * call.queries + first) * call.query_width,
                         coordinate<T>(call, b, 0));
      }
      if (call.causal) absorb_keys(first + s.tokens < call.queries);
    }
    levels[chunks_of_keys()] = level;
  }

  // Backward over the chunks: dS, and the gradients of keys and values.
  void differentiate_keys(Size b, T* k_grad, T* v_grad, const T* levels) {
    clear();
    level = levels[chunks_of_keys()];
    take_after_grad(b);
    if (!call.causal) {
      find_tops();
      for (Size first = 0; first < call.queries; first += s.tokens)
        for (Size g = 0; g < call.group; ++g) {
          take_queries_as_source(b, g, first);
          absorb(times_rows(grads, fade));
        }
    }
    for (Size i = chunks_of_keys() - 1; i >= 0; --i) {
      const Size first = i * s.tokens;
      take_keys_as_reader(b, first);
      const T before = call.causal ? levels[i] : level, after = call.causal ? levels[i + 1] : level;
      find_fade(key_scale, after);
      reader.forget();
      descend(times_columns(value_columns, fade, faded_columns));
      answer(first_panel, end_panel);
      if (call.causal) {
        if (s.scaled) times_sums(raised(before, after));
        level = before;
        find_tops();
        for (Size g = 0; g < call.group; ++g) {
          take_queries_as_source(b, g, first);
          if (first > 0 || call.before_grad) absorb(times_rows(grads, fade));
          meet_source_queries();
          add_product<T>(rows, c, query_count, {grads, 1, value_row}, weights, c, answers, c);
          descend_pairs({grads, value_row, 1}, query_count, value_columns);
        }
      }
      T* grads_of_keys = reader.finish();
      if (s.logged) head.log_scale_grads(value_columns, answers, c, grads_of_keys + s.width * c);
      head.write_grads(call.k, b, 0, first, key_count, call.key_width, T(call.key_scale), grads_of_keys, c, key_poison,
                       true, k_grad + first * call.key_width, coordinate<T>(call, b, 2),
                       call.tilted ? coordinate<T>(call, b, 4) : nullptr);
      head.write_grads(call.v, b, 0, first, key_count, call.values, T(1), answers, c, key_poison, true,
                       v_grad + first * call.values);
    }
    write_before_grad(b);
  }

  // --- Sums ----------------------------------------------------------------------------------------------------------

  void clear() {
    std::fill(sums + 0, sums + (end_panel - first_panel) * rows * s.panel, T(0));
    nothing = true;
  }

  void begin(Size b) {
    clear();
    level = s.scaled ? T(-INFINITY) : T(0);
    seen_poison = call.before_poison ? static_cast<const T*>(call.before_poison)[b] : T(0);
    for (Size t = 0; t < c; ++t) fade[t] = 1;
    if (!call.before) return;
    nothing = false;
    if (s.scaled) level = static_cast<const T*>(call.before_scale)[b];
    const T* before = static_cast<const T*>(call.before) + b * rows * s.features;
    for (Size p = first_panel; p < end_panel; ++p)
      for (Size e = 0; e < rows; ++e)
        for (Size f = 0; f < s.count(p); ++f)
          panel_sums(p)[e * s.panel + f] = before[e * s.features + s.first(p) + f] / weight(s.first(p) + f);
  }

  void end(Size b) {
    if (!call.after) return;
    T* after = static_cast<T*>(call.after) + b * rows * s.features;
    for (Size p = first_panel; p < end_panel; ++p)
      for (Size e = 0; e < rows; ++e)
        for (Size f = 0; f < s.count(p); ++f)
          after[e * s.features + s.first(p) + f] = panel_sums(p)[e * s.panel + f] * weight(s.first(p) + f);
    if (part) return;
    static_cast<T*>(call.after_poison)[b] = seen_poison;
    if (s.scaled) static_cast<T*>(call.after_scale)[b] = level;
  }

  // A query reads the public sums by features without weights, so the gradients of these sums have none either.
  void take_after_grad(Size b) {
    if (!call.after_grad) return;
    nothing = false;
    const T* after = static_cast<const T*>(call.after_grad) + b * rows * s.features;
    for (Size p = first_panel; p < end_panel; ++p)
      for (Size e = 0; e < rows; ++e)
        std::copy_n(after + e * s.features + s.first(p), s.count(p), panel_sums(p) + e * s.panel);
  }

  void write_before_grad(Size b) {
    if (!call.before_grad) return;
    // A causal pass has arrived at the level of the sums before; otherwise the level is that of all keys.
    if (s.scaled && !call.causal) times_sums(raised(static_cast<const T*>(call.before_scale)[b], level));
    T* before = static_cast<T*>(call.before_grad) + b * rows * s.features;
    for (Size p = first_panel; p < end_panel; ++p)
      for (Size e = 0; e < rows; ++e)
        std::copy_n(panel_sums(p) + e * s.panel, s.count(p), before + e * s.features + s.first(p));
  }

  T weight(Size f) const { return s.series ? static_cast<const T*>(call.table)[f] : T(1); }

  void times_sums(T factor) {
    if (factor == 1) return;
    for (Size i = 0; i < (end_panel - first_panel) * rows * s.panel; i += lanes<T>)
      store(sums + i, load(sums + i) * factor);
  }

  void absorb(const T* rows_of) {
    nothing = false;
    for (Size p = first_panel; p < end_panel; ++p)
      add_product<T>(rows, padded<T>(s.count(p)), c, {rows_of, 1, value_row}, source.panel(p), source.panel_stride(),
                     panel_sums(p), s.panel);
  }

  // needed: whether these sums will be read; otherwise only raise the level.
  void absorb_keys(bool needed) {
    for (Size t = 0; t < key_count; ++t) seen_poison += key_poison[t];
    if (!s.scaled) return needed ? absorb(values) : void();
    T raised_level = level;
    for (Size t = 0; t < c; ++t) raised_level = std::max(raised_level, key_scale[t]);
    if (needed) times_sums(raised(level, raised_level));
    level = raised_level;
    if (!needed) return;
    find_fade(key_scale, level);
    absorb(times_rows(values, fade));
  }

  void absorb_all_keys(Size b) {
    for (Size first = 0; first < call.keys; first += s.tokens) {
      take_keys_as_source(b, first);
      absorb_keys(true);
    }
  }

  void answer(Size from_panel, Size to_panel) {
    std::fill(answers + 0, answers + rows * c, T(0));
    if (nothing) return;
    for (Size p = from_panel; p < to_panel; ++p)
      add_product<T>(rows, c, s.count(p), {panel_sums(p), s.panel, 1}, reader.panel(p), c, answers, c);
    times_columns(answers, fade, answers);
  }

  void add_to_total(bool is_first) {
    for (Size i = 0; i < rows * c; i += lanes<T>)
      store(total + i, is_first ? load(answers + i) : load(total + i) + load(answers + i));
  }

  void descend(const T* given) {
    if (nothing) return;
    for (Size p = first_panel; p < end_panel; ++p) {
      set_product<T>(s.count(p), c, rows, {panel_sums(p), 1, s.panel}, given, c, reader.panel_gradient(), c);
      reader.follow(p);
    }
  }

  // --- Log-scales ----------------------------------------------------------------------------------------------------

  void find_tops() {
    if (!s.scaled) return;
    T highest = level;
    for (Size t = 0; t < c; ++t) {
      if (call.causal) highest = std::max(highest, key_scale[t]);
      top[t] = highest == T(-INFINITY) ? T(0) : highest;
    }
    for (Size t = 0; t < c; t += lanes<T>)
      store(fade + t, level == T(-INFINITY) ? vec<T>{} : exp(level - load(top + t)));
    if (call.causal) near.find(key_scale, top, c);
  }

  // exp(scale - level) of the chunk's keys; 0 for hidden ones.
  void find_fade(const T* scales, T level) {
    for (Size t = 0; s.scaled && t < c; t += lanes<T>) {
      const vec<T> scale = load(scales + t);
      store(fade + t, scale == T(-INFINITY) ? vec<T>{} : exp(scale - level));
    }
  }

  const T* times_columns(const T* from, const T* factors, T* to) {
    if (!s.scaled) return from;
    for (Size e = 0; e < rows; ++e)
      for (Size t = 0; t < c; t += lanes<T>) store(to + e * c + t, load(from + e * c + t) * load(factors + t));
    return to;
  }

  const T* times_rows(const T* from, const T* factors) {
    if (!s.scaled) return from;
    for (Size t = 0; t < c; ++t)
      for (Size e = 0; e < value_row; e += lanes<T>)
        store(faded + t * value_row + e, load(from + t * value_row + e) * factors[t]);
    return faded;
  }

  // --- Pairs inside a chunk ------------------------------------------------------------------------------------------

  // Weights, and their derivatives with respect to the logit: (source, reader), 0 for hidden pairs.
  template <bool with_slopes> void meet_source_keys() {
    set_product<T>(key_count, c, s.pair_width(), {source.pairs(), source.pair_row(), 1}, reader.pairs(), c, weights, c);
    for (Size k = 0; k < key_count; ++k) {
      const Size first = k / lanes<T> * lanes<T>;  // The rows before it do not see the key.
      clear<with_slopes>(k * c, k * c + first);
      for (Size t = first; t < c; t += lanes<T>) {
        vec<T> factor = all(T(1));
        if (s.scaled) factor = near.of(all(key_scale[k]), all(near.above[k]), load(top + t), load(near.below + t));
        weigh<with_slopes>(k * c + t, factor, places<T>(t) >= places<T>(k, 0));
      }
    }
  }

  void meet_source_queries() {
    set_product<T>(query_count, c, s.pair_width(), {source.pairs(), source.pair_row(), 1}, reader.pairs(), c, weights,
                   c);
    for (Size q = 0; q < query_count; ++q) {
      const Size end = q / lanes<T> * lanes<T> + lanes<T>;  // The keys from there on are not seen.
      for (Size t = 0; t < end; t += lanes<T>) {
        vec<T> factor = all(T(1));
        if (s.scaled) factor = near.of(load(key_scale + t), load(near.above + t), all(top[q]), all(near.below[q]));
        weigh<true>(q * c + t, factor, places<T>(t) <= places<T>(q, 0));
      }
      clear<true>(q * c + end, (q + 1) * c);
    }
  }

  template <bool with_slopes> void clear(Size from, Size to) {
    std::fill(weights + from, weights + to, T(0));
    if (with_slopes) std::fill(slopes + from, slopes + to, T(0));
  }

  template <bool with_slopes> void weigh(Size place, vec<T> factor, mask<T> seen) {
    const vec<T> x = load(weights + place);
    vec<T> weight = x, slope = all(T(1));
    if (s.series) {
      weight = series<T>(x, call.degree);
      if (with_slopes) slope = series<T>(x, call.degree - 1);  // its derivative
    }
    store(weights + place, seen ? weight * factor : vec<T>{});
    if (with_slopes) store(slopes + place, seen ? slope * factor : vec<T>{});
  }

  // Add to the reader the gradients of its pairs, given those of the answers: `others` (source, e), `mine` (e, reader).
  void descend_pairs(Matrix<T> others, Size count, const T* mine) {
    set_product<T>(count, c, rows, others, mine, c, weights, c);
    for (Size i = 0; i < count * c; i += lanes<T>) store(weights + i, sloped<T>(load(weights + i), load(slopes + i)));
    add_product<T>(s.pair_width(), c, count, {source.pairs(), 1, source.pair_row()}, weights, c, reader.pair_gradient(),
                   c);
  }

  // --- Tokens of a chunk ---------------------------------------------------------------------------------------------

  void take_keys(Size b, Size first) {
    key_count = std::min(s.tokens, Size(call.keys) - first);
    head.read_keys(b, first, key_count, tokens, values, key_poison);
    blank(tokens, token_row, key_count);
    blank(values, value_row, key_count);
  }

  void take_scales(Size b, Size first, const T* scales) {
    if (!s.scaled) return;
    for (Size t = 0; t < c; ++t) key_scale[t] = t >= key_count || head.hidden(b, first + t) ? T(-INFINITY) : scales[t];
  }

  void take_keys_as_source(Size b, Size first) {
    take_keys(b, first);
    source.take(tokens, token_row, key_count);
    take_scales(b, first, source.log_scale);
  }

  void take_keys_as_reader(Size b, Size first) {
    take_keys(b, first);
    turn(tokens + 0, token_row, c, Size(call.key_width + call.tilted), columns + 0, c);
    turn(values + 0, value_row, c, rows, value_columns + 0, c);
    reader.take(columns, key_count);
    take_scales(b, first, reader.log_scale);
  }

  void take_queries(Size b, Size g, Size first) {
    query_count = std::min(s.tokens, Size(call.queries) - first);
    head.read_queries(b, g, first, query_count, tokens, query_poison);
    blank(tokens, token_row, query_count);
  }

  void take_queries_as_reader(Size b, Size g, Size first) {
    take_queries(b, g, first);
    turn(tokens + 0, token_row, c, Size(call.query_width), columns + 0, c);
    reader.take(columns, query_count);
  }

  void take_queries_as_source(Size b, Size g, Size first) {
    take_queries(b, g, first);
    source.take(tokens, token_row, query_count);
    take_grads(b, g, first);
  }

  void take_grads(Size b, Size g, Size first) {
    head.read_grads(b, g, first, query_count, grads);
    blank(grads, value_row, query_count);
  }

  void blank(T* rows_of, Size row, Size count) const { std::fill(rows_of + count * row, rows_of + c * row, T(0)); }

  void write_answers(Size b, Size g, Size first, const T* found, T* share) {
    if (part == 0)
      head.write_poison(b, g, first, query_count, seen_poison, call.causal ? key_poison + 0 : nullptr, query_poison);
    if (end_part - part == parts) return head.write_answers(b, g, first, query_count, found, c);
    T* to = share + (g * call.queries + first) * rows;
    for (Size t = 0; t < query_count; ++t)
      for (Size e = 0; e < rows; ++e) to[t * rows + e] = found[e * c + t];
  }
};

}  // namespace subquad::SUBQUAD_ISA
