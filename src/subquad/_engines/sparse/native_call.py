"""Sparse attention in the native kernels: which calls they serve, and how they are called."""

import torch
from torch import Tensor

from subquad import native
from subquad._torch_internals import is_transformed
from subquad.native.calls import TYPES


def is_served(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the kernels serve a call with these tensors."""
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    return False
