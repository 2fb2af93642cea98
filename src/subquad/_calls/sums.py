"""Sums: keys added up, and how the sums of two parts become the sums of the whole.

    S = sum_j phi(k_j) exp(c_j - level) [v_j, 1],    level = max_j c_j

c_j is a log-scale per key, kept out of the features lest they overflow. Two parts are brought to the larger level of
both. Merging is associative, up to rounding.

Axes: b batch and key heads (or any leading dimensions), e value width, r features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NEVER = float("-inf")  # the logarithm of no weight


class Sums(NamedTuple):
    """Keys added up: sum_j phi(k_j) exp(c_j - log_scale) [v_j, 1], and the segment that they belong to."""

    values: Tensor  # (b, r, e + 1)
    poison: Tensor  # (b,): the number of visible keys; NaN once one of them or its value was not finite
    log_scale: Tensor | None = None  # (b, 1), or (b, r) where each feature has its own
    segment: Tensor | None = None  # (b,)


EMPTY = (0.0, 0.0, NEVER, -1)  # the values, poison, log-scale and segment of no keys


def merge(before: Sums, after: Sums) -> Sums:
    """Return the sums of both; nothing of `before` remains if a new segment has begun since."""
    old, old_poison, old_scale = before.values, before.poison, before.log_scale
    if before.segment is not None and after.segment is not None:
        same = (before.segment == after.segment)[..., None]
        old, old_poison = torch.where(same[..., None], old, 0.0), torch.where(same[..., 0], old_poison, 0.0)
        old_scale = None if old_scale is None else torch.where(same, old_scale, NEVER)
    poison = old_poison + after.poison
    if old_scale is None or after.log_scale is None:
        return Sums(old + after.values, poison, None, after.segment)
    scale = torch.maximum(old_scale, after.log_scale)
    level = finite(scale)
    new = after.values * (after.log_scale - level).exp()[..., None]
    return Sums(torch.addcmul(new, old, (old_scale - level).exp()[..., None]), poison, scale, after.segment)


def finite(log_scale: Tensor) -> Tensor:
    """Return 0 for -inf, the log-scale of no keys, so that no difference to it is inf - inf."""
    return torch.where(log_scale == NEVER, 0.0, log_scale)
