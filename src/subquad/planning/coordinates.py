"""Coordinates for a feature method from the moments of queries and keys, one set per key head.

    Taylor           b = mean q,    c = mean k: the series sees products of differences from the means
    RandomFeatures   p = (var k / var q)^(1/4),    c = mean k + p^2 mean q: the least mean of |p q + (k - c) / p|^2
                     (trigonometric features: c = mean k - p^2 mean q, because their variance depends on |q - k|)
                     A = the optimal scale for that mean

Keys count equally, or by the attention that they get, so that those that matter most are near their mean. With several
query heads per key head, the moments are those of all of them: one key weight exp(b.k) serves the whole group.

Axes: b batch and key heads, g query heads per key head, p rows, m keys, d width, h key heads.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad.methods import RandomFeatures
from subquad.methods.method import Vectors
from subquad.methods.random_features import optimal_scale
from subquad.planning.rows import Picked, exact_rows

MAX_BALANCE = 1e3  # where one side hardly varies
ROUNDING = 1e-12  # Variances below this share of the mean square are rounding errors.
DIGITS = 6  # of the numbers in a method, which survive float32
NEUTRAL = {"key_shift": 0.0, "query_shift": 0.0, "balance": 1.0}
Coordinates = dict[str, Tensor]  # (h, d) each, by the name of the method's field


@dataclass(frozen=True)
class Moments:
    """Means and variances of queries and keys, (h, d) each, float64 on the CPU, and the factor of the logits."""

    query: Tensor
    query_variance: Tensor
    key: Tensor
    key_variance: Tensor
    scale: float

    @classmethod
    def of(cls, call: Call, rows: Tensor) -> "Moments":
        """Return the moments of the queries at these places and of the visible keys."""
        k, keep = call.layout.fold_key(call.key), call.keep()
        shown = torch.ones_like(k[..., :1]) if keep is None else keep[..., None]
        return cls(*_of_queries(call, rows), *_moments(call, _powers(k, shown).sum(1)), call.logit_scale)

    @classmethod
    def by_attention(cls, call: Call, rows: Tensor) -> "Moments":
        """Return moments in which a key counts by the attention that it gets from the queries at these places."""
        k = call.layout.fold_key(call.key)
        powers = call._replace(value=call.layout.unfold(_powers(k, torch.ones_like(k[..., :1]))))
        seen = exact_rows(powers, picked_at(call, rows)) * row_weights(call, rows)[..., None]
        return cls(*_of_queries(call, rows), *_moments(call, seen.sum((1, 2))), call.logit_scale)

    def balance(self) -> Tensor:
        """Return (h, d): the factors of queries that make both sides vary equally."""
        return (self.key_variance / self.query_variance).pow(0.25).clamp(1 / MAX_BALANCE, MAX_BALANCE)

    def squared_norm(self, balance: Tensor) -> Tensor:
        """Return (h,): the mean of |p q + (k - c) / p|^2, scaled, for the best c and independent queries and keys."""
        return abs(self.scale) * (self.query_variance * balance**2 + self.key_variance / balance**2).sum(-1)


def _of_queries(call: Call, rows: Tensor) -> tuple[Tensor, Tensor]:
    q = call.layout.fold_query(call.query)[:, :, rows]
    return _moments(call, _powers(q, row_weights(call, rows)[..., None]).sum((1, 2)))


def _powers(x: Tensor, shown: Tensor) -> Tensor:
    """Return vectors (..., d), their squares and a 1 as (..., 2 d + 1), float64; 0 for those that are not shown."""
    x = torch.cat([x.double(), x.double().square(), torch.ones_like(x[..., :1], dtype=torch.float64)], -1)
    return torch.where(shown > 0, x, 0.0)


def _moments(call: Call, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances, (h, d) each, from sums (b, 2 d + 1) of vectors, their squares and their number."""
    sums = sums.unflatten(0, by_head(call)).sum((0, 2)).cpu()
    mean, square = (sums[:, :-1] / sums[:, -1:].clamp(min=1)).chunk(2, -1)
    return mean, torch.maximum(square - mean.square(), ROUNDING * square + torch.finfo(torch.float32).tiny)


def row_weights(call: Call, rows: Tensor) -> Tensor:
    """Return (b, 1, p), float64: 0 for queries that are padding, which are those of hidden keys in self-attention."""
    keep = call.keep()
    if keep is None or call.layout.queries != call.layout.keys:
        return torch.ones(call.layout.rows, 1, len(rows), dtype=torch.float64, device=rows.device)
    return keep[:, None, rows].double()


def by_head(call: Call) -> tuple[int, int, int]:
    """Return how b consists of batches, key heads h, and copies of each of them."""
    return -1, call.layout.own_key_heads, call.layout.copies


def picked_at(call: Call, rows: Tensor) -> Picked:
    """Return the rows at these places, of every head."""
    places = rows.expand(call.layout.rows, call.layout.group, -1)
    return Picked(places, torch.ones(len(rows), dtype=torch.float64, device=rows.device), len(rows))


def centered(method: Any, moments: Moments) -> Any:
    """Return the method in the coordinates for these moments, without a search: Taylor centered, features balanced."""
    if "query_shift" in method.coordinates:
        return replace(method, key_shift=as_tuples(moments.key), query_shift=as_tuples(moments.query))
    balance = moments.balance()
    scale = optimal_scale(moments.key.shape[-1], float(moments.squared_norm(balance).mean()))
    shift = as_tuples(_shift(method, moments, balance))
    return replace(method, key_shift=shift, balance=as_tuples(balance), scale=scale)


def variants(method: Any, moments: list[Moments]) -> list[Coordinates]:
    """Return the coordinates that a head may have: those of the method itself, then others, the simplest first.

    Args:
        method: The method.
        moments: The last are those in which a key counts by its attention.
    """
    shape = moments[0].key.shape
    found = [{name: _own(method, name, shape) for name in method.coordinates}]
    if "query_shift" in method.coordinates:
        for own in moments:
            found += [dict(key_shift=own.key), dict(key_shift=own.key, query_shift=own.query)]
    else:  # Keys that count equally gain nothing here; see docs/log.md.
        own = moments[-1]
        balance = own.balance()
        found.append(dict(key_shift=own.key))
        found.append(dict(key_shift=_shift(method, own, torch.ones_like(balance))))
        found.append(dict(key_shift=_shift(method, own, balance), balance=balance))
    neutral = {name: torch.full(shape, NEUTRAL[name], dtype=torch.float64) for name in method.coordinates}
    return [neutral | each for each in found]


def combined(method: Any, options: list[Coordinates], choice: list[int]) -> Any:
    """Return the method in the coordinates that were chosen for each head, by their place among the options."""
    vectors: dict[str, Vectors | None] = {}
    for name in method.coordinates:
        rows = torch.stack([options[place][name][head] for head, place in enumerate(choice)])
        vectors[name] = None if bool((rows == NEUTRAL[name]).all()) else as_tuples(rows)
    return replace(method, **vectors)


def _own(method: Any, name: str, shape: torch.Size) -> Tensor:
    vectors = getattr(method, name)
    own = torch.tensor(NEUTRAL[name] if vectors is None else vectors, dtype=torch.float64)
    if own.dim() and own.shape not in (shape, shape[1:]):
        raise ValueError(f"{name}: expected shape {tuple(shape[1:])} or {tuple(shape)}, got {tuple(own.shape)}")
    return own.expand(shape)


def scales(method: Any, moments: list[Moments]) -> list[float]:
    """Return the best scales of typical heads and of the hardest one; an empty list for methods without a scale."""
    if getattr(method, "kind", "trigonometric") == "trigonometric":
        return []
    norms = moments[-1].squared_norm(moments[-1].balance())
    typical = (float(norm) for norm in (norms.median() / 2, norms.median(), norms.max()))
    return list(dict.fromkeys(float(f"{optimal_scale(moments[0].key.shape[-1], norm):.3g}") for norm in typical))


def _shift(method: RandomFeatures, moments: Moments, balance: Tensor) -> Tensor:
    sign = -1.0 if (method.kind == "trigonometric") != (moments.scale < 0) else 1.0
    return moments.key + sign * balance**2 * moments.query


def as_tuples(vectors: Tensor) -> Vectors:
    """Return vectors (h, d) as a method holds them, with as many digits as survive float32."""
    return tuple(tuple(float(f"{x:.{DIGITS}g}") for x in row) for row in vectors.tolist())
