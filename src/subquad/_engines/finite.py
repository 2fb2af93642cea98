"""Wide and finite numbers: what every engine computes with.

Features, sums and normalizers are never in half precision. A number that is not finite is replaced by 0 and remembered
as poison, 0 or NaN, which is added to the rows that may see it: 0 * NaN would reach the other rows too.
"""

from functools import reduce

import torch
from torch import Tensor

TINY, ENLARGEMENT = 2.0**-60, 2.0**90  # normalizers whose inverse is not squared, and their factor


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or float64 if it is wider."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.promote_types(x.dtype, torch.float32))


def poison_of(*tensors: Tensor) -> Tensor:
    """Return NaN for each row (..., d) that is not finite in one of the tensors, else 0."""
    return reduce(torch.add, ((x.detach() * 0).sum(-1) for x in tensors))


def cleaned(x: Tensor) -> Tensor:
    """Return x with 0 instead of NaN and infinities."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def inverse(normalizer: Tensor) -> Tensor:
    """Return 1 / normalizer; 0, with gradient 0, where it is exactly 0, as in a row without keys.

    Its derivative is the square of a number that is too large to be squared where the normalizer is tiny. There,
    1 / x = s (1 / (s x)): a power of two changes no bit of the result, and autograd multiplies by s twice.
    """
    empty = normalizer == 0
    factor = torch.where(normalizer.detach().abs() < TINY, ENLARGEMENT, 1.0).to(normalizer.dtype)
    return torch.where(empty, 0.0, torch.where(empty, 1.0, normalizer * factor).reciprocal() * factor)
