"""Every method from all pairs in float64, with a bound on the rounding error of a computation in another precision.

    out_i = sum_j w_ij v_j / N_i,    N_i = sum_j w_ij    over the pairs that are seen

A float computation of w_ij adds terms whose absolute values sum to a_ij, so that

    |error of out_i| <= c eps (sum_j a_ij |v_j| + |out_i| sum_j a_ij) / |N_i|

where an exponential counts its exponent as well: exp(x (1 + eps)) = exp(x) (1 + eps x). Weights are up to a positive
factor per row, which keeps exponentials in range.

Axes: b batch, h heads, n queries, m keys, d width, e value width, r projections.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad import BlockSparse, Exact, Linear, Multipole, RandomFeatures, Separable, Taylor, Window

LARGEST, SMALLEST = 1e30, 1e-30  # beyond these, float32 may overflow or underflow
FAINT_EXPONENT = -60.0
SMALLEST_SMOOTH = 1e-6  # Gradients of smaller sums are lost in rounding.


class Weights(NamedTuple):
    """Weights, the sums of their absolute terms, and the rows that float32 cannot hold."""

    w: Tensor  # (b, h, n, m)
    terms: Tensor  # (b, h, n, m)
    faint: Tensor  # (b, h, n)
    beside: Tensor | float = 0.0  # (b, h, n): weight without a key, as of a sink


class Golden(NamedTuple):
    """The result, how far another one may be from it per unit of rounding, and the rows that can be compared."""

    output: Tensor  # (b, h, n, e)
    slack: Tensor  # (b, h, n, e)
    firm: Tensor  # (b, h, n)
    condition: float  # the largest sum of absolute terms relative to the sum of weights
    smallest_sum: float  # of weights, at most 1: gradients have terms that are larger by its reciprocal
    is_smooth: bool  # every row can be differentiated: no sum of weights is so small that its square is 0


def golden(method: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Golden:
    """Return the output for finite q (b, h, n, d), k (b, h, m, d), v (b, h, m, e) in float64 and seen (b, h, n, m)."""
    found = weights(method, q, k, scale, seen)
    w, terms = (torch.where(seen, x, 0.0) for x in (found.w, found.terms))
    total = torch.ones_like(w[..., 0]) if w.shape[-1] else w.sum(-1)
    if not (isinstance(method, Separable) or method == Linear("identity")):
        total = w.sum(-1) + found.beside
    empty = (total == 0) | ~seen.any(-1)
    divisor = torch.where(empty, 1.0, total)[..., None]
    output = torch.where(empty[..., None], 0.0, w @ v / divisor)
    absolute = terms.sum(-1, keepdim=True)
    with torch.no_grad():
        slack = (terms @ v.abs() + output.abs() * absolute) / divisor.abs()
        tiny = (total.abs() < SMALLEST) & seen.any(-1)
        huge = found.faint | ~slack.isfinite().all(-1) if slack.shape[-1] else found.faint
        firm = ~(tiny | huge)
        condition = (absolute / divisor.abs())[firm].max().item() if bool(firm.any()) and w.numel() else 1.0
        sums = total.abs()[firm & ~empty]
        smallest_sum = min(1.0, sums.min().item()) if sums.numel() else 1.0
        is_smooth = bool((firm & (empty | (total.abs() > SMALLEST_SMOOTH))).all())
    return Golden(output, slack, firm, max(1.0, condition), smallest_sum, is_smooth)


def weights(method: Any, q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Weights:
    """Return the weights of all pairs; those that are not seen can be anything finite."""
    if getattr(method, "key_shift", None) is not None:
        k = k - torch.tensor(method.key_shift, dtype=k.dtype)
    if getattr(method, "balance", None) is not None:
        balance = torch.tensor(method.balance, dtype=k.dtype)
        q, k = q * balance, k / balance
    if getattr(method, "query_shift", None) is not None:
        return _tilted(method, q, k, scale, seen)
    if isinstance(method, Exact | Window | BlockSparse | Multipole):
        return _softmax(method, q, k, scale, seen)
    if isinstance(method, Taylor):
        return _series(method, q, k, scale)
    root = math.sqrt(scale)
    q, k = q * root, k * root
    if isinstance(method, RandomFeatures):
        return _random(method, q, k, seen)
    if isinstance(method, Separable):
        return _separable(q, k, seen)
    if isinstance(method, Linear):
        act = {"identity": lambda y: y, "elu": _elu, "relu": lambda y: y.clamp(0)}[method.activation]
        spread = 1 + q.abs().amax(-1)[..., None] + k.abs().amax(-1)[..., None, :] if q.shape[-1] else 1.0
        terms = act(q).abs() @ act(k).abs().mT * spread
        return Weights(act(q) @ act(k).mT, terms, _wild(q, k, 1))
    return _squares(q, k, seen)


def _tilted(method: Any, q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Weights:
    """Return the weights of centered queries, each times exp(scale b.k), the weight of its key."""
    shift = torch.tensor(method.query_shift, dtype=k.dtype)
    found = _series(method, q - shift, k, scale)
    tilt = (k @ shift * scale)[..., None, :].expand(seen.shape)
    factor = _exp(tilt - _highest(tilt, seen))
    spread = 1 + (k.abs() @ shift.abs() * abs(scale))[..., None, :]
    return found._replace(w=found.w * factor, terms=found.terms * factor * spread)


def _elu(y: Tensor) -> Tensor:
    return torch.where(y > 0, y + 1, y.clamp(max=0).exp())


def _wild(q: Tensor, k: Tensor, power: int) -> Tensor:
    """Return (b, h, n): rows whose features, or products of features, may exceed float32."""
    if not q.numel() or not k.numel():
        return torch.zeros(q.shape[:-1], dtype=torch.bool)
    of_q, of_k = (x.detach().abs().amax(-1).clamp(1.0) ** power for x in (q, k))
    return of_q * of_k.amax(-1, keepdim=True) > LARGEST


def _highest(exponents: Tensor, seen: Tensor) -> Tensor:
    """Return (b, h, n, 1): the largest exponent that a row sees, or 0."""
    if not exponents.shape[-1]:
        return torch.zeros_like(exponents.sum(-1, keepdim=True))
    highest = torch.where(seen, exponents, -torch.inf).detach().amax(-1, keepdim=True)
    return torch.where(highest.isinf(), 0.0, highest)


def _exp(exponents: Tensor) -> Tensor:
    return exponents.clamp(max=80.0).exp()  # Only pairs that are not seen are so large.


def _softmax(method: Any, q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Weights:
    x = q @ k.mT * scale
    spread = 1 + (q.abs() @ k.abs().mT * abs(scale))
    cap, sinks = getattr(method, "softcap", None), getattr(method, "sink_logits", None)
    x = x if cap is None else cap * (x / cap).tanh()
    highest = _highest(x, seen)
    if sinks is not None:
        sinks = sinks.to(x.dtype).expand(x.shape[1])[:, None, None]
        highest = torch.where(seen.any(-1, keepdim=True), torch.maximum(highest, sinks), sinks.expand_as(highest))
    w = _exp(x - highest)
    beside = 0.0 if sinks is None else (sinks - highest).exp()[..., 0]
    return Weights(w, w * spread, torch.zeros(x.shape[:-1], dtype=torch.bool), beside)


def _series(method: Taylor, q: Tensor, k: Tensor, scale: float) -> Weights:
    powers = range(1, method.degree + 1)
    if method.basis == "symmetric":
        x, y = q @ k.mT * scale, q.abs() @ k.abs().mT * abs(scale)
        w, terms = (1 + sum(z**p / math.factorial(p) for p in powers) for z in (x, y))
    else:
        w, terms = (
            1 + sum((a**p) @ (b**p).mT * s**p / math.factorial(p) for p in powers)
            for a, b, s in ((q, k, scale), (q.abs(), k.abs(), abs(scale)))
        )
    root = math.sqrt(abs(scale))
    shape = torch.zeros_like(q @ k.mT)
    return Weights(w + shape, terms + shape, _wild(q * root, k * root, method.degree))


def _random(method: RandomFeatures, q: Tensor, k: Tensor, seen: Tensor) -> Weights:
    scale = method.scale_at(q.shape[-1])
    projections = method.draw(q.shape[-1]) * math.sqrt(1 - 4 * scale)
    constants = projections.square().sum(-1) * scale / (1 - 4 * scale)  # (r,); the common factor cancels
    a, c = q @ projections.mT, k @ projections.mT  # (b, h, n, r), (b, h, m, r)
    norm_q, norm_k = (x.square().sum(-1) / 2 for x in (q, k))
    with torch.no_grad():
        reach_q, reach_k = ((x.abs() @ projections.abs().mT + constants.abs()).amax(-1) for x in (q, k))
        spread = 1 + (reach_q + norm_q)[..., None] + (reach_k + norm_k)[..., None, :]
    if method.kind == "trigonometric":
        highest = _highest(norm_k[..., None, :].expand(seen.shape), seen)
        size = _exp(norm_k[..., None, :] - highest)
        w = (a[..., :, None, :] - c[..., None, :, :]).cos().mean(-1) * size
        return Weights(w, size * spread, torch.zeros(w.shape[:-1], dtype=torch.bool))
    if method.kind == "hyperbolic":
        a, c, constants = torch.cat([a, -a], -1), torch.cat([c, -c], -1), torch.cat([constants, constants])
    a, c = a + constants, c + constants - norm_k[..., None]
    exponents = a[..., :, None, :] + c[..., None, :, :]  # (b, h, n, m, r)
    highest = _highest(exponents.detach().amax(-1), seen)
    w = _exp(exponents - highest[..., None]).sum(-1)
    return Weights(w, w.detach() * spread, _faint(a, c, highest, seen))


def _faint(a: Tensor, c: Tensor, highest: Tensor, seen: Tensor) -> Tensor:
    """Return (b, h, n): rows whose largest feature meets no large feature of a key, so that products underflow."""
    if not c.shape[-2]:
        return torch.zeros(a.shape[:-1], dtype=torch.bool)
    own, best = a.detach().amax(-1), c.detach().amax(-1)
    return highest[..., 0] - own - _highest(best[..., None, :].expand(seen.shape), seen)[..., 0] < FAINT_EXPONENT


def _separable(q: Tensor, k: Tensor, seen: Tensor) -> Weights:
    by_key = torch.where(seen[..., None], k[..., None, :, :], -torch.inf)  # (b, h, n, m, d)
    by_key = torch.where(seen.any(-1)[..., None, None], by_key, 0.0).softmax(-2)
    w = (q.softmax(-1)[..., :, None, :] * by_key).sum(-1)
    spread = 1 + q.abs().amax(-1)[..., None] + k.abs().amax(-1)[..., None, :]
    return Weights(w, w.detach() * spread, torch.zeros(w.shape[:-1], dtype=torch.bool))


def _squares(q: Tensor, k: Tensor, seen: Tensor) -> Weights:
    """The map `Squares` of tests/calls.py."""
    exponents = (k.sum(-1) / 4)[..., None, :].expand(seen.shape)
    w = (0.01 + q.square() @ k.square().mT) * _exp(exponents - _highest(exponents, seen))
    spread = 1 + k.abs().sum(-1)[..., None, :]
    return Weights(w, w.detach() * spread, _wild(q, k, 2))
