"""Which method to take: the quickest that keeps a wanted error, and the reason in a sentence.

time      from the calibration of this machine (`_times`)
memory    counted (`_cost`)
error     from the range of the logits (`_error`), or measured on a sample (`_sample`)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import comb, inf, log10

import torch
from torch import Tensor

from subquad._cache import calibration
from subquad._calibration import Progress
from subquad._candidates import error_meter, measured_errors, predicted_errors
from subquad._cost import cost, find_crossover
from subquad._error import Error, LogitRange, as_range, check_max_error, needed_degree, needed_features
from subquad._features import Exact, Linear, RandomFeatures, Taylor
from subquad._memory import fused_bytes
from subquad._methods import Named
from subquad._multipole import Multipole
from subquad._sample import MARGIN, Call
from subquad._separable import Separable
from subquad._times import Calibration, Shape, form_of
from subquad.native._library import AVAILABLE

HOPELESS = 1 << 26  # features, more than any sequence has tokens: then it does not matter how the logits are spread
LONGEST, LARGEST = 1 << 24, 1 << 28  # lengths: of a crossover, and of a plan


@dataclass(frozen=True)
class Candidate:
    """A method in a form, and what is predicted for it."""

    method: Named
    form: str  # "exact", "dense", "linear" or "chunked"
    seconds: float
    peak_bytes: int
    error: Error
    is_chosen_form: bool  # whether `attention` takes this form by itself
    is_acceptable: bool

    @property
    def name(self) -> str:
        return describe(self.method)


@dataclass(frozen=True)
class Plan:
    """What `plan` found: the method to use, why, and all candidates, the quickest first. Prints as a table."""

    method: Named
    reason: str
    candidates: tuple[Candidate, ...]
    max_error: float

    @property
    def choice(self) -> Candidate:
        return next(c for c in self.candidates if c.method == self.method and c.is_chosen_form)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of the table."""
        for c in self.candidates:
            keeps = "unknown" if c.error.relative is None else "yes" if c.is_acceptable else "no"
            mark = "yes, chosen" if c is self.choice else keeps
            yield c.name, c.form, duration(c.seconds), f"{c.peak_bytes / 2**20:,.1f} MiB", str(c.error), mark

    def __str__(self) -> str:
        table = [COLUMNS, *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
        left = (0, 1, 4, 5)
        padded = (
            (cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
            for row in table
        )
        return "\n".join([*("  ".join(cells).rstrip() for cells in padded), "", self.reason])


COLUMNS = ("method", "form", "time", "peak memory", "relative error", "keeps the error")


def describe(method: Named) -> str:
    """Its name as it is written, without the numbers of a key shift."""
    match method:
        case Taylor():
            text = f"Taylor({method.degree})"
        case RandomFeatures():
            text = f"RandomFeatures({method.num_features}, {method.kind!r})"
        case Linear():
            text = f"Linear({method.activation!r})"
        case Multipole() if method == Multipole():
            text = "Multipole()"
        case _:
            text = str(method)
    return text + (", keys centred" if getattr(method, "key_shift", None) is not None else "")


def predicted_seconds(
    method: Named, *, query_length: int, key_length: int | None = None, head_dim: int,
    value_dim: int | None = None, heads: int = 1, key_heads: int | None = None, batch: int = 1,
    is_causal: bool = False, training: bool = False, device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32, progress: Progress | None = None,
) -> float:  # fmt: skip
    """How long a call takes on this machine; calibrates it the first time."""
    shape = _shape(query_length, key_length, head_dim, value_dim, heads, key_heads, batch, is_causal, training)
    return calibration(device, dtype, progress).seconds(method, shape)


def plan(
    *, query_length: int | None = None, key_length: int | None = None, head_dim: int | None = None,
    value_dim: int | None = None, heads: int | None = None, key_heads: int | None = None, batch: int | None = None,
    is_causal: bool = False, training: bool = False, max_error: float = 0.05, logit_range: LogitRange | None = None,
    sample: tuple[Tensor, Tensor, Tensor] | None = None, scale: float | None = None,
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """The quickest method for a shape whose relative error is no more than `max_error`.

    query_length ... batch: the shape of the calls; what is not given is taken from the sample.
    logit_range: how far the scaled logits reach, (low, high), or one number for both signs; errors are then predicted,
        for values that know nothing of the logits, and for queries and keys of like norms.
    sample: query, key and value, as for `attention`; errors are then measured on it, and methods that centre the keys
        are candidates too. What a sample shows is true of texts like it, and as long as it.
    progress: called with (calls measured, calls in all) while the machine is calibrated, the first time.

    >>> found = plan(query_length=1_000_000, head_dim=16, logit_range=0.5)
    >>> found.method
    Taylor(degree=2, basis='symmetric', key_shift=None)
    >>> print(found.reason.partition(":")[0], found.choice.error, sep=": ")
    Taylor(2): up to about 0.022
    >>> print(plan(query_length=4096, head_dim=64, logit_range=20).reason)  # doctest: +ELLIPSIS
    Exact(): no feature map can help. With logits ... 10^20 random features. Multipole() may: give a sample.
    """
    check_max_error(max_error)
    for name, flag in {"is_causal": is_causal, "training": training}.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: expected True or False, got {flag!r}")
    if logit_range is not None and sample is not None:
        raise ValueError("sample: expected either logit_range or a sample, got both")
    call = None
    if sample is None and scale is not None:
        raise ValueError(
            f"scale: expected None without a sample, because logit_range is of scaled logits, got {scale!r}"
        )
    if sample is not None:
        if not isinstance(sample, tuple | list) or len(sample) != 3 or not all(isinstance(x, Tensor) for x in sample):
            kinds = [type(x).__name__ for x in sample] if isinstance(sample, tuple | list) else type(sample).__name__
            raise ValueError(f"sample: expected three tensors, a query, a key and a value, got {kinds}")
        query, key, value = sample
        call = Call.of(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)
        layout = call.layout
        if not all(bool(x.isfinite().all()) for x in sample):
            raise ValueError("sample: expected finite numbers, got others among them")
        if call.is_empty or not bool(value.any()):
            raise ValueError("sample: expected queries, keys and values that are not all 0, got none")
        if _first(key_heads, _first(heads, layout.key_heads)) != layout.key_heads:
            name, found_heads = ("heads", heads) if key_heads is None else ("key_heads", key_heads)
            raise ValueError(f"{name}: expected {layout.key_heads} key heads, as the sample's, got {found_heads}")
        if query_length is None:
            query_length, key_length = layout.queries, layout.keys if key_length is None else key_length
        if heads is None:
            heads, key_heads = layout.key_heads * layout.group, layout.key_heads if key_heads is None else key_heads
        head_dim, value_dim = _first(head_dim, layout.width), _first(value_dim, layout.value_width)
        batch = _first(batch, layout.rows // max(1, layout.key_heads))
        if head_dim != layout.width:
            raise ValueError(f"sample: expected width {head_dim}, as head_dim, got {layout.width}")
    if query_length is None or head_dim is None:
        missing = "query_length" if query_length is None else "head_dim"
        raise ValueError(f"{missing}: expected a whole number, or a sample to take it from, got None")
    shape = _shape(query_length, key_length, head_dim, value_dim, _first(heads, 1), key_heads, _first(batch, 1),
                   is_causal, training)  # fmt: skip
    cost(Exact(), query_length=1, head_dim=1, dtype=dtype)  # A wrong dtype is said before the machine is measured.
    machine = calibration(device, dtype, progress)
    measure = None
    if call is None:
        errors = predicted_errors(logit_range, head_dim, max_error)
    else:
        measure = error_meter(call)
        # Without the kernels, and in the backward, it is slower than exact attention.
        quick = AVAILABLE and torch.device(device).type == "cpu" and not training
        errors = measured_errors(call, head_dim, measure, (Multipole(),) if quick else ())
    while True:
        found = (c for method, e in errors.items() for c in _candidates(method, e, shape, machine, dtype, max_error))
        candidates = sorted(found, key=lambda c: c.seconds)
        best = next(c for c in candidates if c.is_acceptable and c.is_chosen_form)
        if measure is None or isinstance(best.method, Exact) or best.error.known_by != "prediction":
            break
        errors[best.method] = measure(
            best.method
        )  # What was only inferred from the sample is measured before it is taken.
    reason = _reason(best, candidates, shape, machine, max_error, logit_range, call)
    return Plan(best.method, reason, tuple(candidates), max_error)


def _first(given: int | None, found: int) -> int:
    return found if given is None else given


def _shape(
    query_length: int, key_length: int | None, head_dim: int, value_dim: int | None, heads: int, key_heads: int | None,
    batch: int, is_causal: bool, training: bool,
) -> Shape:  # fmt: skip
    sizes = dict(
        query_length=query_length, key_length=query_length if key_length is None else key_length, head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim, heads=heads,
        key_heads=heads if key_heads is None else key_heads, batch=batch,
    )  # fmt: skip
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: expected a whole number >= 1, got {size!r}")
        if size > LARGEST:
            raise ValueError(f"{name}: expected a whole number up to {LARGEST:,}, got {size:,}")
    if sizes["heads"] % sizes["key_heads"]:
        raise ValueError(f"key_heads: expected a number that divides the {heads} heads, got {key_heads}")
    return Shape(**sizes, is_causal=is_causal, training=training)


def _candidates(
    method: Named, found: Error, shape: Shape, machine: Calibration, dtype: torch.dtype, max_error: float
) -> Iterator[Candidate]:
    """The method in each of its forms."""
    acceptable = found.is_within(max_error / (MARGIN if found.known_by == "sample" else 1.0))
    if isinstance(method, Exact | Multipole):
        made = cost(method, **vars(shape), dtype=dtype)
        yield Candidate(method, made.form, machine.seconds(method, shape), made.peak_bytes, found, True, acceptable)
        return
    chosen = form_of(method, shape, machine.device)
    if chosen == "fused":
        peak = fused_bytes(method, shape.layout, shape.training, dtype)
        yield Candidate(method, chosen, machine.seconds(method, shape, chosen), peak, found, True, acceptable)
        return
    for form in ("chunked",) if isinstance(method, Separable) else ("dense", "chunked"):
        name = "linear" if form == "chunked" and not shape.is_causal else form
        peak = cost(method, **vars(shape), form=name, dtype=dtype).peak_bytes
        seconds = machine.seconds(method, shape, form)
        yield Candidate(method, name, seconds, peak, found, form == chosen, acceptable)


def _reason(
    best: Candidate, candidates: list[Candidate], shape: Shape, machine: Calibration, max_error: float,
    logit_range: LogitRange | None, call: Call | None,
) -> str:  # fmt: skip
    """One sentence, or two."""
    exact = next(c for c in candidates if isinstance(c.method, Exact))
    others = [c for c in candidates if c is not exact and c.is_acceptable and c.is_chosen_form]
    if best is not exact:
        times = (
            f"{short(exact.seconds / best.seconds)}x quicker ({duration(best.seconds)} for {duration(exact.seconds)})"
        )
        given = ""
        if isinstance(best.method, RandomFeatures) and call is None:
            given = ", if queries and keys have like norms, which a sample would tell"
        elif call is not None and call.layout.keys < shape.key_length:
            given = f" of a sample of {call.layout.keys:,} tokens"
        return (
            f"{best.name}: {times} than exact attention, with a relative error {best.error}{given}, within "
            f"{max_error:g}."
        )
    if others:
        first = f"Exact(): the quickest at this length, {duration(exact.seconds)}."
        slower = f"the quickest approximation within {max_error:g}, takes {duration(others[0].seconds)}"
        if shape.query_length != shape.key_length:
            return f"{first} {others[0].name}, {slower}."
        lengths = {c: _from(exact.method, c.method, shape, machine) for c in others}
        earliest = min(others, key=lambda c: lengths[c] or inf)
        if lengths[earliest] is None:
            return f"{first} {others[0].name}, {slower}."
        if earliest is others[0]:
            return f"{first} {earliest.name}, {slower}; it wins from about {lengths[earliest]:,} tokens on."
        return f"{first} {others[0].name}, {slower}; {earliest.name} wins from about {lengths[earliest]:,} tokens on."
    if call is not None:
        nearest = min((c for c in candidates if c is not exact), key=lambda c: c.error.relative or inf)
        return (
            f"Exact(): no approximation keeps {max_error:g}, with a margin of {MARGIN:g}, on the sample; the nearest, "
            f"{nearest.name}, has {nearest.error}."
        )
    if logit_range is None:
        return (
            f"Exact(): nothing is known of the logits, so no approximation can promise {max_error:g}; give their "
            "range or a sample."
        )
    degree, reach = needed_degree(max_error, logit_range), max(map(abs, as_range(logit_range)))
    random = many(needed_features(max_error, 2 * reach))
    series = "of a degree above 500"
    if degree < inf:
        count = many(comb(shape.head_dim + int(degree), int(degree)))
        series = f"of degree {degree}, {count} features at width {shape.head_dim}"
    needs = f"With logits up to {reach:g}, to be sure of a relative error of {max_error:g} takes"
    if min(comb(shape.head_dim + int(min(degree, 500)), int(min(degree, 500))),
           needed_features(max_error, 2 * reach)) > HOPELESS:  # fmt: skip
        return (
            f"Exact(): no feature map can help. {needs} a Taylor series {series}, or {random} random features. "
            "Multipole() may: give a sample."
        )
    return (
        f"Exact(): no approximation can promise {max_error:g} from the range alone. {needs} a Taylor series {series}, "
        f"or {random} random features; a sample may show that less will do."
    )


def _from(exact: Named, other: Named, shape: Shape, machine: Calibration) -> int | None:
    """The length from which on the other is quicker."""

    def price(method: Named) -> Callable[[int], float]:
        return lambda n: machine.seconds(method, replace(shape, query_length=n, key_length=n))

    return rounded(find_crossover(price(exact), price(other), LONGEST))


def rounded(length: int | None) -> int | None:
    """To two digits: it is a prediction."""
    return None if length is None else int(float(f"{length:.1e}"))


def duration(seconds: float) -> str:
    return f"{short(seconds)} s" if seconds >= 1 else f"{short(seconds * 1000)} ms"


def short(number: float) -> str:
    """Two digits, never as a power of ten."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def many(count: float) -> str:
    """A number, or its power of ten."""
    if count == inf:
        return "more than 10^300"
    return f"{int(count):,}" if count < 1e6 else f"10^{round(log10(count))}"
