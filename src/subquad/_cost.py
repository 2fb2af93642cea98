"""What a call costs, before it is made: work, memory, parameters, and the length from which another method is cheaper.

Work is counted in `_work`, memory in `_memory`; exact attention, which is torch's own, is counted here.

Axes: b batch and key heads, n queries, m keys, d width, e value width, r features.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from subquad._auto import Auto
from subquad._dispatch import Sizes, choose_form
from subquad._features import Exact
from subquad._layout import Layout
from subquad._memory import peak_bytes
from subquad._methods import Method, resolve
from subquad._multipole import Multipole
from subquad._multipole_cost import met, met_in_training, moments_elements, moments_flops
from subquad._work import FormCall, elements, seen_pairs, traits_of

FORMS = ("exact", "dense", "linear", "chunked", "step")


@dataclass(frozen=True)
class Cost:
    """What `cost` predicts of one call of `attention`.

    flops: of the matrix products; a multiplication and an addition are 2.
    bytes_moved: inputs and results once, and what is made between them (features, weights, sums) written and read once.
    peak_bytes: the most memory above the inputs that is held at one time, the result included; with training, the
        gradients too. The C library's heap takes more from the system, for the gaps between blocks: about 1.5 times
        this where it was measured, at worst 4.5 times (benchmarks/cost.py).
    state_bytes: of the `State` after the call, if one is asked for.
    parameters: that can be learned: none, or those of a user's map.
    form: "exact", "dense", "linear", "chunked", "multipole" or "step".
    order: how time and memory grow.
    """

    flops: int
    bytes_moved: int
    peak_bytes: int
    state_bytes: int
    parameters: int
    form: str
    order: str


def cost(
    method: Method | str, *, query_length: int, key_length: int | None = None, head_dim: int,
    value_dim: int | None = None, heads: int = 1, key_heads: int | None = None, batch: int = 1, is_causal: bool = False,
    training: bool = False, form: str | None = None, dtype: torch.dtype = torch.float32,
) -> Cost:  # fmt: skip
    """The cost of one call of `attention`, without masks, and of its backward too if `training`.

    key_length, value_dim and key_heads default to query_length, head_dim and heads. form: what `attention` would choose
    where there are no native kernels, or one of "dense", "linear", "chunked"; "step" is one token after key_length - 1
    others in a state.

    The work of our forms is what torch's FlopCounterMode counts, exactly, where torch's operations make them; the
    native kernels make the same products, and need less memory. That of `Exact` is that of the pairs that are seen;
    torch's kernel rounds causal rows up to blocks. A user's map is run on one token to count its layers;
    what it holds in memory beyond its result is not known, and left out.

    >>> cost("taylor", query_length=1000, head_dim=64, form="linear").flops  # 2 * 2000 tokens * 2145 features * 65
    557700000
    >>> cost("taylor", query_length=1000, head_dim=64, is_causal=True).form
    'dense'
    >>> cost("exact", query_length=1000, head_dim=64).order
    'time O(n m (d + e)), memory O(n e): n queries, m keys, d = 64 width, e = 64 value width'
    """
    method, name = resolve(method), form
    m, e = query_length if key_length is None else key_length, head_dim if value_dim is None else value_dim
    key_heads = heads if key_heads is None else key_heads
    named = {"query_length": query_length, "key_length": m, "head_dim": head_dim, "value_dim": e, "heads": heads,
             "key_heads": key_heads, "batch": batch}  # fmt: skip
    for argument, number in named.items():
        _check_whole(argument, number, 0 if argument.endswith("length") else 1)
    if heads % key_heads:
        raise ValueError(f"key_heads: expected a number that divides the {heads} heads, got {key_heads}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating point dtype, got {dtype}")
    if isinstance(method, Auto):
        raise ValueError("method: Auto decides by the numbers of each call; expected one that it may take, got Auto")
    allowed = {Exact: ("exact", "step"), Multipole: ("multipole", "step")}.get(type(method), FORMS[1:])
    if form is not None and form not in allowed:
        raise ValueError(f"form: {method} has {', '.join(map(repr, allowed))}, got {form!r}")
    if form == "linear" and is_causal:
        raise ValueError("form: a causal call has no linear form: expected 'chunked' or 'dense', got 'linear'")
    if form == "step" and query_length != 1:
        raise ValueError(f"query_length: a step is one token, expected 1, got {query_length}")

    layout = Layout((batch,), key_heads, heads // key_heads, query_length, m, head_dim, e, torch.device("cpu"))
    if isinstance(method, Exact):
        return _exact(layout, is_causal, training, form == "step", dtype)
    if isinstance(method, Multipole):
        return _multipole(method, layout, is_causal, training, form == "step", dtype)
    if form == "step":
        layout = replace(layout, keys=1)
        sizes = Sizes(1, 1, 1, 1, layout.rows)
    else:
        wanted: Any = "chunked" if form == "linear" else form
        name, sizes = choose_form(method, layout, is_causal, False, False, wanted, None)
        name = "linear" if name == "chunked" and not is_causal else name
    assert name is not None
    call = FormCall(layout, sizes, traits_of(method, head_dim, training), is_causal, training, name)
    number, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    work, made = call.work(), call.made()
    inputs, outputs = elements(layout)
    # The backward makes everything again, and a gradient of everything; it reads the inputs and the result's gradient.
    moved = (2 * inputs + 2 * outputs + inputs, 6 * made) if training else (inputs + outputs, 2 * made)
    return Cost(
        flops=call.flops(work),
        bytes_moved=number * moved[0] + wide * moved[1],
        peak_bytes=peak_bytes(call, number, wide),
        state_bytes=wide * call.sums,
        parameters=_parameters(method),
        form=name,
        order=_order(name, layout, call.r, sizes, training),
    )


def crossover(
    a: Method | str, b: Method | str, *, by: Literal["flops", "memory", "time"] = "flops", head_dim: int,
    value_dim: int | None = None, heads: int = 1, key_heads: int | None = None, batch: int = 1, is_causal: bool = False,
    training: bool = False, longest: int = 1 << 24, seconds: Callable[..., float] | None = None,
) -> int | None:  # fmt: skip
    """The smallest length, of queries and keys alike, from which on `b` costs less than `a`; None if there is none.

    "From which on" means up to `longest`: a short range where `b` happens to be cheaper does not count. Each length is
    taken in the form that `cost` takes for it. Lengths are tried in steps of a 64th from above, and one by one where
    the answer lies. by "time", seconds(method, *, query_length, key_length, ...) predicts, by default from
    this machine's calibration, for float32 on the CPU.

    >>> crossover("exact", "linear", head_dim=64)
    66
    >>> crossover("exact", "taylor", head_dim=64, heads=8, is_causal=True)
    4485
    """
    _check_whole("longest", longest, 1)
    if by not in ("flops", "memory", "time"):
        raise ValueError(f"by: expected 'flops', 'memory' or 'time', got {by!r}")
    shape: dict[str, Any] = dict(head_dim=head_dim, value_dim=head_dim if value_dim is None else value_dim, heads=heads,
                 key_heads=heads if key_heads is None else key_heads, batch=batch, is_causal=is_causal,
                 training=training)  # fmt: skip
    if by == "time" and seconds is None:
        from subquad._plan import predicted_seconds

        seconds = predicted_seconds

    def price(method: Method, n: int) -> float:
        if seconds is not None and by == "time":
            return seconds(method, query_length=n, key_length=n, **shape)
        found = cost(method, query_length=n, **shape)
        return found.flops if by == "flops" else found.peak_bytes

    return find_crossover(partial(price, resolve(a)), partial(price, resolve(b)), longest)


def multihead_cost(
    embed_dim: int, num_heads: int, *, length: int, head_dim: int | None = None, output: bool = True, bias: bool = True,
    method: Method | str = "exact", is_causal: bool = False, batch: int = 1, training: bool = False,
) -> Cost:  # fmt: skip
    """The cost of a multi-head attention module: three projections in, attention, and the output matrix.

    head_dim defaults to embed_dim // num_heads, torch's kind, whose parameters do not depend on the number of heads.
    `num_heads=1` is single-head attention; `head_dim=embed_dim` gives every head the full width. Each query is a key,
    in float32.

    >>> multihead_cost(64, 1, length=100, output=False, bias=False).parameters == 3 * 64**2
    True
    >>> layer = nn.MultiheadAttention(64, 8)
    >>> multihead_cost(64, 8, length=100).parameters == sum(p.numel() for p in layer.parameters())
    True
    """
    for name, number in {"embed_dim": embed_dim, "num_heads": num_heads, "length": length, "batch": batch}.items():
        _check_whole(name, number, 1)
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"num_heads: expected a number that divides embed_dim={embed_dim}, got {num_heads}")
    head_dim = embed_dim // num_heads if head_dim is None else head_dim
    inner, tokens = num_heads * head_dim, batch * length
    inside = cost(method, query_length=length, head_dim=head_dim, heads=num_heads, batch=batch, is_causal=is_causal,
                  training=training)  # fmt: skip
    matrices = (3 + output) * embed_dim * inner
    parameters = matrices + (3 * inner + output * embed_dim if bias else 0)
    kept = tokens * (3 * inner + (embed_dim if output else 0))  # q, k, v, and the result of the output matrix
    moved = tokens * (3 + output) * (embed_dim + inner) + matrices
    times = 3 if training else 1  # The product, and the gradients of its two factors.
    return replace(
        inside,
        flops=inside.flops + times * 2 * tokens * matrices,
        bytes_moved=inside.bytes_moved + times * 4 * moved,
        peak_bytes=inside.peak_bytes + 4 * (kept + (parameters + tokens * embed_dim if training else 0)),
        parameters=inside.parameters + parameters,
        order=f"{inside.order}; the projections: time O(n w h d), w = {embed_dim} embedding, h = {num_heads} heads",
    )


def _exact(layout: Layout, is_causal: bool, training: bool, step: bool, dtype: torch.dtype) -> Cost:
    n, m, d, e = layout.queries, layout.keys, layout.width, layout.value_width
    b, heads = layout.rows, layout.rows * layout.group
    pairs = heads * (seen_pairs(n, m, 1) if is_causal and not step else n * m)
    # The backward makes the logits again, then the gradients of both factors of both products.
    flops = 2 * pairs * (4 * d + 3 * e if training else d + e)
    inputs, outputs = elements(layout)
    fused = d == e  # Else torch has no kernel that goes without the matrix of weights.
    number, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    made = 0 if fused else heads * n * m
    moved = number * (3 * inputs + 2 * outputs if training else inputs + outputs) + wide * made * (6 if training else 2)
    if fused:
        # A logarithm per row; and the gradients, with that of the result where it is not in one piece.
        peak = number * outputs + wide * heads * n + (number * (inputs + outputs) if training else 0)
    else:
        # Queries and keys times the root of the scale; the logits, the weights, and what hides rows without a key, a
        # byte each; in the backward weights, their gradient, and that of the logits. GQA repeats its keys and values.
        repeated = heads * m * (d + e) if layout.group > 1 else 0
        peak = wide * ((3 if training else 2) * made + heads * (n + m) * d + repeated)
        peak += number * heads * (n + m) * e if training else made + n * m * wide * is_causal
    state = number * b * m * (d + e)
    return Cost(flops, moved, peak + (state if step else 0), state, 0, "step" if step else "exact",
                _order("exact", layout))  # fmt: skip


def _multipole(
    method: Multipole, layout: Layout, is_causal: bool, training: bool, step: bool, dtype: torch.dtype
) -> Cost:
    d, e, b, heads = layout.width, layout.value_width, layout.rows, layout.rows * layout.group
    number, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    if step:  # The last query sees all keys; the moments of those before it are there.
        pairs = met(method, layout, False) if not is_causal else met(method, layout, True) - met(
            method, replace(layout, queries=layout.keys - 1, keys=layout.keys - 1), True)  # fmt: skip
        moments = 0
    else:
        pairs, moments = met(method, layout, is_causal), b * moments_flops(method, layout)
    flops = heads * 2 * pairs * (d + e) + moments
    inputs, outputs = elements(layout)
    kept = b * (layout.keys * (d + e) + moments_elements(method, layout))
    made = b * layout.keys * d + b * moments_elements(method, layout)  # the keys turned into columns, and the moments
    moved = number * (inputs + outputs) + wide * (heads * pairs * (d + e) if step else 2 * made)
    peak = number * outputs + wide * (outputs + (0 if step else made))
    if training:  # Everything is made again, and a gradient of both factors of each product.
        flops = 4 * (heads * 2 * met_in_training(method, layout, is_causal) * (d + e) + moments)
        moved, peak = 4 * moved, peak + number * inputs + 2 * wide * kept
    order = _order("multipole", layout, training=training)
    return Cost(flops, moved, peak, wide * kept, 0, "step" if step else "multipole", order)


def _parameters(method: object) -> int:
    return sum(p.numel() for p in method.parameters() if p.requires_grad) if isinstance(method, nn.Module) else 0


def _order(form: str, layout: Layout, r: int = 0, sizes: Sizes | None = None, training: bool = False) -> str:
    d, e = layout.width, layout.value_width
    unit, wave = (1, 1) if sizes is None else (sizes.unit, sizes.wave)
    time, memory = {
        "exact": ("n m (d + e)", "n e" if d == e else "n m"),
        "dense": ("n m (d + e)", "n e + m d"),
        "linear": ("(n + m) r e", f"n e + m r e / {wave}" if training else "n e + r e"),  # sums that are kept
        "chunked": ("n r e", f"n e + n r e / {unit}"),
        "step": ("r e", "r e"),
        "multipole": ("n m (d + e)" if training else "n m^(1/2) (d + e)", "n e + m (d + e)"),
    }[form]
    letters = f"n queries, m keys, d = {d} width, e = {e} value width" + (f", r = {r} features" if r else "")
    return f"time O({time}), memory O({memory}): {letters}"


# --- Crossover --------------------------------------------------------------------------------------------------------


def find_crossover(price_a: Callable[[int], float], price_b: Callable[[int], float], longest: int) -> int | None:
    """The smallest length from which on, up to `longest`, b costs less than a.

    Prices change their form with the length, and have teeth where a chunk or a wave is not full. So it is the last
    failure that is looked for, from above: in steps of a 64th, then length by length in the step where it lies. Where
    that step is wider than EVERY, by bisection, which is right up to a tooth.
    """

    def dearer(n: int) -> bool:
        return not price_b(n) < price_a(n)

    if dearer(longest):
        return None
    good, bad = longest, longest
    while bad > 1:
        bad = max(1, bad - max(1, bad // 64))
        if dearer(bad):
            break
        good = bad
    else:
        return 1
    while good - bad > EVERY:
        middle = (good + bad) // 2
        good, bad = (good, middle) if dearer(middle) else (middle, bad)
    while not dearer(good - 1):
        good -= 1
    return good


EVERY = 1024  # lengths that are tried one by one


def _check_whole(name: str, number: object, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{name}: expected a whole number >= {least}, got {number!r}")
