"""What a call holds in memory: the result, and what its form holds at its peak.

For torch's forms each moment below is a line of the form's code.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
c tokens of a chunk, t query tokens of a wave (b g wave), u its key tokens (b wave).
"""

from typing import NamedTuple

from subquad._engines.features.cutting import cut_sizes
from subquad.planning.flops import FormCall


def peak_bytes(call: FormCall, number: int, wide: int) -> int:
    """Return the peak of a call in bytes.

    Args:
        call: The call.
        number: Bytes of a number in the inputs, the result and the gradients.
        wide: Bytes of a number in between.
    """
    shape = call.shape
    inputs, outputs = shape.inputs, shape.outputs
    if call.both == 0:
        return number * (outputs + (inputs if shape.training else 0))
    if call.form == "fused":
        return _fused_bytes(call, number, wide)
    rows = min(call.b, call.sizes.batch)  # A few heads at a time, whose results are joined in the end.
    slices = -(-call.b // rows)
    moments = {"dense": _dense, "linear": _linear, "chunked": _chunked, "step": _step}[call.form](call, rows)
    tokens = call.group * shape.query_length + shape.key_length
    own = call.b * call.r * tokens if call.method.is_learned else 0
    pieces = outputs if moments.joined or slices > 1 else 0
    forward = max(wide * (own + moments.states + moments.forward), number * pieces)
    if not shape.training:
        return number * outputs + forward
    kept, done = slices * moments.kept, (slices - 1) * inputs // slices + moments.done
    largest = max(call.b * x for x in (call.group * shape.query_length * shape.head_dim,
                                       shape.key_length * shape.head_dim,
                                       shape.key_length * shape.value_dim))  # fmt: skip
    return number * outputs + max(
        forward + wide * (kept - moments.states),
        number * done + wide * (own + kept + moments.backward),
        number * (inputs + (largest if moments.joined or slices > 1 else 0)),  # Pieces of gradients are joined as well.
    )


def _fused_bytes(call: FormCall, number: int, wide: int) -> int:
    """Return the peak of the kernels: wide results, and for each thread the sums of a head or a chunk's features."""
    shape, plan = call.shape, call.schedule()
    rows, values = call.b * call.group * shape.query_length, shape.value_dim + 1
    keys = shape.key_length * (shape.head_dim + values)  # of a head, as native/src/pairs.h reads them
    scratch = plan.threads * (keys if plan.pairs else call.r * values)
    if call.is_separable:  # A thread has all features of its head, as in native/src/separable.h.
        heads = min(plan.threads, call.b)
        scratch += heads * (1 + call.group + shape.training) * shape.key_length * call.r
    elif plan.is_shared and not plan.pairs:  # Each part of a head has its share of the result.
        scratch += plan.parts * rows * values
    forward = wide * (shape.outputs + 2 * rows) + (number * shape.outputs if number < wide else 0)
    backward = 0
    if shape.training:
        again = call.schedule("backward")
        own = 2 * keys if again.pairs else call.r * values  # pairs also read the queries and their gradients
        scratch = max(scratch, again.threads * own)
        backward = wide * shape.inputs + (number * shape.inputs if number < wide else 0)
    return forward + backward + wide * scratch


class Moments(NamedTuple):
    """Elements held by a form, besides the result."""

    joined: bool  # whether results and gradients come in pieces, and so are held twice while they are joined
    states: int  # that `scanned` collects in the forward, and then puts side by side
    kept: int  # between forward and backward
    forward: int  # the widest moment of the forward
    done: int  # gradients that are finished at the widest moment of the backward,
    backward: int  # and what else there is then


def _dense(call: FormCall, b: int) -> Moments:
    g, n, m, d, e = _letters(call)
    traits, s = call.traits, min(n, call.sizes.rows)
    t, width = b * g * s, min(n, m) if call.shape.is_causal else m
    features = 0 if call.from_logits else traits.result
    keys = b * m * (d + e + 1 + features)
    rows = t * (d + features + e + 1)
    made, kept, gradients = _pairs(call, b, s, width, tracked=True)
    # Keys before they were cleaned are kept for the derivative of that.
    graph = keys + b * m * (d + (0 if call.from_logits else traits.kept - features))
    # The gradients of features, or keys, and of values: their sums so far, and of the latter those of this block. In
    # the causal form the first block of the backward is the widest; in the other the last, when the queries are done.
    of_keys = b * m * ((features or d) + 2 * (e + 1))
    return Moments(
        joined=n > s,
        states=0,
        kept=graph,
        forward=max(b * m * (2 * d + 2 * e + 1), (0 if call.shape.training else keys) + rows + made),
        done=0 if call.shape.is_causal else b * g * n * d,
        backward=of_keys + 2 * rows + kept + gradients,
    )


def _linear(call: FormCall, b: int) -> Moments:
    g, n, m, d, e = _letters(call)
    traits, w, sums = call.traits, call.sizes.wave, call.sums // call.b * b
    t, u, blocks = b * g * min(w, n), b * min(w, m), -(-m // w)
    # Keys ready, while the cleaned values still exist beside those with a column of ones, and before any result exists.
    absorb = u * (d + 2 * e + 1 + max(traits.making, traits.result)) + 2 * sums - b * g * n * e
    # The last block is cleaned (scaled, times 0, cleaned) and mapped before there is its part of the result.
    read = sums + t * max(3 * d - e, d + traits.making - e, d + traits.result + e + 1)
    # The gradients of quotient, numerator and denominator.
    divide = t * (4 * e + 3 if call.method.normalizer == "row" else e)
    read_again = t * (2 * d + traits.kept + e) + max(divide, t * traits.gradient + 3 * sums)
    absorb_again = u * (2 * d + 3 * e + 2 + traits.kept + traits.gradient) + 3 * sums
    return Moments(
        joined=n > w,
        states=0,
        kept=blocks * sums,  # Every block keeps the sums before it, and gives them back once it is done.
        forward=max(absorb, read),
        done=b * g * n * d,
        backward=max(read_again, absorb_again, (b * m - u) * (d + e) + absorb_again - blocks * sums),
    )


def _chunked(call: FormCall, b: int) -> Moments:
    g, n, m, d, e = _letters(call)
    traits, sums, sizes = call.traits, call.sums // call.b * b, call.sizes
    units = cut_sizes(call.both, sizes.chunk, sizes.unit)
    waves = cut_sizes(units[0], sizes.chunk, sizes.wave)
    w, c, scan = waves[0], min(sizes.chunk, waves[0]), len(units) > 1
    t, u, prefixes, scaled = b * g * w, b * w, w // c * sums, scan and traits.log_scales > 0
    unit = units[0]
    tokens, own = b * g * unit, b * unit  # of queries and of keys in a unit
    states = len(units) * sums if scan else 0
    copies = t * d + u * (d + e) if w > c and (g > 1 or (b > 1 and w < n)) else 0  # Chunks become batches.
    if call.is_separable:
        forward, backward = _halving(b, g, w, c, d, e, unit, scan)
        forward, backward = forward + prefixes, backward + (3 if scan else 2) * (unit // w) * prefixes
    else:
        keys = u * (d + e + 1 + traits.result)
        made, kept, gradients = _pairs(call, b, w, c, tracked=scan)
        # Sums of each chunk, merged in turn, and side by side; beside them those before the chunks of the last wave.
        merge = keys + (3 + (len(waves) > 1)) * prefixes - (0 if scan else b * g * n * e)
        # Features of queries come before the pairs, or after them; then the values of pairs, of sums, and of both.
        if call.method.of_logits is not None:
            meet = max(made, t * (c + e + 1 + traits.making))
        else:
            meet = max(t * traits.making, t * traits.result + made)
        meet = max(meet, t * (c + traits.result + 3 * (e + 1)))
        forward = max(merge, keys + prefixes + t * d + meet)
        # A unit with history: tokens before and after cleaning, features, values and outputs, sums, and pairs.
        backward = tokens * (2 * d + traits.kept + e + (e + 1) * (1 + scaled)) + unit // c * sums * (1 + 2 * scaled)
        backward += own * (2 * d + 2 * e + 1 + traits.kept) + kept * unit // w
        of_pairs = (t + u) * d if call.from_logits else u * traits.result
        backward += max(2 * t * (e + 1), t * traits.gradient + of_pairs + prefixes + 4 * sums, gradients)
    # While a unit is computed, the result, or the gradients, of the one before it are still held.
    if scan:
        forward = max(forward + tokens * e * (1 + (len(waves) > 1)), states)
    done = b * (g * (n + unit) * d + (m + unit) * (d + e)) if scan else 0
    return Moments(not scan and len(waves) > 1, states, states, copies + forward, done, copies + backward)


def _halving(b: int, g: int, w: int, c: int, d: int, e: int, unit: int, scan: bool) -> tuple[int, int]:
    """Separable's chunks, in forward and backward, besides their sums: the tensors of `meet_chunk`, counted."""
    t, u, levels, shared = b * g * w, b * w, (c - 1).bit_length(), int(g > 1)
    # Of queries: cleaned, padded, shared out, and half of them asking. Of values: joined, halves, and those before.
    forward = t * (7 * d // 2 + 3 * e + c // 4) + u * ((8 + levels) * d + 2 * e)
    # Each level of halving keeps half the queries, exponentials and factors; a product repeats the keys of a group.
    tokens, own = b * g * unit, b * unit
    kept = tokens * (4 * d + 3 * e) + own * (8 * d + 2 * e)
    kept += levels * (tokens * (d + shared * (d + e)) + (3 if scan else 2) * own * d) // 2
    # With a state before it, derivatives go through the largest exponent too.
    gradients = t * (2 * d + e) + u * (4 if scan else 3) * d + levels * (2 if scan else 1) * u * d // 2
    return forward, kept + gradients


def _step(call: FormCall, b: int) -> Moments:
    g, _, _, d, _ = _letters(call)
    sums, traits = call.sums // call.b * b, call.traits
    tokens = b * (1 + g) * (2 * d + max(traits.making, traits.result))
    made = sums * (1 if call.is_short_step or call.is_native_step else 3)
    return Moments(False, 0, tokens + sums, tokens + made, 0, tokens + 2 * sums)


def _pairs(call: FormCall, b: int, rows: int, width: int, tracked: bool) -> tuple[int, int, int]:
    """Elements of the weights of some rows: while they are made, kept for the backward, and of their gradients.

    tracked: whether log-scales are inputs, whose gradients are asked for.
    """
    g, (made, kept, gradients) = call.group, call.traits.pairs
    factors, pairs = b * rows * width, b * g * rows * width
    if call.traits.log_scales:  # Each weight has a factor exp(c_j - top_i), the same for all queries of a group.
        made = 2 * pairs + factors
        if tracked:
            return made, 2 * (pairs + factors), 3 * pairs + (factors if g > 1 else 0)
        return made, pairs + factors, 2 * pairs
    hidden = 1 + call.shape.is_causal  # Hiding makes a copy, whose gradient is one more.
    return max(made, hidden) * pairs, kept * pairs, max(gradients, hidden) * pairs


def _letters(call: FormCall) -> tuple[int, int, int, int, int]:
    """Return g, n, m, d, e."""
    return call.group, call.shape.query_length, call.shape.key_length, call.width, call.shape.value_dim
