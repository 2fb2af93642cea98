"""The numbers that all claims draw and compare: float64, from a seed, equal but for rounding."""

import torch
from torch import Tensor

ROUNDING = 1e-12  # of float64, with some room


def normal(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * spread


def distance(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|."""
    return float((found - wanted).norm() / wanted.norm())


def farthest(found: Tensor, wanted: float) -> float:
    """The largest |found - wanted|."""
    return float((found - wanted).abs().max())
