"""Random inputs and error measures of the claims, in float64."""

import torch
from torch import Tensor

ROUNDING = 1e-12  # bound of rounding errors in float64, with a margin


def normal(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * spread


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return |found - wanted| / |wanted|."""
    return float((found - wanted).norm() / wanted.norm())


def farthest(found: Tensor, wanted: float) -> float:
    """Return the largest |found - wanted|."""
    return float((found - wanted).abs().max())
