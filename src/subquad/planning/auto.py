"""Auto: the cheapest method within an error budget, decided for each call; exact attention if there is none.

    1. Would any approximation be faster than exact attention at this shape?             no number is looked at
    2. Norms bound the logits of each row, and so Taylor's error in each row.            O(length * width), rigorous
    3. A few rows are computed exactly: how large the output is, how wrong a method is.  O(rows * keys), with a margin

The decision sees the whole call. So in a causal call the future can change which method is taken, though never what a
method computes from the past.
"""

import logging
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from subquad import native
from subquad._calls.call import Call, check_tensors
from subquad._engines import engine_of
from subquad._engines.features.method_kernel import shifted
from subquad.methods import AnyMethod, Exact, Multipole, RandomFeatures, Taylor, Window, label_of
from subquad.methods.checks import check_whole
from subquad.methods.error_estimate import NO_ERROR, UNKNOWN_ERROR, ErrorEstimate, check_max_error
from subquad.planning.calibration_file import cached
from subquad.planning.cost import cost_of
from subquad.planning.measured_error import SAMPLE_MARGIN
from subquad.planning.rows import WINDOW_ROW_PRICE, exact_rows, method_rows, pick_rows, risks, undisturbed
from subquad.planning.shape import Shape
from subquad.planning.sparse_pairs import has_places

STANDARD_ERRORS = 3.0  # allowed deviation of a sum over sampled rows
MAX_TIME_SHARE = 0.8  # of exact attention's time that an approximation may be expected to take
FLOP_PRICE = 3.0  # of one of our FLOPs, relative to torch's attention, where the machine is not calibrated
MIN_CHECK_ROWS = 8
WINDOWS = (Window(256, sinks=4), Window(1024, sinks=4))

log = logging.getLogger("subquad")


@dataclass(frozen=True)
class Choice:
    """The method that `Auto` chose for a call, its estimated error, and why."""

    method: AnyMethod
    error: ErrorEstimate
    reason: str


@dataclass(frozen=True)
class Auto:
    """The cheapest method whose relative error is at most `max_error`, else exact attention; decided for each call.

    The candidates are `Taylor` of degree 1 to 4, hyperbolic `RandomFeatures`, and, where the native kernels compute
    them, `Window` and `Multipole`, for logits that no map around zero can serve. In a causal call the future can change
    which method is taken, never what a method computes.

    Where norms give a bound the promise is certain, except for rounding; where rows are sampled it is statistical, with
    a margin: rare rows that no norm sets apart can escape it. A window is always judged by sampled rows, and leaves out
    far keys without looking at them. If a share s of all rows depends on far keys, those rows are wrong, the error is
    about sqrt(2 s), and r rows drawn at random miss all of them with probability (1 - s)^r. More `check_rows` make that
    less likely; where single far keys matter, name a method instead.

    `choose` returns what is taken and why; the logger "subquad" reports it at level INFO. A sequence in pieces, with a
    state, raises ValueError: the promise is for the whole of it.

    Args:
        max_error: The relative error that is allowed.
        check_rows: How many rows of each head are computed exactly, to know how large the output is, and how wrong a
            method is where there is no bound. More rows make the decision safer and slower.

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

    def __post_init__(self) -> None:
        check_max_error(self.max_error)
        check_whole("check_rows", self.check_rows, MIN_CHECK_ROWS)

    def choose(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
        key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None,
    ) -> Choice:  # fmt: skip
        """Return the method for this call; arguments as for `attention`."""
        check_tensors(query=query, key=key, value=value)
        if torch.compiler.is_compiling():
            raise ValueError(
                "method: Auto decides by numbers, which torch.compile does not know; expected a method by name, such "
                "as the one that Auto().choose(...) finds for a sample"
            )
        training = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
        with undisturbed(query.device):
            call = Call.of(
                query.detach(), key.detach(), value.detach(), attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                enable_gqa=enable_gqa, key_padding_mask=key_padding_mask, segment_ids=segment_ids,
            )  # fmt: skip
            if dropout_p or call.mask_kind in ("heads", "pairs"):
                return _exact("dropout on weights, and masks of pairs or of query heads, have no linear form")
            choice = _chosen(call, training, self)
        log.info(choice.reason)
        return choice


def _exact(reason: str) -> Choice:
    return Choice(Exact(), NO_ERROR, f"Exact(): {reason}.")


def _chosen(call: Call, training: bool, auto: Auto) -> Choice:
    shape = _shape(call, training)
    if 0 in (shape.batch, shape.key_heads, shape.query_length, shape.key_length, shape.head_dim, shape.value_dim):
        return _exact("there is nothing to compute")
    faster = _faster(call.query, shape, auto.check_rows)
    if not faster:
        return _exact("no approximation is faster at this shape")
    if not bool(risks(call).isfinite().all()):
        return _exact("inputs are not finite")
    picked = pick_rows(call, auto.check_rows)
    exact = exact_rows(call, picked)
    norm, doubt = picked.total(exact.square().sum(-1))
    norm -= STANDARD_ERRORS * doubt
    if not (isfinite(norm) and norm > 0):
        return _exact("the size of the output is not known well enough" if isfinite(norm) else "inputs are not finite")
    closest, name = UNKNOWN_ERROR, ""
    for method in _with_shifts(faster, call):
        bound = _taylor_bound(method, call)
        found = ErrorEstimate(sqrt(bound / norm), "bound") if bound is not None else closest
        # With negative weights, a row that was not sampled can be off by any amount: only a bound is acceptable.
        if not found.is_within(auto.max_error) and method.positive:
            difference, doubt = picked.total((method_rows(method, call, picked) - exact).square().sum(-1))
            found = ErrorEstimate(SAMPLE_MARGIN * sqrt((difference + STANDARD_ERRORS * doubt) / norm), "sample")
        if found.is_within(auto.max_error):
            return Choice(method, found, f"{label_of(method)}: its relative error is {found}, safety margin included.")
        if closest.relative is None or (found.relative or 0.0) < closest.relative:
            closest, name = found, label_of(method)
    is_tried = any(engine_of(method) == "multipole" for method in faster)
    return _exact(
        f"no faster method stays within {auto.max_error:g}; closest is {name}: {closest} (safety margin included)"
        + ("" if is_tried else "; checking Multipole() would cost too much here")
    )


def _shape(call: Call, training: bool) -> Shape:
    lay = call.layout
    return Shape(lay.queries, lay.keys, lay.width, lay.value_width, lay.key_heads * lay.group, lay.key_heads,
                 lay.rows // max(1, lay.key_heads), call.is_causal, training)  # fmt: skip


def _faster(query: Tensor, shape: Shape, check_rows: int) -> list[Any]:
    """Return methods that should take less time than exact attention, the fastest first; the check of rows included."""
    machine = cached(query.device, query.dtype) or cached(query.device)

    def price(method: Any) -> float:
        if machine is not None:
            return machine.seconds(method, shape)
        return cost_of(method, shape).flops * (1.0 if engine_of(method) == "exact" else FLOP_PRICE)

    limit = (MAX_TIME_SHARE - 2 * check_rows / shape.query_length) * price(Exact())
    maps = [*map(Taylor, (1, 2, 3, 4)), *(RandomFeatures(count, "hyperbolic") for count in (64, 256, 1024))]
    prices: dict[Any, float] = {m: price(m) for m in maps if m.size(shape.head_dim) <= 4 * shape.key_length}
    if native.available() and query.device.type == "cpu":
        checked = 1 + min(1.0, WINDOW_ROW_PRICE * check_rows / shape.query_length)  # the call, and its check
        sizes = shape.query_length, shape.key_length, shape.is_causal
        windows = (w for w in WINDOWS if w.reach < shape.key_length and has_places(w, *sizes))
        prices |= {window: checked * price(window) for window in windows}
        prices[Multipole()] = 2 * price(Multipole())  # It is measured by computing all of it.
    return sorted((method for method, p in prices.items() if p < limit), key=lambda method: prices[method])


def _with_shifts(methods: list[Any], call: Call) -> list[Any]:
    """Add methods that center the keys. A shift made from all keys knows the future: in a causal call it would leak."""
    if call.is_causal:
        return methods
    center = tuple(map(tuple, _center(call).tolist()))
    pairs = ([m, replace(m, key_shift=center)] if "key_shift" in m.__dataclass_fields__ else [m] for m in methods)
    return [method for pair in pairs for method in pair]


def _center(call: Call) -> Tensor:
    """Return (key heads, d): the mean of the keys that may be seen."""
    keys, shown = call.layout.fold_key(call.key).double(), call.keep()
    keep = keys.new_ones(keys.shape[:-1]) if shown is None else shown.double()
    sums: Tensor = torch.where(keep[..., None] > 0, keys, 0.0).sum(1).unflatten(0, (-1, call.layout.key_heads)).sum(0)
    counts: Tensor = keep.sum(1).unflatten(0, (-1, call.layout.key_heads)).sum(0)
    return sums / counts.clamp(min=1)[:, None]


def _taylor_bound(method: Any, call: Call) -> float | None:
    """Return a bound of the squared error over all rows, rounding aside; None where no bound is known."""
    if not isinstance(method, Taylor):
        return None
    reach = risks(call, shifted(method, call.key, call.layout.key_heads)).double()  # (b, g, n)
    low, high = method.series(-reach), method.series(reach)
    # ln rho over [-reach, reach]; an odd series is nearest to the exponential at 0, where r = 1.
    factors = torch.stack([low.clamp(min=0.0).log() + reach, high.log() - reach])
    top = factors.amax(0).clamp(min=0.0) if method.degree % 2 else factors.amax(0)
    if not bool((low > 0).all()):  # An odd series that is not positive: its normalizer can vanish.
        return inf
    values, keep = call.layout.fold_key(call.value).double(), call.keep()
    seen = values.new_ones(values.shape[:-1], dtype=torch.bool) if keep is None else keep
    shown = torch.where(seen[..., None], values, 0.0)
    center = shown.sum(1, keepdim=True) / seen.sum(1).clamp(min=1)[:, None, None]
    radius = torch.where(seen, (shown - center).norm(dim=-1), 0.0).amax(-1)  # (b,): half of the diameter at least
    return float((((top - factors.amin(0)) / 4).tanh() * 2 * radius[:, None, None]).square().sum())
