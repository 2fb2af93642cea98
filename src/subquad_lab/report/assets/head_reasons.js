"use strict";
// Why a method is close to the exact row, or not: sentences made from the numbers of the row. Pure: no DOM.

(() => {
  const { EXACT, UNSEEN, dot, logitsOf, series } = Subquad.headMethods;
  const { number } = Subquad;

  const CLOSE = 0.1; // relative error of a row
  const LEAST = 1e-4;

  function percent(share) {
    if (share !== 0 && Math.abs(share) < LEAST) return `less than ${100 * LEAST} %`;
    return `${(100 * share).toLocaleString("en-US", { maximumFractionDigits: Math.abs(share) < 0.1 ? 2 : 1 })} %`;
  }

  const largestOf = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);
  const sumOf = (values, keep) => values.reduce((total, value, i) => total + (keep(i) ? value : 0), 0);
  const rangeOf = (head) => (head.range ??= head.logits.reduce(
    ([least, most], x) => [Math.min(least, x), Math.max(most, x)], [Infinity, -Infinity]));
  const ratioOf = (values) => Math.max(...values) / Math.min(...values);

  // A row: {head, i, name(j), exact, weights, seen, settings, ...}; each function returns a few sentences.
  const reasons = {
    exact: (row) => {
      const top = largestOf(row.exact);
      return `Exact attention reads all ${row.i + 1} keys. It gives ${row.name(top)} the most, ${percent(row.exact[top])}.`;
    },

    window: (row) => {
      const lost = sumOf(row.exact, (j) => row.seen[j] === UNSEEN);
      const count = row.seen.reduce((total, how) => total + (how === UNSEEN), 0);
      return count === 0 ? "All keys are within the window here, so the row is exact."
        : `The ${count} keys outside the window are not read. In this row they hold ${percent(lost)} of the exact weight`
          + `${lost < 0.01 ? ", so almost nothing is lost." : ", which goes to the keys that are left."}`;
    },

    taylor: (row) => {
      const { degree } = row.settings, logits = logitsOf(row.head, row.i), top = largestOf(row.exact);
      const low = Math.min(...logits), high = logits[top], most = largestOf(row.weights);
      const at = (x) => `at ${number(x)} exp is ${number(Math.exp(x))} and the polynomial ${number(series(x, degree))}`;
      const [least, greatest] = rangeOf(row.head);
      const range = `The logits of this head run from ${number(least)} to ${number(greatest)}, in this row from ${number(low)} `
        + `to ${number(high)}.`;
      if (row.error < CLOSE) {
        return `${range} The row is close: ${row.name(top)}, the key with the largest exact weight, gets `
          + `${percent(row.weights[top])} instead of ${percent(row.exact[top])}.`;
      }
      const wrong = most === top ? "" : ` So it gives the most to ${row.name(most)}, ${percent(row.weights[most])}, where the `
        + `exact weight is ${percent(row.exact[most])}.`;
      return `${range} A polynomial of degree ${degree} is far from exp there: ${at(high)}; ${at(low)}.${wrong}`;
    },

    random: (row) => {
      const { head, i } = row, top = largestOf(row.exact), d = head.d;
      const sum = Float64Array.from({ length: d }, (_, c) => head.q[i * d + c] + head.k[top * d + c]);
      const square = head.scale * dot(sum, 0, sum, 0, d);
      const spread = Math.sqrt(Math.expm1(square) / row.settings.features);
      return `Each weight is a random estimate. For ${row.name(top)}, the key with the largest exact weight, |q + k|² is `
        + `${number(square)}, so with ${row.settings.features} features the standard deviation of the estimate is about `
        + `${number(spread)} times the weight. It gives this key ${percent(row.weights[top])} instead of `
        + `${percent(row.exact[top])}.`;
    },

    elu: (row) => `elu(q) + 1 times elu(k) + 1 cannot be steep: over the keys of this row its weights differ by a factor of `
      + `${number(ratioOf(row.weights))}, the exact ones by ${number(ratioOf(row.exact))}. Its largest weight is `
      + `${percent(Math.max(...row.weights))}, the largest exact one ${percent(Math.max(...row.exact))}.`,

    separable: (row) => `Each output is a mixture of ${row.head.d} averages of the values, the same for all queries at this `
      + `place in the text; a query chooses only their shares. Its largest weight is ${percent(Math.max(...row.weights))}, `
      + `the largest exact one ${percent(Math.max(...row.exact))}.`,

    multipole: (row) => {
      const isRead = (j) => row.seen[j] === EXACT;
      const count = row.seen.reduce((total, how) => total + (how === EXACT), 0), all = row.i + 1;
      if (count === all) return `All ${all} keys are near, or in the ${row.read} blocks that are read, so the row is exact.`;
      const held = sumOf(row.exact, isRead), rest = sumOf(row.exact, (j) => !isRead(j));
      const given = sumOf(row.weights, (j) => !isRead(j));
      const others = Math.max(given, rest) < LEAST ? `they get ${percent(given)}, as they should`
        : `they get ${percent(given)} instead of ${percent(rest)}`;
      return `It reads ${count} of ${all} keys one by one: the first and last ones, and ${row.read} of ${row.blocks} blocks of `
        + `similar keys. These keys hold ${percent(held)} of the exact weight. The other ${row.blocks - row.read} blocks are `
        + `approximated by their moments: ${others}.`;
    },
  };

  Subquad.headReasons = { CLOSE, reasons, percent, largestOf };
})();
