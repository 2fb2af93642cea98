"""The kernels' torch twin, for derivatives that are differentiated again."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad._engines.features.choose_form import Sizes
from subquad._engines.features.chunked import chunked
from subquad._engines.features.linear import linear
from subquad._engines.features.method_kernel import kernel_of
from subquad._engines.features.native_call import MAP_NAMES, Numbers, Operands
from subquad._engines.features.sums import Sums, Tokens
from subquad.methods import Linear, RandomFeatures, Separable, Taylor, feature_method

CHUNK_TOKENS = 64
SIZES = Sizes(CHUNK_TOKENS, CHUNK_TOKENS, 16 * CHUNK_TOKENS, CHUNK_TOKENS, 1)


@dataclass(frozen=True)
class Given:
    """A user's features, made before the call; the last column of keys is their log-scale, if they have one."""

    count: int
    has_log_scale: bool
    positive: bool = True

    def size(self, width: int) -> int:
        return self.count

    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor | tuple[Tensor, Tensor]:
        return (x[..., :-1], x[..., -1]) if self.has_log_scale and not is_query else x


def method_of(numbers: Numbers, table: Tensor | None) -> Any:
    """Return the method that the kernels know by these numbers."""
    name = MAP_NAMES[numbers.map]
    if name == "taylor":
        return Taylor(numbers.degree)
    if name == "positive":
        return RandomFeatures(numbers.features, "positive", matrix=table)
    if name == "hyperbolic":
        return RandomFeatures(numbers.features, "hyperbolic", matrix=table)
    if name == "separable":
        return Separable()
    if name == "elu":
        return Linear("elu")
    return Linear("relu") if name == "relu" else Given(numbers.features, name == "logged")


def twin_gradients(grad: Tensor, operands: Operands, numbers: Numbers) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v as functions that can be differentiated in `grad` and in themselves."""
    q, k, v, keep, table, _, before, poison, log_scale = operands
    method = feature_method(method_of(numbers, table))
    kernel, mapped_q, mapped_k = kernel_of(method, q, k, numbers.query_scale * numbers.key_scale, numbers.is_normalized)
    tokens = Tokens(mapped_q, mapped_k, v, keep)
    sums = None if before is None or poison is None else Sums(before.mT, poison, log_scale)
    if numbers.is_causal:
        output, _ = chunked(kernel, tokens, sums, SIZES, want_sums=False)
    else:
        output, _ = linear(kernel, tokens, sums, CHUNK_TOKENS * CHUNK_TOKENS)
    return torch.autograd.grad(output, (q, k, v), grad.to(output.dtype), create_graph=True)
