"""Sparse attention by the native kernels: as an operator of torch, or directly where nothing records the call."""

import torch
from torch import Tensor

from subquad._engines.sparse.operators import computed
from subquad._engines.sparse.pattern import Pattern
from subquad._torch_internals import has_numbers, is_recorded


def attend_natively(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output (b, g, n, e) and the level (b, g, n), wide; arguments as for `native_call`."""
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    has_values = not torch.compiler.is_compiling() and not is_recorded() and has_numbers(q)
    if learns or not has_values:
        output, level, poison = torch.ops.subquad.sparse(q, k, v, sinks, *pattern, scale, softcap)
        is_poisoned = not has_values or bool(poison.sum() != 0)  # A program is recorded for other numbers too.
    else:
        (output, level, poison), is_poisoned = computed(q, k, v, pattern, scale, softcap, sinks)
    output = output.masked_fill(poison.isnan()[..., None], float("nan")) if is_poisoned else output
    return output, level
