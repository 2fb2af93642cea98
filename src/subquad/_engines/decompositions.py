"""The operators of the native kernels in torch's own operations, for programs that run without subquad."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subquad._calls.sums import Sums
from subquad._engines.features.at_once import run_at_once
from subquad._engines.features.double_backward import method_of
from subquad._engines.features.method_kernel import kernel_of
from subquad._engines.features.native_call import Numbers, Operands
from subquad._engines.features.operators import OPERANDS, wide
from subquad._engines.features.sums import Tokens
from subquad._engines.finite import widen
from subquad._engines.sparse.at_once import attend_at_once
from subquad._engines.sparse.operators import PATTERN
from subquad._engines.sparse.pattern import Pattern
from subquad.methods.method import feature_method


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a table for `ExportedProgram.run_decompositions`: after it, no operator of subquad is left.

    The program then needs neither subquad nor its kernels. Lengths and batches stay dynamic.

    Example:
        >>> from subquad import Taylor, attention
        >>> class Model(torch.nn.Module):
        ...     def forward(self, q, k, v):
        ...         return attention(q, k, v, method=Taylor(2))
        >>> program = torch.export.export(Model(), tuple(torch.randn(3, 1, 2, 20, 4)))
        >>> program = program.run_decompositions(decompositions())
        >>> any("subquad" in str(node.target) for node in program.graph.nodes)
        False
    """
    return {
        torch.ops.subquad.forward.default: _features_forward,
        torch.ops.subquad.sparse.default: _sparse_forward,
    }


def _features_forward(*arguments: Any) -> list[Tensor]:
    """Compute `subquad::forward`: the poison is already in the output, and no backward pass reads the normalizer."""
    operands, numbers, want_sums = Operands(*arguments[:OPERANDS]), Numbers(*arguments[OPERANDS:-1]), arguments[-1]
    method = feature_method(method_of(numbers, operands.table))
    kernel, q, k = kernel_of(
        method, operands.q, operands.k, numbers.query_scale * numbers.key_scale, numbers.is_normalized
    )
    kernel = replace(kernel, table=operands.table)
    before = None
    if operands.before is not None and operands.before_poison is not None:
        before = Sums(operands.before.mT, operands.before_poison, operands.before_scale)
    tokens = Tokens(q, k, operands.v, operands.keep)
    output, sums = run_at_once("chunked" if numbers.is_causal else "linear", kernel, tokens, before, numbers.is_causal)
    output = output.to(wide(operands.q.dtype))
    nothing = output.new_zeros(output.shape[:3])
    if not want_sums:
        return [output, nothing, nothing]
    assert sums is not None
    log_scale = output.new_empty(output.shape[0], 0) if sums.log_scale is None else sums.log_scale
    return [output, nothing, nothing, sums.values.mT, sums.poison, log_scale]


def _sparse_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    """Compute `subquad::sparse`: the poison is already in the output."""
    arguments = (q, k, v, sinks, *others)
    scale, softcap = arguments[PATTERN.stop :]
    q, k, v = widen(q), widen(k), widen(v)
    output, level = attend_at_once(q * scale, k, v, Pattern(*arguments[PATTERN]), softcap, sinks)
    return output, level, output.new_zeros(output.shape[:3])
