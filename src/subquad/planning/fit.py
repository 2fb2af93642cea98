"""fit: the coordinates and the scale with which a feature method approximates given queries and keys best.

    moments of some rows -> coordinates for each head -> the best on other rows -> error on rows that were not used

A head changes only if the gain exceeds two standard errors. The validation rows are divided into parts, each of
consecutive rows of one sequence, and the errors of random features are averages over several draws:

    gain of a part = ln(error / error of the given method),    bound = mean gain + 2 standard errors over the parts

The coordinates with the least bound win if it is below ln 0.9. Query heads that share a key head share its coordinates,
and are judged together. Only then are the errors of the report measured, on rows that neither step has seen.

Axes: b batch and key heads, g query heads per key head, p rows, e value width, h key heads.
"""

from dataclasses import dataclass, replace
from math import inf, log
from typing import Any

import torch
from torch import Tensor

from subquad._calls.call import Call, check_tensors
from subquad.methods import MethodLike, label_of, resolve
from subquad.methods.checks import check_whole
from subquad.methods.error_estimate import ErrorEstimate
from subquad.planning.coordinates import Moments, by_head, combined, picked_at, row_weights, scales, variants
from subquad.planning.rows import exact_rows, method_rows, sampled_call, undisturbed

MIN_FIT_ROWS = 8
MIN_GAIN = 0.9  # factor of the error from which on a head changes
STANDARD_ERRORS = 2.0  # by which the gain must be sure
DRAWS = 4  # of random features: the error of one draw says little about the next text
PARTS = 4  # of each sequence's rows
SMALLEST, LARGEST = 1e-30, 1e30  # squared errors that have a logarithm


@dataclass(frozen=True)
class Fit:
    """The result of `fit`.

    Attributes:
        method: The method with its coordinates and scale; the given one if nothing helped.
        before: The relative error of the given method, on rows that were not used.
        after: That of the fitted one, on the same rows.
        heads: Both errors for each key head.
    """

    method: Any
    before: ErrorEstimate
    after: ErrorEstimate
    heads: tuple[tuple[float, float], ...]

    def __repr__(self) -> str:
        errors = f"{self.before.relative:.2g} -> {self.after.relative:.2g}"
        return f"Fit({label_of(self.method)}, relative error on held-out rows {errors})"


def fit(
    method: MethodLike, query: Tensor, key: Tensor, value: Tensor | None = None, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None, rows: int = 512, seed: int = 0,
) -> Fit:  # fmt: skip
    """Fit a method to a sample of queries and keys: shifts, and for random features also balance and scale.

    The result is a method like any other. Its constants do not depend on the sequence that it computes, so causal calls
    stay causal as long as the sample is not that sequence itself.

    Args:
        method: `Taylor`, `RandomFeatures`, or the name of one.
        query, key: As for `attention`; a sample, of the length that the method is for.
        value: As for `attention`; the keys by default. Errors are those of the output.
        attn_mask, is_causal, scale, enable_gqa, key_padding_mask, segment_ids: As for `attention`.
        rows: How many rows of each head to use: a quarter for the moments, half to choose, a quarter for the report.
            Rows that are padding in the whole batch are not drawn.
        seed: Seed for drawing rows.

    Returns:
        The fitted method, and its error before and after on rows that were not used for anything else.

    Raises:
        ValueError: The method has nothing to fit, or there are too few rows.

    Example:
        >>> from subquad import Taylor, fit
        >>> q, k, v = torch.randn(3, 1, 2, 512, 16, generator=torch.Generator().manual_seed(0)).unbind()
        >>> fit(Taylor(2), q / 2 + 1, k / 2 + 1, v)
        Fit(Taylor(2), both sides centered, relative error on held-out rows 0.38 -> 0.014)
    """
    found = resolve(method)
    if not getattr(found, "coordinates", ()):
        raise ValueError(f"method: expected Taylor or RandomFeatures, which have something to fit, got {found}")
    check_whole("rows", rows, MIN_FIT_ROWS)
    value = key if value is None else value
    check_tensors(query=query, key=key, value=value)
    with undisturbed(query.device):
        call = _without_padding(sampled_call(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            key_padding_mask=key_padding_mask, segment_ids=segment_ids,
        ))  # fmt: skip
        for name, x in (("query", call.query), ("key", call.key), ("value", call.value)):
            if not bool(x.isfinite().all()):
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity among them")
        return fit_call(found, call, rows, seed)


def fit_call(method: Any, call: Call, rows: int = 512, seed: int = 0) -> Fit:
    """Fit a method to a call without a pair mask."""
    places = torch.arange(call.layout.queries, device=call.query.device)
    places = places[row_weights(call, places)[:, 0].any(0)]
    count = 0 if call.is_empty else len(places)
    if count < MIN_FIT_ROWS:
        raise ValueError(f"query: expected at least {MIN_FIT_ROWS} rows that see a key, to fit a method, got {count}")
    order = places[torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(places.device)][:rows]
    own, chosen, held = (x.sort().values for x in order.tensor_split([len(order) // 4, 3 * len(order) // 4]))
    moments = [Moments.of(call, own), Moments.by_attention(call, own)]
    fitted = _best(method, moments, Rows(call, chosen))
    report = Rows(call, held)
    before, after = report.squares(method), report.squares(fitted)
    heads = zip(*(report.relative(x, (0,)).tolist() for x in (before, after)), strict=True)
    old, new = (ErrorEstimate(float(report.relative(x, (0, 1))), "sample") for x in (before, after))
    return Fit(fitted, old, new, tuple(heads))


def _without_padding(call: Call) -> Call:
    """Return the call with 0 in place of padding."""
    layout, keep = call.layout, call.keep()
    if keep is None:
        return call
    k, v = (layout.unfold(torch.where(keep[..., None], layout.fold_key(x), 0.0)) for x in (call.key, call.value))
    shown = row_weights(call, torch.arange(layout.queries, device=layout.device))[..., None] > 0
    q = layout.unfold_query(torch.where(shown, layout.fold_query(call.query), 0.0))
    return call._replace(query=q, key=k, value=v)


class Rows:
    """Some rows of a call, and the squared errors of methods on them: (parts, h)."""

    def __init__(self, call: Call, rows: Tensor) -> None:
        self._call, self._picked = call, picked_at(call, rows)
        self._weights = row_weights(call, rows)[..., None]
        self._exact = exact_rows(call, self._picked)
        self._norms = self._by_part(self._exact)

    def squares(self, method: Any) -> Tensor:
        found = self._by_part(method_rows(method, self._call, self._picked) - self._exact)
        return found.nan_to_num(nan=inf)  # Weights of an odd series can add up to 0.

    def average(self, method: Any) -> Tensor:
        """Return the mean of the squared errors over several draws of a random method, or those of another one."""
        found: Tensor = torch.stack([self.squares(each) for each in method.draws(DRAWS)]).mean(0)
        return found.clamp(SMALLEST, LARGEST)

    def relative(self, squares: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Return the relative error of all rows together along these axes of (parts, h)."""
        found, norms = (x.sum(axes) for x in (squares, self._norms))
        return torch.where(found == 0, 0.0, found / norms).sqrt()

    def _by_part(self, rows: Tensor) -> Tensor:
        squares = (rows * self._weights).square().sum(-1)  # (b, g, p)
        parts = torch.stack([part.sum(-1) for part in squares.tensor_split(min(PARTS, squares.shape[-1]), -1)])
        found: Tensor = parts.unflatten(1, by_head(self._call)).sum((3, 4)).flatten(0, 1)
        return found


def _best(method: Any, moments: list[Moments], rows: Rows) -> Any:
    """Return the method with the least error on the rows: coordinates head by head, then one scale for all heads."""
    options, heads = variants(method, moments), moments[0].key.shape[0]
    given = rows.average(method)
    tried = (combined(method, options, [place] * heads) for place in range(1, len(options)))
    bounds = torch.stack([_bound(rows.average(each), given) for each in tried])  # (options - 1, h)
    least, choice = bounds.min(0)
    choice = torch.where(least < log(MIN_GAIN), choice + 1, 0)
    found = combined(method, options, choice.tolist()) if bool(choice.any()) else method
    errors, has_error = rows.average(found), (given > SMALLEST).any(0)
    for scale in scales(method, moments):
        scaled = replace(found, scale=scale)
        own = rows.average(scaled)
        # All heads have the same scale, so none of them may lose by it, and it must be worth it in a typical one.
        bound, gain = _bound(own, given)[has_error], _bound(own, errors)[has_error]
        if len(gain) and bool((bound < log(MIN_GAIN)).all()) and bool(gain.mean() < log(MIN_GAIN)):
            found, errors = scaled, own
    return found


def _bound(squares: Tensor, given: Tensor) -> Tensor:
    """Return (h,): an upper bound on ln(error / error of the given method)."""
    gains, counted = (squares / given).log() / 2, given > SMALLEST  # (parts, h); padding has no error
    count = counted.sum(0)
    mean = (gains * counted).sum(0) / count.clamp(min=1)
    spread = ((gains - mean) * counted).square().sum(0) / (count - 1).clamp(min=1)
    return torch.where(count > 1, mean + STANDARD_ERRORS * (spread / count.clamp(min=1)).sqrt(), inf)
