"""Auto: the cheapest method that keeps a promised error, decided for each call, else exact attention.

    1. Would any approximation be quicker than exact attention at this shape?            nothing is looked at
    2. Norms bound the logits of each row, and so Taylor's error in each row.            O(length * width), rigorous
    3. A few rows are computed exactly: how large the output is, how wrong a method is.  O(rows * keys), with a margin

The decision sees the whole call. So in a causal call the future can change which method is taken, though never what a
method computes from the past.
"""

import logging
import warnings
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subquad._error import Error, check_max_error

if TYPE_CHECKING:
    from subquad._features import RandomFeatures, Taylor
    from subquad._methods import Named
    from subquad._multipole import Multipole
    from subquad._sample import Call
    from subquad._times import Shape

SIGMAS = 3.0  # standard errors that a sum over sampled rows may be off by
GAIN = 0.8  # An approximation must be expected to take at most this share of exact attention's time.
# What a product of ours costs against one of torch's attention, where the machine has not been calibrated.
PRICE = 3.0

log = logging.getLogger("subquad")


@dataclass(frozen=True)
class Choice:
    """What `Auto` took for a call, the error that it knows of, and why."""

    method: "Named"
    error: Error
    reason: str


@dataclass(frozen=True)
class Auto:
    """The cheapest method whose relative error is at most `max_error`, else exact attention; decided for each call.

    check_rows: how many rows of each head are computed exactly to know how large the output is, and how wrong a method
        is where no bound tells. More rows make the decision surer and slower.

    The candidates are `Taylor` of degree 1 to 4, hyperbolic `RandomFeatures`, and, where the native kernels compute it,
    `Multipole`, for logits that no map around zero can serve. Where norms give a bound the promise
    is certain, rounding aside; where rows are sampled it is statistical, with a margin: rare rows that no norm tells
    apart can escape it. In a causal call the future can change which method is taken, never what a method computes.

    `choose` tells what is taken and why; so does the logger "subquad", at level INFO. A sequence in pieces, with a
    state, is refused: the promise is for the whole of it.

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
        if isinstance(self.check_rows, bool) or not isinstance(self.check_rows, int) or self.check_rows < 8:
            raise ValueError(f"check_rows: expected a whole number >= 8, got {self.check_rows!r}")

    def choose(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
        key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None,
    ) -> Choice:  # fmt: skip
        """The method for this call; arguments as for `attention`."""
        from subquad._kernel import widen  # Here, because attention itself is what a method is measured by.
        from subquad._layout import check_tensors
        from subquad._sample import Call, undisturbed

        check_tensors(query=query, key=key, value=value)

        if torch.compiler.is_compiling():
            raise ValueError(
                "method: Auto decides by numbers, which are not known while torch.compile makes a graph; expected a "
                "method by name, such as the one that Auto().choose(...) finds for a sample"
            )
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = widen(query), widen(key), widen(value)
        pairwise = attn_mask is not None and (
            attn_mask.dtype != torch.bool or (attn_mask.dim() > 1 and attn_mask.shape[-2] != 1)
        )
        per_head = attn_mask is not None and enable_gqa and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1
        if dropout_p or pairwise or per_head:
            return _exact("dropout on weights, and masks of pairs or of query heads, have no linear form")
        training = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        with undisturbed(query.device):
            call = Call.of(query, key, value, attn_mask, is_causal, scale, enable_gqa, key_padding_mask, segment_ids)
            return _chosen(call, training, self)


def _exact(reason: str) -> Choice:
    from subquad._features import Exact

    choice = Choice(Exact(), Error(0.0, "definition"), f"Exact(): {reason}.")
    log.info(choice.reason)
    return choice


def _chosen(call: "Call", training: bool, auto: Auto) -> Choice:
    from subquad._multipole import Multipole
    from subquad._plan import describe
    from subquad._sample import MARGIN, exact_rows, method_rows, pick_rows

    shape = _shape(call, training)
    if 0 in (shape.batch, shape.key_heads, shape.query_length, shape.key_length, shape.head_dim, shape.value_dim):
        return _exact("there is nothing to compute")
    quicker = _quicker(call.query, shape, auto.check_rows)
    if not quicker:
        return _exact("no approximation is quicker at this shape")
    if not bool(call.risks().isfinite().all()):
        return _exact("inputs are not finite")
    # A shift that is made from all keys knows the future: in a causal call it would let it leak.
    centre = None if call.is_causal else tuple(map(tuple, _centre(call).tolist()))
    picked = pick_rows(call, auto.check_rows)
    exact = exact_rows(call, picked)
    norm, doubt = picked.total(exact.square().sum(-1))
    norm -= SIGMAS * doubt
    if not (isfinite(norm) and norm > 0):
        return _exact("the size of the output is not known well enough" if isfinite(norm) else "inputs are not finite")
    nearest = Error(None, "nothing")
    candidates = []
    for plain in quicker:
        movable = centre is not None and not isinstance(plain, Multipole)
        candidates += [plain, _shifted(plain, centre)] if movable else [plain]
    for method in candidates:
        bound = _taylor_bound(method, call)
        found = Error(sqrt(bound / norm), "bound") if bound is not None else nearest
        # Where weights can be negative, a row that was not sampled can be off by any amount: there a bound is needed.
        # Those of Multipole's blocks are positive, and their values off by a few deviations at most.
        if not found.is_within(auto.max_error) and (isinstance(method, Multipole) or method.positive):
            difference, doubt = picked.total((method_rows(method, call, picked) - exact).square().sum(-1))
            found = Error(MARGIN * sqrt((difference + SIGMAS * doubt) / norm), "sample")
        if found.is_within(auto.max_error):
            choice = Choice(method, found, f"{describe(method)}: its relative error is {found}, margin included.")
            log.info(choice.reason)
            return choice
        if nearest.relative is None or (found.relative or 0.0) < nearest.relative:
            nearest, name = found, describe(method)
    tried = any(isinstance(method, Multipole) for method in quicker)
    return _exact(
        f"no quicker method keeps {auto.max_error:g}; the nearest, {name}, has {nearest}, margin included"
        + ("" if tried else "; to check Multipole() would cost too much here")
    )


def _shape(call: "Call", training: bool) -> "Shape":
    from subquad._times import Shape

    lay = call.layout
    return Shape(lay.queries, lay.keys, lay.width, lay.value_width, lay.key_heads * lay.group, lay.key_heads,
                 lay.rows // max(1, lay.key_heads), call.is_causal, training)  # fmt: skip


def _quicker(query: Tensor, shape: "Shape", check_rows: int) -> "list[Taylor | RandomFeatures | Multipole]":
    """Methods that should take less time than exact attention, the quickest first; the check of rows included."""
    from subquad._cache import cached
    from subquad._candidates import taylor
    from subquad._cost import cost
    from subquad._features import Exact, RandomFeatures
    from subquad._multipole import Multipole
    from subquad.native._library import AVAILABLE

    machine = cached(query.device, query.dtype) or cached(query.device)

    def price(method: "Named") -> float:
        if machine is not None:
            return machine.seconds(method, shape)
        return cost(method, **vars(shape)).flops * (1.0 if isinstance(method, Exact) else PRICE)

    limit = (GAIN - 2 * check_rows / shape.query_length) * price(Exact())
    maps: list[Taylor | RandomFeatures] = [
        *map(taylor, (1, 2, 3, 4)),
        *(RandomFeatures(count, "hyperbolic") for count in (64, 256, 1024)),
    ]
    few = [method for method in maps if method.size(shape.head_dim) <= 4 * shape.key_length]
    by_blocks = [Multipole()] if AVAILABLE and query.device.type == "cpu" and not shape.training else []
    prices: dict[Taylor | RandomFeatures | Multipole, float] = {m: price(m) for m in few}
    prices |= {m: 2 * price(m) for m in by_blocks}  # It is measured by computing all of it.
    return sorted((method for method, p in prices.items() if p < limit), key=lambda method: prices[method])


def _shifted(method: Any, centre: Any) -> "Taylor | RandomFeatures":
    with warnings.catch_warnings():  # Odd degrees warn; they are taken by a bound alone.
        warnings.simplefilter("ignore", UserWarning)
        return replace(method, key_shift=centre)  # type: ignore[no-any-return]


def _centre(call: "Call") -> Tensor:
    """(key heads, d): the mean of the keys that may be seen."""
    keys = call.layout.fold_key(call.key).double()
    keep = keys.new_ones(keys.shape[:-1]) if call.keep is None else call.keep.double()
    sums: Tensor = torch.where(keep[..., None] > 0, keys, 0.0).sum(1).unflatten(0, (-1, call.layout.key_heads)).sum(0)
    counts: Tensor = keep.sum(1).unflatten(0, (-1, call.layout.key_heads)).sum(0)
    return sums / counts.clamp(min=1)[:, None]


def _taylor_bound(method: object, call: "Call") -> float | None:
    """What the squared error over all rows cannot exceed, rounding aside; None where no bound is known."""
    from subquad._features import Taylor
    from subquad._methods import shifted

    if not isinstance(method, Taylor):
        return None
    reach = call.risks(shifted(method, call.key, call.layout.key_heads)).double()  # (b, g, n)
    low, high = method.series(-reach), method.series(reach)
    # ln rho over [-reach, reach]; an odd series is nearest to the exponential at 0, where r = 1.
    factors = torch.stack([low.clamp(min=0.0).log() + reach, high.log() - reach])
    top = factors.amax(0).clamp(min=0.0) if method.degree % 2 else factors.amax(0)
    if not bool((low > 0).all()):  # An odd series that is not positive: its normaliser can vanish.
        return inf
    values = call.layout.fold_key(call.value).double()
    seen = values.new_ones(values.shape[:-1], dtype=torch.bool) if call.keep is None else call.keep
    shown = torch.where(seen[..., None], values, 0.0)
    centre = shown.sum(1, keepdim=True) / seen.sum(1).clamp(min=1)[:, None, None]
    radius = torch.where(seen, (shown - centre).norm(dim=-1), 0.0).amax(-1)  # (b,): half of the diameter at least
    return float((((top - factors.amin(0)) / 4).tanh() * 2 * radius[:, None, None]).square().sum())
