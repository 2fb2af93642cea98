"""The kernels' torch twin, for derivatives that are differentiated again."""

from typing import Any

import torch
from torch import Tensor

from subquad._calls.sums import Sums
from subquad._engines.features.alignment import as_packed
from subquad._engines.features.choose_form import Form, Sizes
from subquad._engines.features.forms import run_form
from subquad._engines.features.method_kernel import kernel_of
from subquad._engines.features.native_call import MAP_NAMES, Numbers, Operands
from subquad._engines.features.sums import Tokens
from subquad._engines.finite import widen
from subquad.methods import Linear, RandomFeatures, Separable, Taylor, feature_method
from subquad.methods.method import Given

CHUNK_TOKENS = 64
SIZES = Sizes(CHUNK_TOKENS, CHUNK_TOKENS, 16 * CHUNK_TOKENS, CHUNK_TOKENS, 1)


def method_of(numbers: Numbers, table: Tensor | None) -> Any:
    """Return the method that the kernels know by these numbers."""
    name = MAP_NAMES[numbers.map]
    if name == "taylor":
        return Taylor(numbers.degree)
    if name == "positive":
        return RandomFeatures(numbers.features, "positive", scale=numbers.feature_scale, matrix=table)
    if name == "hyperbolic":
        return RandomFeatures(numbers.features, "hyperbolic", scale=numbers.feature_scale, matrix=table)
    if name == "separable":
        return Separable()
    if name == "elu":
        return Linear("elu")
    return Linear("relu") if name == "relu" else Given(numbers.features, name == "logged")


def twin_gradients(grad: Tensor, after_grad: Tensor | None, operands: Operands, numbers: Numbers) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and the sums before them, as functions that can be differentiated again."""
    q, k, v, keep, table, _, before, poison, log_scale, coordinates = operands
    method = feature_method(method_of(numbers, table))
    own_q, own_k, scale = q, k, numbers.query_scale * numbers.key_scale
    if coordinates is not None:
        own_q, own_k = widen(q) * numbers.query_scale, widen(k) * numbers.key_scale
        (own_q, own_k), scale = as_packed(coordinates, numbers.is_tilted, own_q, own_k), 1.0
    kernel, mapped_q, mapped_k = kernel_of(method, own_q, own_k, scale, numbers.is_normalized)
    tokens = Tokens(mapped_q, mapped_k, v, keep)
    sums = None
    if before is not None:
        assert poison is not None  # They come together.
        sums = Sums(before.mT, poison, log_scale)
    form: Form = "chunked" if numbers.is_causal else "linear"
    sizes = SIZES._replace(batch=q.shape[0], wave=CHUNK_TOKENS if numbers.is_causal else CHUNK_TOKENS**2)
    output, after = run_form(form, sizes, kernel, tokens, (sums, None), numbers.is_causal, after_grad is not None)
    results, grads = [output], [grad.to(output.dtype)]
    if after_grad is not None and after is not None:
        results.append(after.values)
        grads.append(after_grad.mT)
    inputs = (q, k, v, *(() if before is None else (before,)))
    return torch.autograd.grad(results, inputs, grads, create_graph=True, materialize_grads=True)
