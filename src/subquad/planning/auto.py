"""Auto: the cheapest method within an error budget, decided for each call; exact attention if there is none.

    1. Would any approximation be faster than exact attention at this shape?            independent of the inputs
    2. Norms bound the logits of each row, and thus Taylor's error in each row.         O(length * width), rigorous
    3. A few rows are computed exactly, to estimate the output norm and the errors.     O(rows * keys), with a margin

All checks together may cost a tenth of exact attention, as predicted by `asking_cost`. A method is therefore first
checked on very few rows, and only continues if it is not far off.

The decision depends on the whole call. In a causal call, later tokens can change which method is chosen, but never what
a method computes from earlier tokens.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from subquad import native
from subquad._calls.call import Call, check_tensors
from subquad._engines import engine_of
from subquad._torch_internals import outside_graph
from subquad.methods import AnyMethod, Exact, Multipole, RandomFeatures, Taylor, Window, label_of
from subquad.methods.checks import check_whole
from subquad.methods.error_estimate import NO_ERROR, ErrorEstimate, check_max_error
from subquad.planning.asker import STANDARD_ERRORS, Asker
from subquad.planning.asking_cost import exact_flops, exact_rows_flops, method_rows_flops
from subquad.planning.calibration_file import cached
from subquad.planning.coordinates import Moments, centered
from subquad.planning.cost import cost_of
from subquad.planning.rows import exact_rows, pick_rows, risks, undisturbed
from subquad.planning.shape import Shape
from subquad.planning.sparse_pairs import has_places

MAX_TIME_SHARE = 0.7  # of exact attention's time that an approximation may be expected to take, besides the questions
FLOP_PRICE = 3.0  # of one of our FLOPs, relative to torch's attention, where the machine is not calibrated
MIN_CHECK_ROWS = 8
MAX_ASKING_SHARE = 0.1  # of the work of exact attention
REMEMBERED_CALLS = 32  # for which a remembered "exact" is not questioned
MAX_REMEMBERED_SHAPES = 64
EXACT = "Exact(): "  # begins a reason
AUTO_IN_GRAPH = (
    "method: Auto decides by numbers, which a fixed graph does not have (torch.export, torch.jit.trace, torch.compile "
    "with fullgraph=True); name a method there, such as the one that Auto().choose(...) finds for a sample"
)

log = logging.getLogger("subquad")


@dataclass(frozen=True)
class Choice:
    """The method that `Auto` chose for a call, its estimated error, and why."""

    method: AnyMethod
    error: ErrorEstimate
    reason: str


@dataclass(frozen=True, repr=False)
class Auto:
    """The cheapest method whose relative error is at most `max_error`, else exact attention; decided for each call.

    The candidates are `Taylor` of degree 1 to 4, hyperbolic `RandomFeatures`, and, where the native kernels compute
    them, `Window` and `Multipole`, for logits that are too large for a map around zero. Unless the call is causal, the
    first two also compete fitted to the call: centered and balanced. In a causal call, later tokens can change which
    method is chosen, but never what a method computes.

    If norms give a bound, the error budget is guaranteed up to rounding. If rows are sampled, it holds statistically,
    with a margin: rare rows with ordinary norms can be missed. A window is always judged by sampled rows, and drops far
    keys without inspecting them. If a fraction s of all rows depends on far keys, those rows are wrong, the error is
    about sqrt(2 s), and r random rows miss all of them with probability (1 - s)^r. More `check_rows` make that less
    likely; if single far keys matter, name a method instead.

    The checks cost at most a tenth of exact attention, as predicted; calls that are too short for that are exact.

    `choose` returns the chosen method and the reason; the logger "subquad" reports it at level INFO. A sequence in
    pieces, with a state, raises ValueError, because the error budget applies to the whole sequence.

    Args:
        max_error: The largest acceptable relative error.
        check_rows: Number of rows of each head that are computed exactly, to estimate the output norm and the errors of
            methods without a bound. More rows make the decision safer and slower.
        remember: Whether a call starts with the choice of the previous call of the same shape. The error budget applies
            to every call as before: a remembered method is checked on rows of the new call, and if it fails, all others
            are checked within the remaining cost. Only "exact" is reused without a check, for the next 32 calls, which
            may then miss a faster method. The choice thus depends on earlier calls. The last 64 shapes are remembered.
            Each `MultiheadAttention`, including those created by `replace_attention`, has its own memory; elsewhere,
            give each layer a copy, `copy.copy(auto)`.

    Example:
        >>> from subquad import attention
        >>> q, k, v = torch.randn(3, 1, 4, 2000, 16, generator=torch.Generator().manual_seed(0)).unbind()
        >>> attention(q, k, v, method=Auto(max_error=0.1)).shape
        torch.Size([1, 4, 2000, 16])
        >>> Auto(max_error=0.1).choose(q, k * 30, v).method
        Exact()
    """

    max_error: float = 0.05
    check_rows: int = 64
    remember: bool = False
    _memory: dict[Any, "Remembered"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_max_error(self.max_error)
        check_whole("check_rows", self.check_rows, MIN_CHECK_ROWS)
        if not isinstance(self.remember, bool):
            raise ValueError(f"remember: expected True or False, got {self.remember!r}")

    def __repr__(self) -> str:
        remember = ", remember=True" if self.remember else ""
        return f"Auto(max_error={self.max_error}, check_rows={self.check_rows}{remember})"

    def __copy__(self) -> "Auto":
        return Auto(self.max_error, self.check_rows, self.remember)

    def choose(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
        key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None,
    ) -> Choice:  # fmt: skip
        """Return the method for this call; arguments as for `attention`."""
        choose = outside_graph(self._choice, AUTO_IN_GRAPH)
        choice: Choice = choose(
            query, key, value, dropout_p, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            key_padding_mask=key_padding_mask, segment_ids=segment_ids,
        )  # fmt: skip
        return choice

    def _choice(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, **options: Any) -> Choice:
        check_tensors(query=query, key=key, value=value)
        training = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
        with undisturbed(query.device):
            call = Call.of(query.detach(), key.detach(), value.detach(), **options)
            try:
                has_form = not dropout_p and call.mask_kind != "heads"
                call = call.factored()
            except ValueError:
                has_form = False
            if not has_form:
                return _exact("dropout on weights, and masks of pairs or of query heads, have no linear form")
            choice = self._recalled(call, training) if self.remember else _chosen(call, training, self)
        log.info(choice.reason)
        return choice

    def _recalled(self, call: Call, training: bool) -> Choice:
        """Return the choice for a call, beginning with the last answer for its shape."""
        key = _shape(call, training), call.dtype, call.keep() is not None, call.segments is not None
        before = self._memory.pop(key, None)  # It is put back as the newest one.
        is_exact = before is not None and engine_of(before.choice.method) == "exact"
        if before is not None and is_exact and before.calls < REMEMBERED_CALLS:
            self._memory[key] = replace(before, calls=before.calls + 1)
            reason = before.choice.reason.removeprefix(EXACT).removesuffix(".")
            return _exact(f"as for the last call of this shape: {reason}")
        choice = _chosen(call, training, self, None if before is None or is_exact else before.choice.method)
        self._memory[key] = Remembered(choice)
        if len(self._memory) > MAX_REMEMBERED_SHAPES:
            self._memory.pop(next(iter(self._memory)), None)
        return choice


@dataclass(frozen=True)
class Remembered:
    """The last answer for a shape, and how many calls have taken it without a question."""

    choice: Choice
    calls: int = 0


def _exact(reason: str) -> Choice:
    return Choice(Exact(), NO_ERROR, f"{EXACT}{reason}.")


def _chosen(call: Call, training: bool, auto: Auto, first: AnyMethod | None = None) -> Choice:
    """Return the fastest method within the error budget of a call, or `first` if it is."""
    shape = _shape(call, training)
    if 0 in (shape.batch, shape.key_heads, shape.query_length, shape.key_length, shape.head_dim, shape.value_dim):
        return _exact("there is nothing to compute")
    faster = _faster(call.query, shape) if first is None else []
    if first is None and not faster:
        return _exact("no approximation is faster at this shape")
    budget = MAX_ASKING_SHARE * exact_flops(shape) - exact_rows_flops(shape, auto.check_rows)
    if budget < 0:
        return _exact(f"checking {auto.check_rows} rows of each head would take too long for such a short call")
    risk = risks(call)
    if not bool(risk.isfinite().all()):
        return _exact("inputs are not finite")
    picked = pick_rows(call, auto.check_rows, by_risk=risk)
    exact = exact_rows(call, picked, torch.promote_types(call.dtype, torch.float32))
    norm, doubt = picked.total(exact.square().sum(-1))
    norm -= STANDARD_ERRORS * doubt
    if not (isfinite(norm) and norm > 0):
        return _exact("the size of the output is not known well enough" if isfinite(norm) else "inputs are not finite")
    asker = Asker(call, shape, auto.max_error, picked, exact, norm, risk, budget)
    for method in _questions(asker, faster, first):
        found = asker.ask(method)
        if found.is_within(auto.max_error):
            return Choice(method, found, f"{label_of(method)}: its relative error is {found}, safety margin included.")
    return _exact(asker.conclusion())


def _questions(asker: Asker, faster: list[Any], first: AnyMethod | None) -> Iterator[Any]:
    """Yield the methods to check, fastest first; a remembered one comes before, and the others only if it fails."""
    if first is not None:
        yield first
        faster = _faster(asker.call.query, asker.shape)
    rows = asker.exact.shape[2]
    last = [method_rows_flops(m, asker.shape, rows) for m in faster if engine_of(m) == "multipole" and m != first]
    asker.reserve = sum(price for price in last if price <= asker.budget)
    yield from (m for m in _with_fitted(faster, asker.call) if m != first)


def _shape(call: Call, training: bool) -> Shape:
    lay = call.layout
    return Shape(lay.queries, lay.keys, lay.width, lay.value_width, lay.key_heads * lay.group, lay.key_heads,
                 lay.rows // max(1, lay.key_heads), call.is_causal, training)  # fmt: skip


def _faster(query: Tensor, shape: Shape) -> list[Any]:
    """Return methods that should take less time than exact attention, the fastest first."""
    machine = cached(query.device, query.dtype) or cached(query.device)

    def price(method: Any) -> float:
        if machine is not None:
            return machine.seconds(method, shape)
        return cost_of(method, shape).flops * (1.0 if engine_of(method) == "exact" else FLOP_PRICE)

    limit = MAX_TIME_SHARE * price(Exact())
    maps = [*map(Taylor, (1, 2, 3, 4)), *(RandomFeatures(count, "hyperbolic") for count in (64, 256, 1024))]
    prices: dict[Any, float] = {m: price(m) for m in maps if m.size(shape.head_dim) <= 4 * shape.key_length}
    if native.available() and query.device.type == "cpu":
        sizes = shape.query_length, shape.key_length, shape.is_causal
        windows = (w for w in Window.candidates(shape.head_dim) if w.reach < shape.key_length and has_places(w, *sizes))
        prices |= {method: price(method) for method in (*windows, Multipole())}
    return sorted((method for method, p in prices.items() if p < limit), key=lambda method: prices[method])


def _with_fitted(methods: list[Any], call: Call) -> list[Any]:
    """Add methods in coordinates from the means of the call, except in causal calls, where those would leak the future.

    Nothing is searched: the moments take one pass over queries and keys, and `Asker` checks the result as any other.
    The fitted method comes first: it takes the same time, and what may be asked seldom suffices for both.
    """
    if call.is_causal:
        return methods
    moments = Moments.of(call, torch.arange(call.layout.queries, device=call.query.device))
    pairs = ([centered(m, moments), m] if m.coordinates else [m] for m in methods)
    return [method for pair in pairs for method in pair]
