// The methods of attention on one causal head, row by row, in float64. Pure: no DOM.
//
//   output_i = sum_j weight_ij value_j,   j = 0 .. i        error = |output - exact| / |exact|
//
// Every method is a function (head, settings) -> (i -> {weights, seen}), where `weights` has one number for each key
// 0 .. i and `seen` says how the method sees that key. Methods equal `subquad.attention` with the method of the same
// name; Multipole is in head_multipole.js.
//
// A head is {n, d, q, k, v, scale, logits}: n tokens, width d, rows one after another, logits the lower triangle.
"use strict";

Subquad.headMethods = (() => {
  const UNSEEN = 0, EXACT = 1, APPROXIMATED = 2;

  // ---- data

  function bytes(base64) {
    const text = atob(base64), found = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) found[i] = text.charCodeAt(i);
    return found.buffer;
  }

  function floats(base64) {
    return new Float64Array(new Float32Array(bytes(base64)));
  }

  // The inverse of `stored` in head_data.py: 8-bit integers, then one float32 scale per token.
  function tensor(buffer, offset, n, d) {
    const integers = new Int8Array(buffer, offset, n * d);
    const scales = new Float32Array(buffer.slice(offset + n * d, offset + n * d + 4 * n));
    // Rounded to float32, as the library has it, and kept in float64, so that all loops see one type of array.
    return new Float64Array(integers).map((integer, place) => Math.fround(integer * scales[Math.floor(place / d)]));
  }

  function head(buffer, number, n, d) {
    const size = n * d + 4 * n;
    const [q, k, v] = [0, 1, 2].map((i) => tensor(buffer, (3 * number + i) * size, n, d));
    const found = { n, d, q, k, v, scale: 1 / Math.sqrt(d) };
    found.logits = new Float64Array((n * (n + 1)) / 2);
    for (let i = 0, at = 0; i < n; i++)
      for (let j = 0; j <= i; j++, at++) found.logits[at] = found.scale * dot(q, i * d, k, j * d, d);
    return found;
  }

  function dot(a, from, b, start, d) {
    let total = 0;
    for (let c = 0; c < d; c++) total += a[from + c] * b[start + c];
    return total;
  }

  function logitsOf(head, i) {
    return head.logits.subarray((i * (i + 1)) / 2, (i * (i + 1)) / 2 + i + 1);
  }

  // ---- rows

  function allSeen(count, how) {
    return new Uint8Array(count).fill(how);
  }

  // In place.
  function normalized(weights) {
    let total = 0;
    for (const weight of weights) total += weight;
    for (let j = 0; j < weights.length; j++) weights[j] = total === 0 ? 0 : weights[j] / total;
    return weights;
  }

  // Softmax of logs; -Infinity for keys without weight.
  function softmax(logs) {
    let top = -Infinity;
    for (const log of logs) top = Math.max(top, log);
    return normalized(logs.map((log) => Math.exp(log - top)));
  }

  // ---- methods

  function exact(head) {
    return (i) => ({ weights: softmax(logitsOf(head, i)), seen: allSeen(i + 1, EXACT) });
  }

  function window(head, { size, sinks }) {
    return (i) => {
      const seen = new Uint8Array(i + 1).map((_, j) => (i - j < size || j < sinks ? EXACT : UNSEEN));
      return { weights: softmax(logitsOf(head, i).map((x, j) => (seen[j] ? x : -Infinity))), seen };
    };
  }

  // 1 + x + ... + x^degree / degree!, by Horner's rule.
  function series(x, degree) {
    let result = 1;
    for (let power = degree; power > 0; power--) result = 1 + (x * result) / power;
    return result;
  }

  function taylor(head, { degree }) {
    return (i) => ({
      weights: normalized(logitsOf(head, i).map((x) => series(x, degree))),
      seen: allSeen(i + 1, APPROXIMATED),
    });
  }

  // weight = phi(q_i).phi(k_j) exp(log scale of k_j); `features` maps rows of x, times the root of the scale.
  function byFeatures(head, features) {
    const [queries, keys] = [features(head.q), features(head.k)], r = keys.count;
    return (i) => {
      let top = -Infinity;
      for (let j = 0; j <= i; j++) top = Math.max(top, keys.logScales[j]);
      const weights = new Float64Array(i + 1);
      for (let j = 0; j <= i; j++)
        weights[j] = dot(queries.values, i * r, keys.values, j * r, r) * Math.exp(keys.logScales[j] - top);
      return { weights: normalized(weights), seen: allSeen(i + 1, APPROXIMATED) };
    };
  }

  function elu(head) {
    const root = Math.sqrt(head.scale);
    return byFeatures(head, (x) => ({
      count: head.d,
      values: x.map((y) => Math.exp(Math.min(root * y, 0)) + Math.max(root * y, 0)),
      logScales: new Float64Array(head.n),
    }));
  }

  // exp(w.y - |y|^2 / 2) with the first `features` rows w of the library's projections.
  function random(head, { features, projections }) {
    const { n, d } = head, root = Math.sqrt(head.scale);
    return byFeatures(head, (x) => {
      const values = new Float64Array(n * features), logScales = new Float64Array(n);
      for (let i = 0; i < n; i++) {
        let top = -Infinity;
        for (let r = 0; r < features; r++) {
          const projected = root * dot(x, i * d, projections, r * d, d);
          values[i * features + r] = projected;
          top = Math.max(top, projected);
        }
        for (let r = 0; r < features; r++) values[i * features + r] = Math.exp(values[i * features + r] - top);
        logScales[i] = top - (head.scale * dot(x, i * d, x, i * d, d)) / 2;
      }
      return { count: features, values, logScales };
    });
  }

  // softmax over the width of q times softmax over the keys of each column of k.
  function separable(head) {
    const { n, d } = head, root = Math.sqrt(head.scale);
    const tops = new Float64Array(d).fill(-Infinity); // of all keys: float64 has room for smaller exponents
    head.k.forEach((x, place) => (tops[place % d] = Math.max(tops[place % d], root * x)));
    const parts = head.k.map((x, place) => Math.exp(root * x - tops[place % d]));
    const totals = Float64Array.from(parts); // running sums over the keys
    for (let place = d; place < n * d; place++) totals[place] += totals[place - d];
    return (i) => {
      const shares = softmax(head.q.subarray(i * d, (i + 1) * d).map((x) => root * x));
      for (let c = 0; c < d; c++) shares[c] /= totals[i * d + c];
      const weights = new Float64Array(i + 1).map((_, j) => dot(shares, 0, parts, j * d, d));
      return { weights, seen: allSeen(i + 1, APPROXIMATED) };
    };
  }

  // ---- outputs and errors

  function output(head, weights) {
    const found = new Float64Array(head.d);
    for (let j = 0; j < weights.length; j++)
      for (let c = 0; c < head.d; c++) found[c] += weights[j] * head.v[j * head.d + c];
    return found;
  }

  // All outputs (n, d), one row after another.
  function outputs(head, method) {
    const found = new Float64Array(head.n * head.d);
    for (let i = 0; i < head.n; i++) found.set(output(head, method(i).weights), i * head.d);
    return found;
  }

  function error(found, expected) {
    let off = 0, size = 0;
    for (let i = 0; i < found.length; i++) {
      off += (found[i] - expected[i]) ** 2;
      size += expected[i] ** 2;
    }
    return Math.sqrt(off / size);
  }

  return {
    UNSEEN, EXACT, APPROXIMATED, bytes, floats, head, dot, logitsOf, softmax, series, output, outputs, error,
    methods: { exact, window, taylor, random, elu, separable },
  };
})();
