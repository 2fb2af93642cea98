// Multipole on one causal head: near keys, the first keys and the best blocks exactly, other blocks by their moments.
// The same algorithm as subquad's methods/multipole.py, which explains it; bisection.py and meet.py are its twin.
//
// Texts of the page have fewer segments than GROUPED_FROM_SEGMENTS, so every segment is looked at block by block.
"use strict";

(() => {
  const { EXACT, APPROXIMATED, dot, logitsOf, softmax, methods } = Subquad.headMethods;
  const BLOCKS_PER_SEGMENT = 16, ROUNDS = 2, LOOKS_PER_READ = 8, MAX_VARIANCE = 1, TINY = 1e-20;

  // To the nearest integer, halves to the even one, as torch does.
  function rounded(x) {
    const low = Math.floor(x), rest = x - low;
    return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
  }

  function meanOf(head, keys) {
    const found = new Float64Array(head.d);
    for (const j of keys) for (let c = 0; c < head.d; c++) found[c] += head.k[j * head.d + c];
    return found.map((x) => x / keys.length);
  }

  function offsetsOf(head, keys, center) {
    return keys.map((j) => center.map((x, c) => head.k[j * head.d + c] - x));
  }

  // About the direction in which offsets spread most: power iterations that begin with an alternating sum.
  function mainDirection(offsets, d) {
    const weighted = (factor) => {
      const found = new Float64Array(d);
      offsets.forEach((offset, t) => {
        const own = factor(offset, t);
        for (let c = 0; c < d; c++) found[c] += own * offset[c];
      });
      const norm = Math.max(Math.sqrt(dot(found, 0, found, 0, d)), TINY);
      return found.map((x) => x / norm);
    };
    let direction = weighted((_, t) => (t % 2 ? -1 : 1));
    for (let round = 0; round < ROUNDS; round++) {
      const last = direction;
      direction = weighted((offset) => dot(offset, 0, last, 0, d));
    }
    return direction;
  }

  // Cut keys in two along their main direction, and again, until blocks of similar keys are left.
  function blocksOf(head, keys, block) {
    if (keys.length <= block) return [keys];
    const offsets = offsetsOf(head, keys, meanOf(head, keys)), direction = mainDirection(offsets, head.d);
    const places = offsets.map((offset) => dot(offset, 0, direction, 0, head.d));
    const order = keys.map((_, t) => t).sort((a, b) => places[a] - places[b] || a - b);
    const half = keys.length / 2;
    return [order.slice(0, half), order.slice(half)].flatMap((part) =>
      blocksOf(head, part.sort((a, b) => a - b).map((t) => keys[t]), block));
  }

  // Center, radius and the 8-bit offsets of a block.
  function described(head, keys) {
    const center = meanOf(head, keys), offsets = offsetsOf(head, keys, center);
    let squares = 0, largest = 0;
    for (const offset of offsets)
      for (const x of offset) {
        squares += x * x;
        largest = Math.max(largest, Math.abs(x));
      }
    const scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0;
    const look = offsets.map((offset) => offset.map((x) => rounded(x * inverse)));
    return { keys, center, radius: Math.sqrt(squares / (keys.length * head.d)), look, scale };
  }

  // The `count` best of `places` by score, ties going to the first.
  function best(places, score, count) {
    return [...places].sort((a, b) => score[b] - score[a] || a - b).slice(0, count);
  }

  // The blocks of `blocks` that a scaled query reads.
  function chosen(query, blocks, mean, variance, block, top) {
    const likelyMost = mean.map((m, u) => m + Math.sqrt(2 * Math.log(block) * variance[u]));
    const looked = best(blocks.keys(), likelyMost, LOOKS_PER_READ * top);
    const scale = query.reduce((most, x) => Math.max(most, Math.abs(x)), 0) / 127;
    const coarse = query.map((x) => (scale > 0 ? rounded(x * (1 / scale)) : 0));
    const largest = [];
    for (const u of looked) {
      const above = Math.max(...blocks[u].look.map((offset) => dot(coarse, 0, offset, 0, query.length)));
      largest[u] = mean[u] + above * scale * blocks[u].scale;
    }
    return best(looked, largest, top);
  }

  methods.multipole = (head, { window, sinks, block, top }) => {
    const { n, d } = head, segment = BLOCKS_PER_SEGMENT * block;
    const finished = (sees) => Math.max(0, Math.floor((sees - sinks - window) / segment));
    const blocks = [];
    for (let s = 0; s < finished(n); s++) {
      const keys = Array.from({ length: segment }, (_, t) => sinks + s * segment + t);
      blocks.push(...blocksOf(head, keys, block).map((own) => described(head, own)));
    }
    return (i) => {
      const far = blocks.slice(0, finished(i + 1) * BLOCKS_PER_SEGMENT);
      const query = head.q.subarray(i * d, (i + 1) * d).map((x) => head.scale * x);
      const square = dot(query, 0, query, 0, d);
      const mean = far.map((own) => dot(query, 0, own.center, 0, d));
      const variance = far.map((own) => square * own.radius ** 2);
      const read = new Set(chosen(query, far, mean, variance, block, top));
      const logs = Float64Array.from(logitsOf(head, i)), seen = new Uint8Array(i + 1).fill(EXACT);
      far.forEach((own, u) => {
        if (read.has(u)) return;
        for (const j of own.keys) {
          logs[j] = mean[u] + Math.min(variance[u], MAX_VARIANCE) / 2;
          seen[j] = APPROXIMATED;
        }
      });
      return { weights: softmax(logs), seen, blocks: far.length, read: read.size };
    };
  };
})();
