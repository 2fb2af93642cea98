"""The meaning of every method, written once more, as plainly as can be: float64, all pairs, no blocks, no state.

Independent of the library's forms and masks; only random projections and a user's map are taken from it.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from subquad import Exact, Linear, RandomFeatures, Separable, Taylor


class Squares(torch.nn.Module):
    """A map of a user's own, with a parameter, and with a log-scale."""

    positive = True

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def size(self, width: int) -> int:
        return width + 1

    def forward(self, x: Tensor, *, is_query: bool) -> tuple[Tensor, Tensor]:
        features = torch.cat([(x * self.factor.to(x)).square(), torch.ones_like(x[..., :1])], -1)
        return features, x.sum(-1) / 2 if not is_query else torch.zeros_like(x[..., 0])


METHODS = {
    "taylor0": Taylor(0),
    "taylor1": Taylor(1),
    "taylor2": Taylor(2),
    "taylor3": Taylor(3),
    "shifted": Taylor(2, key_shift=torch.tensor([0.5, -0.25, 0.1, 0.3])),
    "both sides": Taylor(2, key_shift=[0.5, -0.25, 0.1, 0.3], query_shift=[0.2, 0.4, -0.3, 0.1]),
    "queries": Taylor(3, query_shift=[2.0, -1.4, 0.3, 0.1]),
    "diagonal": Taylor(2, basis="diagonal"),
    "diagonal queries": Taylor(2, basis="diagonal", query_shift=[0.2, 0.4, -0.3, 0.1]),
    "positive": RandomFeatures(7),
    "scaled": RandomFeatures(7, coupling="simplex", scale=-0.15),
    "hyperbolic": RandomFeatures(6, scale=-0.1, kind="hyperbolic", key_shift=torch.tensor([0.5, -0.25, 0.1, 0.3])),
    "balanced": RandomFeatures(7, key_shift=[0.5, -0.25, 0.1, 0.3], balance=[2.0, 0.5, 1.0, 1.5]),
    "trigonometric": RandomFeatures(6, kind="trigonometric", coupling="independent"),
    "identity": Linear("identity"),
    "elu": Linear("elu"),
    "relu": Linear("relu"),
    "separable": Separable(),
    "user": Squares(),
}


def visible(n: int, m: int, is_causal: bool, keep: Tensor | None, segments: Tensor | None, past: int = 0) -> Tensor:
    """(b, 1, n, m): which keys a query may see, by the definition. The first `past` keys come from a state."""
    b = 1 if keep is None and segments is None else len(keep if keep is not None else segments)
    seen = torch.ones(b, n, m, dtype=torch.bool)
    for i in range(n):
        for j in range(m):
            if is_causal:
                offset = (m - past) - n if past else 0
                seen[:, i, j] &= j < past or (j - past) <= i + offset
    if keep is not None:
        seen &= keep[:, None, :]
    if segments is not None:
        for row in range(b):
            for i in range(n):
                for j in range(m):
                    first, last = sorted((i, j))
                    seen[row, i, j] &= bool((segments[row, first : last + 1] == segments[row, i]).all())
    return seen[:, None]


def weights(method: object, q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Tensor:
    """(..., n, m) before the normalizer."""
    shift, query_shift, balance = (getattr(method, name, None) for name in ("key_shift", "query_shift", "balance"))
    if shift is not None:
        k = k - torch.tensor(shift, dtype=k.dtype)
    if query_shift is not None:
        b = torch.tensor(query_shift, dtype=q.dtype)
        return (
            weights(replace(method, key_shift=None, query_shift=None), q - b, k, scale, seen)
            * ((k @ b * scale).exp()[..., None, :])
        )
    if balance is not None:
        q, k = q * torch.tensor(balance, dtype=q.dtype), k / torch.tensor(balance, dtype=k.dtype)
    x = q @ k.mT * scale
    if isinstance(method, Exact):
        return x.exp()
    if isinstance(method, Taylor) and method.basis == "symmetric":
        return sum(x**p / math.factorial(p) for p in range(method.degree + 1))
    if isinstance(method, Taylor):
        powers = range(1, method.degree + 1)
        return 1 + sum(((q**p) @ (k**p).mT) * scale**p / math.factorial(p) for p in powers)
    root = math.sqrt(scale)
    if isinstance(method, Linear):
        act = {
            "identity": lambda y: y,
            "elu": lambda y: torch.where(y > 0, y + 1, y.exp()),
            "relu": lambda y: y.clamp(0),
        }
        return act[method.activation](q * root) @ act[method.activation](k * root).mT
    if isinstance(method, RandomFeatures):
        projections = method.draw(q.shape[-1])
        stretch = math.sqrt(1 - 4 * method.scale)
        a, c = q * root @ projections.mT * stretch, k * root @ projections.mT * stretch
        if method.kind == "trigonometric":
            phase = (a[..., :, None, :] - c[..., None, :, :]).cos().mean(-1)
            return phase * ((q.square().sum(-1)[..., None] + k.square().sum(-1)[..., None, :]) * scale / 2).exp()
        total = a[..., :, None, :] + c[..., None, :, :]
        weight = (2 * method.scale * projections.square().sum(-1)).exp() * stretch ** projections.shape[-1]
        mean = ((total.exp() if method.kind == "positive" else total.cosh()) * weight).mean(-1)
        return mean * (-(q.square().sum(-1)[..., None] + k.square().sum(-1)[..., None, :]) * scale / 2).exp()
    (a, _), (c, log_scale) = method(q * root, is_query=True), method(k * root, is_query=False)
    return a @ c.mT * log_scale.exp()[..., None, :]


def reference(
    method: object, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, keep: Tensor | None = None,
    segments: Tensor | None = None, scale: float | None = None, past: int = 0,
) -> Tensor:  # fmt: skip
    """(b, heads, n, e) for q (b, heads, n, d), k and v (b, heads, m, ·), keep and segments (b, m)."""
    q, k, v = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    seen = visible(q.shape[-2], k.shape[-2], is_causal, keep, segments, past)
    if isinstance(method, Separable):
        by_key = torch.where(seen[..., None], (k * math.sqrt(scale))[..., None, :, :], -math.inf).softmax(-2)
        w = ((q * math.sqrt(scale)).softmax(-1)[..., None, :] * by_key.nan_to_num()).sum(-1)
        return w @ v
    w = torch.where(seen, weights(method, q, k, scale, seen), 0.0)
    if method == Linear("identity"):
        return w @ v
    normalizer = w.sum(-1, keepdim=True)
    return torch.where(normalizer == 0, 0.0, w @ v / torch.where(normalizer == 0, 1.0, normalizer))
