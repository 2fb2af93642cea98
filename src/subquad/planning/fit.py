"""fit: the coordinates and the scale with which a feature method approximates given queries and keys best.

    moments of some rows -> coordinates for each head -> the best on other rows -> error on rows that were not used

Every head takes what has the least error on the validation rows, and stays as it is if nothing helps. Only then are
the errors of the report measured, on rows that neither step has seen.

Axes: b batch and key heads, g query heads per key head, p rows, e value width, h key heads.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from subquad._calls.call import Call, check_tensors
from subquad.methods import MethodLike, label_of, resolve
from subquad.methods.checks import check_whole
from subquad.methods.error_estimate import ErrorEstimate
from subquad.planning.coordinates import Moments, by_head, combined, picked_at, scales, variants
from subquad.planning.rows import exact_rows, method_rows, sampled_call, undisturbed

MIN_FIT_ROWS = 8
MIN_GAIN = 0.95  # of the error: less is no reason to change a head


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
        rows: How many rows of each head to use: half for the moments, a quarter to choose, a quarter for the report.
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
        call = sampled_call(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            key_padding_mask=key_padding_mask, segment_ids=segment_ids,
        )  # fmt: skip
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not bool(x.isfinite().all()):
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity among them")
        return fit_call(found, call, rows, seed)


def fit_call(method: Any, call: Call, rows: int = 512, seed: int = 0) -> Fit:
    """Fit a method to a call without a pair mask."""
    n, m = call.layout.queries, call.layout.keys
    if n < MIN_FIT_ROWS or call.is_empty:
        raise ValueError(f"query: expected at least {MIN_FIT_ROWS} rows to fit a method, got {n}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator).to(call.query.device)[:rows]
    own, chosen, held = (x.sort().values for x in order.tensor_split([len(order) // 2, 3 * len(order) // 4]))
    keys = torch.randperm(m, generator=generator).to(call.key.device)[: max(1, m // 2)]
    moments = [Moments.of(call, own, keys), Moments.by_attention(call, own)]
    fitted = _best(method, moments, Rows(call, chosen))
    report = Rows(call, held)
    before, after = report.squares(method), report.squares(fitted)
    pairs = zip(report.relative(before), report.relative(after), strict=True)
    old, new = (ErrorEstimate(report.relative(x.sum())[0], "sample") for x in (before, after))
    return Fit(fitted, old, new, tuple(pairs))


class Rows:
    """Some rows of a call, and the squared errors of methods on them, (h,)."""

    def __init__(self, call: Call, rows: Tensor) -> None:
        self._call, self._picked = call, picked_at(call, rows)
        self._exact = exact_rows(call, self._picked)
        self._norms = self._by_head(self._exact)

    def squares(self, method: Any) -> Tensor:
        found = self._by_head(method_rows(method, self._call, self._picked) - self._exact)
        return found.nan_to_num(nan=inf)  # Weights of an odd series can add up to 0.

    def relative(self, squares: Tensor) -> list[float]:
        """Return the relative error of each head; of all heads, if their squares were added up."""
        norms = self._norms if squares.dim() else self._norms.sum()
        found = torch.where(squares == 0, 0.0, squares / norms).sqrt()
        return [float(x) for x in found.reshape(-1)]

    def _by_head(self, rows: Tensor) -> Tensor:
        squares: Tensor = rows.square().sum((1, 2, 3)).unflatten(0, by_head(self._call)).sum((0, 2))
        return squares


def _best(method: Any, moments: list[Moments], rows: Rows) -> Any:
    """Return the method with the least error on the rows: coordinates head by head, then one scale for all heads."""
    options, heads = variants(method, moments), moments[0].key.shape[0]
    tried = [method, *(combined(method, options, [place] * heads) for place in range(1, len(options)))]
    errors = torch.stack([rows.squares(each) for each in tried])  # (options, h)
    errors[1:] /= MIN_GAIN**2
    choice = errors.argmin(0)
    found = combined(method, options, choice.tolist()) if bool(choice.any()) else method
    least = rows.squares(found)
    for scale in scales(method, moments):
        scaled = replace(found, scale=scale)
        squares = rows.squares(scaled)
        is_better = bool(squares.sum() < least.sum() * MIN_GAIN**2)
        if is_better and bool((squares.log() - least.log()).mean() < 0):  # also in a typical head
            found, least = scaled, squares
    return found
