"""A learned map: its features are made once, head by head, and take the place of queries and keys.

    query (..., heads, n, d) -> (..., heads, n, r)        key (..., key heads, m, d) -> (..., key heads, m, r)

The map sees tensors in the public layout, so that it may hold parameters for each head. With a log-scale, features have
one more column, as `Given` describes.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.call import Call
from subquad._engines.features.kernel import root_scales
from subquad._engines.finite import widen
from subquad.methods.method import Given, UserMap


class Mapped(NamedTuple):
    """A call whose queries and keys are features, and the log-scales of both, if there are any."""

    method: Given
    call: Call
    query_scale: Tensor | None = None  # (..., heads, n)
    key_scale: Tensor | None = None  # (..., key heads, m)


def mapped(feature_map: Any, call: Call) -> Mapped:
    """Return the call with features for queries and keys; a token that is not finite has features that are not."""
    method, layout, (q, k, v) = UserMap(feature_map), call.layout, call.folded()
    q, k = layout.unfold_query(q), layout.unfold(k)
    finite = [x.isfinite().all(-1, keepdim=True) for x in (q, k)]
    roots = root_scales(call.logit_scale)
    q, k = (torch.where(flag, widen(x) * root, 0.0) for flag, x, root in zip(finite, (q, k), roots, strict=True))
    (q, query_scale), (k, key_scale) = method.mapped(q, is_query=True), method.mapped(k, is_query=False)
    given = Given(q.shape[-1], key_scale is not None)
    if key_scale is not None:
        q, k = F.pad(q, (0, 1)), torch.cat([k, key_scale[..., None]], -1)
    q, k = (torch.where(flag, x, torch.nan) for flag, x in zip(finite, (q, k), strict=True))
    layout = replace(layout, width=q.shape[-1])
    features = call._replace(layout=layout, query=q, key=k, value=layout.unfold(v), scale=1.0)
    return Mapped(given, features, query_scale, key_scale)
