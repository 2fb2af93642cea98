"""Random projections: rows w ~ N(0, I) of width d, whose directions are coupled in blocks of up to d rows.

    independent   no coupling
    orthogonal    rows of a random rotation:  w_i.w_j = 0
    simplex       the same rows minus their mean, corners of a regular simplex:  cos(w_i, w_j) = -1 / (m - 1),  m rows

Lengths are drawn apart from the directions, so each row alone is N(0, I) in every coupling and in a block of any size:
estimates that are means over rows stay unbiased. A coupling changes only their variance.
"""

import random
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from subquad.methods.tables import constant

Coupling = Literal["orthogonal", "simplex", "independent"]
COUPLINGS: tuple[Coupling, ...] = ("orthogonal", "simplex", "independent")


@constant
def drawn(rows: int, width: int, coupling: Coupling, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (rows, width). Drawn by Python's generator: torch's may not be called inside `torch.func.vmap`."""
    generator = random.Random(seed)

    def normal(count: int) -> Tensor:
        values = [generator.gauss(0.0, 1.0) for _ in range(count * width)]
        return torch.tensor(values, dtype=torch.float64).reshape(count, width)

    if coupling == "independent" or width == 0:
        return normal(rows).to(device, dtype)
    blocks = []
    for start in range(0, rows, width):
        directions = _rotation(normal(width))[: rows - start]
        if coupling == "simplex":
            directions = _simplex(directions)
        blocks.append(directions * normal(len(directions)).norm(dim=-1, keepdim=True))
    return torch.cat(blocks).to(device, dtype)


def _rotation(normal: Tensor) -> Tensor:
    """Return a uniformly distributed orthogonal matrix (d, d), from a normal one."""
    basis, triangle = torch.linalg.qr(normal)
    # Householder's basis is uniform only after dividing by the signs of the triangle's diagonal.
    rotation: Tensor = (basis * triangle.diagonal().sign()).mT
    return rotation


def _simplex(directions: Tensor) -> Tensor:
    """Return the corners (m, d) of a regular simplex around 0, from m orthogonal unit vectors."""
    count = len(directions)
    if count == 1:
        return directions
    return (directions - directions.mean(0)) * sqrt(count / (count - 1))
