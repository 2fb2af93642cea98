"""What a call costs, before it is made: work, memory, parameters, and the length from which another method is cheaper.

    flops = 2 b [ g pairs (x + y) + g read r y + absorbed r (e + 1) + tokens p ]

    pairs      queries and keys that meet    x = d where weights come from logits, else r
    read       queries that read sums        y = e + 1, the values and their normaliser; e for Separable, which has r
    absorbed   keys that join sums           p = multiplications of the map itself: projections, or a user's layers

Every form is these three counts: dense has pairs alone, linear reads and absorbs alone, chunked has all three. With
training each product counts four times: the forward, the same again in the backward, and the gradients of both factors.

Memory is the result, and what the form holds at its widest moment: each moment below is a line of the form's code.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features,
c tokens of a chunk, t query tokens of a wave (b g wave), u its key tokens (b wave).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import comb
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from subquad._attention import Sizes, choose_form
from subquad._auto import Auto
from subquad._features import Exact, FeatureMap, Linear, RandomFeatures, Taylor
from subquad._forms import _sizes
from subquad._layout import Layout
from subquad._methods import Approximation, Method, resolve
from subquad._separable import Separable

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
    form: "exact", "dense", "linear", "chunked" or "step".
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

    key_length, value_dim and key_heads default to query_length, head_dim and heads. form: what `attention` itself would
    choose, or one of "dense", "linear", "chunked"; "step" is one token after key_length - 1 others in a state.

    The work of our forms is what torch's FlopCounterMode counts, exactly. That of `Exact` is that of the pairs that are
    seen; torch's kernel rounds causal rows up to blocks. A user's map is run on one token to count its layers; what it
    holds in memory beyond its result is not known, and left out.

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
    allowed = ("exact", "step") if isinstance(method, Exact) else FORMS[1:]
    if form is not None and form not in allowed:
        raise ValueError(f"form: {method} has {', '.join(map(repr, allowed))}, got {form!r}")
    if form == "linear" and is_causal:
        raise ValueError("form: a causal call has no linear form: expected 'chunked' or 'dense', got 'linear'")
    if form == "step" and query_length != 1:
        raise ValueError(f"query_length: a step is one token, expected 1, got {query_length}")

    layout = Layout((batch,), key_heads, heads // key_heads, query_length, m, head_dim, e, torch.device("cpu"))
    if isinstance(method, Exact):
        return _exact(layout, is_causal, training, form == "step", dtype)
    if form == "step":
        layout = replace(layout, keys=1)
        sizes = Sizes(1, 1, 1, 1, layout.rows)
    else:
        wanted: Any = "chunked" if form == "linear" else form
        name, sizes = choose_form(method, layout, is_causal, False, False, wanted, None)
        name = "linear" if name == "chunked" and not is_causal else name
    assert name is not None
    call = _Call(layout, sizes, _traits(method, head_dim, training), is_causal, training, name)
    number, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    work, made = call.work(), call.made()
    inputs, outputs = _elements(layout)
    # The backward makes everything again, and a gradient of everything; it reads the inputs and the result's gradient.
    moved = (2 * inputs + 2 * outputs + inputs, 6 * made) if training else (inputs + outputs, 2 * made)
    return Cost(
        flops=call.flops(work),
        bytes_moved=number * moved[0] + wide * moved[1],
        peak_bytes=_peak(call, number, wide),
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
    taken in the form that `attention` would choose for it. Lengths are tried in steps of a 64th from above, and one by
    one where the answer lies. by "time", seconds(method, *, query_length, key_length, ...) predicts, by default from
    this machine's calibration.

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

    return _crossover(partial(price, resolve(a)), partial(price, resolve(b)), longest)


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


# --- Work -------------------------------------------------------------------------------------------------------------


class _Traits(NamedTuple):
    """What a method asks of the forms."""

    size: int  # r
    project: int = 0  # multiplications of the map for a token
    project_times: int = 1  # how often they count: the matrix of random projections has no gradient
    from_logits: bool = False  # whether pairs need no features
    constant: bool = False  # whether the features depend on the input at all
    scales: int = 0  # log-scales of a head's sums
    separable: bool = False
    own: bool = False  # a user's map, made once before the form
    divides: bool = True  # whether a row is divided by its normaliser
    # Memory. Elements of a token: while its features are made, of the features, kept for the backward, of gradients.
    making: int = 0
    result: int = 0
    kept: int = 0
    gradient: int = 0
    # Tensors as large as the weights: while they are made, kept for the backward, of gradients.
    pairs: tuple[int, int, int] = (1, 1, 1)


def _traits(method: Approximation, d: int, training: bool) -> _Traits:
    r = method.size(d)
    if isinstance(method, Taylor):
        p, constant = method.degree, method.degree == 0
        if method.basis == "diagonal":  # Weights of the features make another copy, and so do derivatives of powers.
            return _Traits(r, constant=constant, making=2 * r, result=r, kept=r, gradient=3 * r)
        # Products of each degree, then all of them side by side; those of degree p - 1 once more, from p = 3 on.
        before = comb(d + p - 2, p - 1) if p > 2 else 0
        # Horner's rule has the logits, the last result and the next one.
        pairs = (3, p + 1, 4) if p > 1 else (2, 1, 1)
        return _Traits(r, from_logits=True, constant=constant, making=(2 if p > 1 else 1) * r + before, result=r,
                       kept=r + before, gradient=r, pairs=pairs)  # fmt: skip
    if isinstance(method, RandomFeatures):
        # Cosine and sine both keep what they were taken of.
        half = r // 2 if method.kind == "trigonometric" else 0
        return _Traits(r, method.rows * d, 3 if training else 1, scales=1, making=2 * r + half, result=r, kept=r + half,
                       gradient=2 * r + 2 * half)  # fmt: skip
    if isinstance(method, Linear):
        if method.activation == "identity":
            return _Traits(r, from_logits=True, divides=False, gradient=r)
        return _Traits(r, making=2 * r if method.activation == "elu" else r, result=r, kept=r, gradient=2 * r)
    if isinstance(method, Separable):  # The exponents are the keys themselves.
        return _Traits(r, scales=r, separable=True, divides=False, making=r, kept=r, gradient=2 * r)
    multiplications, scaled = _count_map(method, d)
    # Its layers run outside the forms, and are not run again: a product and the gradients of its factors.
    return _Traits(r, multiplications, 3 if training else 1, scales=int(scaled), own=True)


def _count_map(method: FeatureMap, d: int) -> tuple[int, bool]:
    """The multiplications of a user's map for one token, and whether it has a log-scale."""
    from torch.utils.flop_counter import FlopCounterMode

    weight = next(method.parameters(), None) if isinstance(method, nn.Module) else None
    x = torch.zeros(1, 1, d) if weight is None else weight.new_zeros(1, 1, d)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        result = method(x, is_query=False)
    return counter.get_total_flops() // 2, isinstance(result, tuple)


class _Work(NamedTuple):
    """What a form does for one key head, and for each query head of its group."""

    pairs: int  # of queries and keys that meet
    read: int  # queries that read sums
    absorbed: int  # keys that join sums


@dataclass(frozen=True)
class _Call:
    """One call in one form."""

    layout: Layout
    sizes: Sizes
    traits: _Traits
    is_causal: bool
    training: bool
    form: str

    @property
    def b(self) -> int:
        return self.layout.rows

    @property
    def r(self) -> int:
        return self.traits.size

    @property
    def sums(self) -> int:
        """Elements of a state: the sums, and for each head its poison and log-scales."""
        return self.b * (self.r * (self.layout.value_width + 1) + 1 + self.traits.scales)

    @property
    def both(self) -> int:
        """The tokens that are chunked where a causal call has more queries than keys, or fewer."""
        return min(self.layout.queries, self.layout.keys)

    def work(self) -> _Work:
        n, m = self.layout.queries, self.layout.keys
        if n * m == 0:
            return _Work(0, 0, 0)
        if self.form == "dense":
            return _Work(_seen(n, m, self.sizes.rows) if self.is_causal else n * m, 0, 0)
        if self.form == "step":
            return _Work(0, 1, 0 if self.advances else 1)
        if not self.is_causal:
            return _Work(0, n, m)
        work = self._chunked(self.both, want_sums=n > m)
        return work._replace(read=work.read + n - self.both)

    def _chunked(self, n: int, want_sums: bool) -> _Work:
        pairs = read = absorbed = 0
        units = Counter(_sizes(n, self.sizes.chunk, self.sizes.unit))  # Of at most three different sizes.
        alone = units.total() == 1
        for unit, times in units.items():
            waves = _sizes(unit, self.sizes.chunk, self.sizes.wave)
            for i, wave in enumerate(waves):
                count = max(1, wave // self.sizes.chunk)
                pairs += times * count * _pairs_of_chunk(wave // count, self.traits.separable)
                if not alone or i or count > 1:  # Before the first chunk there are no sums,
                    read += times * wave
                if not alone or want_sums or i + 1 < len(waves) or count > 1:  # and those of the last one nobody reads.
                    absorbed += times * wave
        return _Work(pairs, read, absorbed)

    @property
    def advances(self) -> bool:
        """Whether a step takes the quick way, which adds its key without a product of matrices."""
        d = self.r + self.traits.scales if self.traits.own else self.layout.width
        return (
            not self.traits.separable and d == self.layout.value_width and not (self.traits.own and self.traits.scales)
        )

    def flops(self, work: _Work) -> int:
        g, e, r, traits = self.layout.group, self.layout.value_width, self.r, self.traits
        x, y = (self.layout.width if traits.from_logits else r), e if traits.separable else e + 1
        again = self.form != "step"  # A step keeps what it made; the others make it again.
        full = 1 if not self.training else 3 + again
        met, weighed, summed, mapped = full, full, full, traits.project_times
        if self.training and traits.constant:  # No gradient flows to features that are always 1.
            summed = full - 1
            # Features are an input of the dense form, which knows nothing of where they came from.
            met, weighed = (full - 1, full) if self.form == "dense" and not traits.from_logits else (full - 2, full - 1)
        products = g * work.pairs * (x * met + y * weighed) + (g * work.read * y + work.absorbed * (e + 1)) * r * summed
        keys = self.both if self.form == "chunked" and not traits.own else self.layout.keys
        if self.layout.queries * self.layout.keys == 0 and not traits.own:
            return 0
        # Keys of the dense form, and everything of a step, are mapped once; the others again in the backward.
        repeated = self.training and not traits.own
        of_keys = mapped - (repeated and self.form in ("dense", "step"))
        of_queries = mapped - (repeated and self.form == "step")
        products += traits.project * (g * self.layout.queries * of_queries + keys * of_keys)
        return 2 * self.b * products

    def made(self) -> int:
        """Elements of the features, weights and sums that are made."""
        work, traits, g = self.work(), self.traits, self.layout.group
        mapped = g * (self.layout.queries if not traits.from_logits else work.read)
        mapped += self.layout.keys if not traits.from_logits else work.absorbed
        sums = -(-work.absorbed // (self.sizes.chunk if self.form == "chunked" else max(1, work.absorbed)))
        return self.b * (g * work.pairs + mapped * self.r + sums * self.r * (self.layout.value_width + 1))


def _pairs_of_chunk(length: int, separable: bool) -> int:
    if not separable:
        return length * length
    size = 1 << (length - 1).bit_length()  # It halves its chunks: each later half meets the earlier one.
    return size * (size - 1) // 2


def _seen(n: int, m: int, block: int) -> int:
    """The pairs of causal attention where rows come in blocks, each against the keys up to its end."""
    whole = n // block
    growing = min(whole, m // block)  # blocks that end before the keys do
    return block**2 * growing * (growing + 1) // 2 + (whole - growing) * block * m + n % block * min(n, m)


def _exact(layout: Layout, is_causal: bool, training: bool, step: bool, dtype: torch.dtype) -> Cost:
    n, m, d, e = layout.queries, layout.keys, layout.width, layout.value_width
    b, heads = layout.rows, layout.rows * layout.group
    pairs = heads * (_seen(n, m, 1) if is_causal and not step else n * m)
    # The backward makes the logits again, then the gradients of both factors of both products.
    flops = 2 * pairs * (4 * d + 3 * e if training else d + e)
    inputs, outputs = _elements(layout)
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


def _elements(layout: Layout) -> tuple[int, int]:
    """Of q, k and v; and of the result."""
    n, m, d, e, b = layout.queries, layout.keys, layout.width, layout.value_width, layout.rows
    return b * (layout.group * n * d + m * (d + e)), b * layout.group * n * e


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
    }[form]
    letters = f"n queries, m keys, d = {d} width, e = {e} value width" + (f", r = {r} features" if r else "")
    return f"time O({time}), memory O({memory}): {letters}"


# --- Memory -----------------------------------------------------------------------------------------------------------


def _peak(call: _Call, number: int, wide: int) -> int:
    """The widest of the moments of a call, in bytes. The result and the gradients have the dtype of the inputs."""
    layout = call.layout
    inputs, outputs = _elements(layout)
    if call.both == 0:
        return number * (outputs + (inputs if call.training else 0))
    rows = min(call.b, call.sizes.batch)  # A few heads at a time, whose results are joined in the end.
    slices = -(-call.b // rows)
    moments = {"dense": _dense, "linear": _linear, "chunked": _chunked, "step": _step}[call.form](call, rows)
    own = call.b * call.r * (layout.group * layout.queries + layout.keys) if call.traits.own else 0
    pieces = outputs if moments.joined or slices > 1 else 0
    forward = max(wide * (own + moments.states + moments.forward), number * pieces)
    if not call.training:
        return number * outputs + forward
    kept, done = slices * moments.kept, (slices - 1) * inputs // slices + moments.done
    largest = max(call.b * x for x in (layout.group * layout.queries * layout.width, layout.keys * layout.width,
                                       layout.keys * layout.value_width))  # fmt: skip
    return number * outputs + max(
        forward + wide * (kept - moments.states),
        number * done + wide * (own + kept + moments.backward),
        number * (inputs + (largest if moments.joined or slices > 1 else 0)),  # Pieces of gradients are joined as well.
    )


class _Moments(NamedTuple):
    """Elements held by a form, besides the result."""

    joined: bool  # whether results and gradients come in pieces, and so are held twice while they are joined
    states: int  # that `scanned` collects in the forward, and then puts side by side
    kept: int  # between forward and backward
    forward: int  # the widest moment of the forward
    done: int  # gradients that are finished at the widest moment of the backward,
    backward: int  # and what else there is then


def _dense(call: _Call, b: int) -> _Moments:
    g, n, m, d, e = _letters(call)
    traits, s = call.traits, min(n, call.sizes.rows)
    t, width = b * g * s, min(n, m) if call.is_causal else m
    features = 0 if traits.from_logits else traits.result
    keys = b * m * (d + e + 1 + features)
    rows = t * (d + features + e + 1)
    made, kept, gradients = _pairs(call, b, s, width, tracked=True)
    # Keys before they were cleaned are kept for the derivative of that.
    graph = keys + b * m * (d + (0 if traits.from_logits else traits.kept - features))
    # The gradients of features, or keys, and of values: their sums so far, and of the latter those of this block. In
    # the causal form the first block of the backward is the widest; in the other the last, when the queries are done.
    of_keys = b * m * ((features or d) + 2 * (e + 1))
    return _Moments(
        joined=n > s,
        states=0,
        kept=graph,
        forward=max(b * m * (2 * d + 2 * e + 1), (0 if call.training else keys) + rows + made),
        done=0 if call.is_causal else b * g * n * d,
        backward=of_keys + 2 * rows + kept + gradients,
    )


def _linear(call: _Call, b: int) -> _Moments:
    g, n, m, d, e = _letters(call)
    traits, w, sums = call.traits, call.sizes.wave, call.sums // call.b * b
    t, u, blocks = b * g * min(w, n), b * min(w, m), -(-m // w)
    # Keys ready, with the cleaned values still beside those that carry a column of ones; there is no result yet.
    absorb = u * (d + 2 * e + 1 + max(traits.making, traits.result)) + 2 * sums - b * g * n * e
    # The last block is cleaned (scaled, times 0, cleaned) and mapped before there is its part of the result.
    read = sums + t * max(3 * d - e, d + traits.making - e, d + traits.result + e + 1)
    divide = t * (4 * e + 3 if traits.divides else e)  # The gradients of quotient, numerator and denominator.
    read_again = t * (2 * d + traits.kept + e) + max(divide, t * traits.gradient + 3 * sums)
    absorb_again = u * (2 * d + 3 * e + 2 + traits.kept + traits.gradient) + 3 * sums
    return _Moments(
        joined=n > w,
        states=0,
        kept=blocks * sums,  # Every block keeps the sums before it, and gives them back once it is done.
        forward=max(absorb, read),
        done=b * g * n * d,
        backward=max(read_again, absorb_again, (b * m - u) * (d + e) + absorb_again - blocks * sums),
    )


def _chunked(call: _Call, b: int) -> _Moments:
    g, n, m, d, e = _letters(call)
    traits, sums, sizes = call.traits, call.sums // call.b * b, call.sizes
    units = _sizes(call.both, sizes.chunk, sizes.unit)
    waves = _sizes(units[0], sizes.chunk, sizes.wave)
    w, c, scan = waves[0], min(sizes.chunk, waves[0]), len(units) > 1
    t, u, prefixes, scaled = b * g * w, b * w, w // c * sums, scan and traits.scales > 0
    unit = units[0]
    tokens, own = b * g * unit, b * unit  # of queries and of keys in a unit
    states = len(units) * sums if scan else 0
    copies = t * d + u * (d + e) if w > c and (g > 1 or (b > 1 and w < n)) else 0  # Chunks become batches.
    if traits.separable:
        forward, backward = _halving(b, g, w, c, d, e, unit, scan)
        forward, backward = forward + prefixes, backward + (3 if scan else 2) * (unit // w) * prefixes
    else:
        keys = u * (d + e + 1 + traits.result)
        made, kept, gradients = _pairs(call, b, w, c, tracked=scan)
        # Sums of each chunk, merged in turn, and side by side; beside them those before the chunks of the last wave.
        merge = keys + (3 + (len(waves) > 1)) * prefixes - (0 if scan else b * g * n * e)
        # Features of queries come before the pairs, or after them; then the values of pairs, of sums, and of both.
        if traits.from_logits:
            meet = max(made, t * (c + e + 1 + traits.making))
        else:
            meet = max(t * traits.making, t * traits.result + made)
        meet = max(meet, t * (c + traits.result + 3 * (e + 1)))
        forward = max(merge, keys + prefixes + t * d + meet)
        # A unit with history: tokens before and after cleaning, features, values and outputs, sums, and pairs.
        backward = tokens * (2 * d + traits.kept + e + (e + 1) * (1 + scaled)) + unit // c * sums * (1 + 2 * scaled)
        backward += own * (2 * d + 2 * e + 1 + traits.kept) + kept * unit // w
        of_pairs = (t + u) * d if traits.from_logits else u * traits.result
        backward += max(2 * t * (e + 1), t * traits.gradient + of_pairs + prefixes + 4 * sums, gradients)
    # While a unit is computed, the result, or the gradients, of the one before it are still held.
    if scan:
        forward = max(forward + tokens * e * (1 + (len(waves) > 1)), states)
    done = b * (g * (n + unit) * d + (m + unit) * (d + e)) if scan else 0
    return _Moments(not scan and len(waves) > 1, states, states, copies + forward, done, copies + backward)


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


def _step(call: _Call, b: int) -> _Moments:
    g, _, _, d, _ = _letters(call)
    sums, traits = call.sums // call.b * b, call.traits
    tokens = b * (1 + g) * (2 * d + max(traits.making, traits.result))
    return _Moments(False, 0, tokens + sums, tokens + sums * (1 if call.advances else 3), 0, tokens + 2 * sums)


def _pairs(call: _Call, b: int, rows: int, width: int, tracked: bool) -> tuple[int, int, int]:
    """Elements of the weights of some rows: while they are made, kept for the backward, and of their gradients.

    tracked: whether log-scales are inputs, whose gradients are asked for.
    """
    g, (made, kept, gradients) = call.layout.group, call.traits.pairs
    factors, pairs = b * rows * width, b * g * rows * width
    if call.traits.scales:  # Each weight has a factor exp(c_j - top_i), the same for all queries of a group.
        made = 2 * pairs + factors
        if tracked:
            return made, 2 * (pairs + factors), 3 * pairs + (factors if g > 1 else 0)
        return made, pairs + factors, 2 * pairs
    hidden = 1 + call.is_causal  # Hiding makes a copy, whose gradient is one more.
    return max(made, hidden) * pairs, kept * pairs, max(gradients, hidden) * pairs


def _letters(call: _Call) -> tuple[int, int, int, int, int]:
    """g, n, m, d, e; a user's features are what the forms take for queries and keys."""
    layout = call.layout
    width = call.r + call.traits.scales if call.traits.own else layout.width
    return layout.group, layout.queries, layout.keys, width, layout.value_width


# --- Crossover --------------------------------------------------------------------------------------------------------


def _crossover(price_a: Callable[[int], float], price_b: Callable[[int], float], longest: int) -> int | None:
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
