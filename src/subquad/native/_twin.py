"""The slow twin of the kernels: the same call in torch's own operations, where a derivative is differentiated again."""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subquad import _forms as forms
from subquad._features import FeatureMap, Linear, RandomFeatures, Taylor
from subquad._kernel import FeatureKernel, Sums
from subquad._methods import Approximation, kernel_of
from subquad._separable import Separable
from subquad.native import _library as native

CHUNK = 64


@dataclass(frozen=True)
class Given(FeatureMap):
    """Features that were made before, keys with a last column, their log-scale, where they have one."""

    features: int
    logged: bool
    positive: bool = True

    def size(self, width: int) -> int:
        return self.features

    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor | tuple[Tensor, Tensor]:
        return (x[..., :-1], x[..., -1]) if self.logged and not is_query else x


def method_of(map: int, degree: int, features: int, table: Tensor | None) -> Approximation:
    if map == native.TAYLOR:
        with warnings.catch_warnings():  # of odd degrees; who chose one has been told
            warnings.simplefilter("ignore")
            return Taylor(degree)
    if map == native.POSITIVE:
        return RandomFeatures(features, "positive", matrix=table)
    if map == native.HYPERBOLIC:
        return RandomFeatures(features, "hyperbolic", matrix=table)
    if map in (native.ELU, native.RELU):
        return Linear("elu" if map == native.ELU else "relu")
    if map == native.SEPARABLE:
        return Separable()
    return Given(features, logged=map == native.LOGGED)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, table: Tensor | None, before: Sums | None,
    map: int, degree: int, features: int, query_scale: float, key_scale: float, is_causal: bool, normalized: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of q, k and v, as functions that can be differentiated in `grad` and in themselves."""
    method = method_of(map, degree, features, table)
    kernel, mapped_q, mapped_k = kernel_of(method, q, k, query_scale * key_scale)
    if isinstance(kernel, FeatureKernel):
        kernel = replace(kernel, normalized=normalized)
    if is_causal:
        output, _ = forms.chunked(kernel, mapped_q, mapped_k, v, keep, None, before, CHUNK, CHUNK, 16 * CHUNK, False)
    else:
        output, _ = forms.linear(kernel, mapped_q, mapped_k, v, keep, before, CHUNK * CHUNK)
    return torch.autograd.grad(output, (q, k, v), grad.to(output.dtype), create_graph=True)
