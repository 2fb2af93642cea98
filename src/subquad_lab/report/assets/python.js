// Python's operators and builtins, for formulas of the library that are translated to JavaScript (report/translation).
//
// Values of Python are: numbers, strings, booleans, null for None, arrays for lists and tuples, Dict, Set, functions,
// and instances of translated classes, which are compared by their fields as dataclasses are.
"use strict";

Subquad.python = (() => {
  class Value {}

  // A NamedTuple: fields that can be unpacked.
  class Tuple extends Value {
    [Symbol.iterator]() {
      return Object.values(this)[Symbol.iterator]();
    }
  }

  // What is the same for equal keys, as hash() and == are for Python's: the key itself, or a text of its fields.
  function keyOf(value) {
    if (Array.isArray(value)) return `[${value.map(keyOf).join()}]`;
    if (value instanceof Value) return `${value.constructor.$name}(${Object.values(value).map(keyOf).join()})`;
    return value;
  }

  class Dict {
    constructor(pairs) {
      this.entries = new Map();
      for (const [key, value] of pairs) this.set(key, value);
    }
    set(key, value) {
      const own = keyOf(key);
      this.entries.set(own, [this.entries.get(own)?.[0] ?? key, value]); // as in Python, the first of equal keys stays
    }
    has(key) {
      return this.entries.has(keyOf(key));
    }
    get(key, otherwise = null) {
      const found = this.entries.get(keyOf(key));
      return found === undefined ? otherwise : found[1];
    }
    items() {
      return [...this.entries.values()];
    }
    keys() {
      return this.items().map(([key]) => key);
    }
    values() {
      return this.items().map(([, value]) => value);
    }
    total() {
      return sum(this.values()); // of a Counter
    }
    [Symbol.iterator]() {
      return this.keys()[Symbol.iterator]();
    }
  }

  function counter(values) {
    const found = new Dict([]);
    for (const value of values) found.set(value, found.get(value, 0) + 1);
    return found;
  }

  // --- Operators ---------------------------------------------------------------------------------------------------

  const truth = (x) => (typeof x === "object" && x !== null ? length(x) !== 0 : Boolean(x));
  const add = (a, b) => (Array.isArray(a) ? a.concat(b) : a + b);
  const floorDiv = (a, b) => Math.floor(a / b);
  const mod = (a, b) => ((a % b) + b) % b;
  const equal = (a, b) => a === b || (typeof a === "object" && typeof b === "object" && keyOf(a) === keyOf(b));
  const union = (a, b) => new Dict([...a.items(), ...b.items()]);
  const repeat = (values, times) => (values.length === 1 ? Array(times).fill(values[0]) : Array(times).fill(values).flat());

  function and(...parts) {
    let value;
    for (const part of parts) if (!truth((value = part()))) break;
    return value;
  }

  function or(...parts) {
    let value;
    for (const part of parts) if (truth((value = part()))) break;
    return value;
  }

  function has(container, value) {
    if (Array.isArray(container)) return container.includes(value) || container.some((x) => equal(x, value));
    return typeof container === "string" ? container.includes(value) : container.has(value);
  }

  function item(container, place) {
    if (!Array.isArray(container)) {
      if (!container.has(place)) throw new Error(`no such key: ${str(place)}`);
      return container.get(place);
    }
    return container.at(Number(place)); // A place may be False or True.
  }

  function setItem(container, place, value) {
    if (Array.isArray(container)) container[place < 0 ? container.length + place : place] = value;
    else container.set(place, value);
  }

  // --- Iteration ---------------------------------------------------------------------------------------------------

  function length(x) {
    if (x instanceof Value) return Object.keys(x).length || 1;
    return x instanceof Dict ? x.entries.size : x.length ?? x.size;
  }

  function range(first, end, step = 1) {
    const from = end === undefined ? 0 : first;
    const count = Math.max(0, Math.ceil(((end ?? first) - from) / step));
    return Array.from({ length: count }, (_, i) => from + i * step);
  }

  function* zip(first, second) {
    const others = second[Symbol.iterator]();
    for (const value of first) yield [value, others.next().value];
  }

  function* enumerate(values) {
    let place = 0;
    for (const value of values) yield [place++, value];
  }

  function* pairwise(values) {
    let before;
    for (const value of values) {
      if (before !== undefined) yield [before, value];
      before = value;
    }
  }

  function next(iterable, otherwise) {
    for (const found of iterable) return found;
    if (otherwise === undefined) throw new Error("next: nothing is left");
    return otherwise;
  }

  function extreme(sign, values, key = (x) => x) {
    let best, bestKey;
    for (const value of values) {
      const own = sign * key(value);
      if (bestKey === undefined || own > bestKey) [best, bestKey] = [value, own];
    }
    if (bestKey === undefined) throw new Error("min or max of nothing");
    return best;
  }

  function sorted(values, key = (x) => x) {
    const keyed = [...values].map((value) => [key(value), value]);
    return keyed.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0)).map(([, value]) => value); // stable, as Python's
  }

  // --- Numbers -----------------------------------------------------------------------------------------------------

  // With what each addition loses carried along (Neumaier), so that it also serves as math.fsum.
  function sum(values) {
    let total = 0, lost = 0;
    for (const value of values) {
      const next = total + Number(value);
      lost += Math.abs(total) >= Math.abs(value) ? total - next + Number(value) : Number(value) - next + total;
      total = next;
    }
    return Number.isFinite(lost) ? total + lost : total;
  }

  function comb(n, k) {
    let found = 1;
    for (let i = 1; i <= Math.min(k, n - k); i++) found = (found * (n - Math.min(k, n - k) + i)) / i;
    return k > n ? 0 : found;
  }

  // Stirling's series, which has 16 digits from 15 on; smaller arguments are moved there.
  function lgamma(x) {
    let shift = 0;
    for (; x < 15; x++) shift += Math.log(x);
    const y = 1 / (x * x);
    const series = (1 / 12 - y * (1 / 360 - y * (1 / 1260 - y * (1 / 1680 - y / 1188)))) / x;
    return (x - 0.5) * Math.log(x) - x + 0.5 * Math.log(2 * Math.PI) + series - shift;
  }

  // Halves go to the even neighbor.
  function round(x) {
    const low = Math.floor(x);
    return x - low === 0.5 ? low + mod(low, 2) : Math.round(x);
  }

  const bitLength = (x) => (x === 0 ? 0 : Math.floor(Math.log2(Math.abs(x))) + 1);

  // --- Text --------------------------------------------------------------------------------------------------------

  // Digits as Python rounds them: a number exactly between two goes to the even one, where JavaScript's goes up.
  function rounded(x, name, digits) {
    const up = x[name](digits), more = Math.min(100, digits + 60) - digits;
    const dropped = x[name](digits + more).replace(/e.*/, "").replace(".", "").slice(-more);
    if (!/^50*$/.test(dropped)) return up;
    const down = (2 * x - Number(up))[name](digits); // `up` is the neighbor away from zero.
    const last = Number(down.replace(/e.*/, "").replace(".", "").at(-1));
    return last % 2 === 0 ? down : up;
  }

  function general(x, digits) {
    const [mantissa, power] = rounded(x, "toExponential", digits - 1).split("e").map(Number);
    if (x !== 0 && (power < -4 || power >= digits)) return scientific(String(mantissa), power);
    return String(Number(rounded(x, "toPrecision", digits)));
  }

  function scientific(mantissa, power) {
    return `${mantissa}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  }

  function withCommas(text) {
    const [whole, ...fraction] = text.split(".");
    return [whole.replace(/\B(?=(\d{3})+$)/g, ","), ...fraction].join(".");
  }

  // The part of Python's format language that texts of the library use: {:,} {:g} {:.2g} {:,.0f} {:.1e}.
  function format(value, spec) {
    if (spec === "") return str(value);
    const [whole, comma, digits, kind] = spec.match(/^(,?)(?:\.(\d+))?([efg]?)$/) ?? [];
    if (whole === undefined) throw new Error(`format: {:${spec}} is not known here`);
    if (!Number.isFinite(value)) return str(value);
    const count = digits === undefined ? 6 : Number(digits);
    let text = String(value);
    if (kind === "f") text = rounded(value, "toFixed", count);
    if (kind === "g") text = general(value, Math.max(1, count));
    if (kind === "e") text = scientific(...rounded(value, "toExponential", count).split("e"));
    return comma ? withCommas(text) : text;
  }

  function formatted(template, ...values) {
    let place = 0;
    return template.replace(/\{:?([^}]*)\}/g, (_, spec) => format(values[place++], spec));
  }

  function str(value) {
    return typeof value === "string" ? value : (value?.__str__?.() ?? repr(value));
  }

  function repr(value) {
    if (value === null || value === undefined) return "None";
    if (typeof value === "boolean") return value ? "True" : "False";
    if (typeof value === "string") return value.includes("'") ? `"${value}"` : `'${value}'`;
    if (typeof value === "number") return Number.isFinite(value) ? String(value) : value > 0 ? "inf" : value < 0 ? "-inf" : "nan";
    if (Array.isArray(value)) return `[${value.map(repr).join(", ")}]`;
    const fields = Object.entries(value).map(([name, own]) => `${name}=${repr(own)}`);
    return `${value.constructor.$name}(${fields.join(", ")})`;
  }

  // --- Objects -----------------------------------------------------------------------------------------------------

  const kinds = {
    bool: (x) => typeof x === "boolean",
    int: (x) => Number.isInteger(x) || typeof x === "boolean",
    float: (x) => typeof x === "number",
    list: Array.isArray,
    str: (x) => typeof x === "string",
    tuple: Array.isArray,
    type: (x) => typeof x === "function" && x.prototype instanceof Value,
  };
  const tests = new Set(Object.values(kinds));
  const isInstance = (x, ...all) => all.some((kind) => (tests.has(kind) ? kind(x) : x instanceof kind));

  // A copy with other fields. What __post_init__ computes from them is computed again.
  function replace(value, changes) {
    const copy = Object.assign(new value.constructor(), value, changes);
    copy.__post_init__?.();
    return copy;
  }

  // A property that is computed once; not enumerable, so that it is not a field.
  function cached(self, name) {
    const value = self[name]();
    Object.defineProperty(self, name.slice(1), { value });
    return value;
  }

  function memoized(compute) {
    const known = new Map();
    return (x) => {
      if (!known.has(x)) known.set(x, compute(x));
      return known.get(x);
    };
  }

  function attribute(kind, name, value) {
    for (const owner of [kind, kind.prototype]) Object.defineProperty(owner, name, { value, writable: true, configurable: true });
  }

  class DType extends Value {
    static $name = "dtype";
  }
  const dtype = (name, itemsize) => Object.assign(new DType(), { name, itemsize });
  const device = (type) => ({ type });

  return {
    Value, Tuple, Dict, counter, kinds, isInstance, replace, cached, memoized, attribute, dtype, device,
    truth, add, floorDiv, mod, equal, union, repeat, and, or, has, item, setItem,
    length, range, zip, enumerate, pairwise, next, sorted, sum, comb, lgamma, round, bitLength, format, formatted, str, repr,
    promoteTypes: (a, b) => (a.itemsize >= b.itemsize ? a : b),
    slice: (values, from, to) => [...values].slice(from, to),
    shift: (x, bits) => x * 2 ** bits,
    list: (values) => [...values],
    map: (f, values) => [...values].map((x) => f(x)),
    dict: (pairs) => new Dict(pairs),
    fromKeys: (keys, value = null) => new Dict([...keys].map((key) => [key, value])),
    divmod: (a, b) => [floorDiv(a, b), mod(a, b)],
    product: (values) => [...values].reduce((a, b) => a * b, 1),
    any: (values) => [...values].some(truth),
    all: (values) => [...values].every(truth),
    min: (values, key) => extreme(-1, values, key),
    max: (values, key) => extreme(1, values, key),
    isInfinite: (x) => Math.abs(x) === Infinity,
    append: (values, value) => values.push(value),
    join: (separator, values) => [...values].join(separator),
    type: (value) => value.constructor,
    callable: (value) => typeof value === "function",
    fields: (value) => Object.keys(value).map((name) => ({ name })),
    hasAttribute: (value, name) => name in Object(value),
    getAttribute: (value, name, otherwise) => (name in Object(value) ? value[name] : otherwise),
  };
})();
