"""A warning for logits so large that zeros would be as good an answer.

    r = root mean square of the logits of some pairs;    warn if the method's own error on [-r, r] is above 1

This is not a bound, but the error that the method predicts for typical logits of the call. It is computed in the 1st,
2nd, 4th, 8th, ... call of a line of code, which makes its amortized cost small, until that line was warned about.
"""

import sys
import warnings
from math import inf, isfinite, sqrt
from typing import Any

import torch

from subquad._calls.call import Call
from subquad._engines.features.alignment import aligned
from subquad._torch_internals import has_numbers, in_transform, is_recorded
from subquad.methods import label_of
from subquad.methods.method import FeatureMethod
from subquad.planning.rows import undisturbed

SAMPLE_TOKENS = 16  # of the queries and of the keys of each head

_calls: dict[tuple[str, int], float] = {}  # by file and line; infinite after the warning


def warn_far_range(method: Any, call: Call, stacklevel: int) -> None:
    """Warn if a method predicts a relative error above 1 for the logits of a call; `stacklevel` as for a warning."""
    if not isinstance(method, FeatureMethod) or method.warning is not None or torch.compiler.is_compiling():
        return  # A method that always warns has said enough.
    frame = sys._getframe(stacklevel)
    place = (frame.f_code.co_filename, frame.f_lineno)
    count = _calls[place] = _calls.get(place, 0) + 1
    if count == inf or int(count) & (int(count) - 1) or call.is_empty:
        return
    if is_recorded() or in_transform() or not has_numbers(call.query):
        return
    size = typical_logit(method, call)
    found = method.error(-size, size, width=call.layout.width).relative if isfinite(size) else None
    if found is not None and found > 1:
        _calls[place] = inf
        warnings.warn(
            f"{label_of(method)} is far outside its range: logits of this call are typically {size:.2g} in size, for "
            "which it predicts a relative error above 1, so that zeros would be as good. Use Multipole or Exact for a "
            "model that was trained with softmax, or scale the logits down; subquad.plan(sample=...) compares methods.",
            stacklevel=stacklevel + 1,
        )


def typical_logit(method: FeatureMethod, call: Call) -> float:
    """Return the root mean square of the logits of evenly spaced queries and keys, in the method's coordinates."""
    n, m = call.layout.queries, call.layout.keys
    rows, columns = slice(None, None, -(-n // SAMPLE_TOKENS)), slice(None, None, -(-m // SAMPLE_TOKENS))
    with undisturbed(call.query.device):
        few = call._replace(query=call.query[..., rows, :], key=call.key[..., columns, :])
        q, k = (x[..., : call.layout.width].double() for x in aligned(method, few))
        squares = torch.einsum("bgnd,bmd->bgnm", q, k).square()
        keep = call.keep() if call.mask_kind in (None, "keys") else None
        shown = k.new_ones(k.shape[:2], dtype=torch.bool) if keep is None else keep[:, columns]
        shown = shown[:, None, None].expand_as(squares)
        mean = float(squares[shown].mean()) if bool(shown.any()) else 0.0
    return sqrt(mean) * abs(call.logit_scale) if mean == mean else mean
