"""Taylor: the exponential's Maclaurin polynomial of the logit, as a feature map.

    phi(q).phi(k) = 1 + x + x^2/2! + ... + x^p/p!,    x = q.k,    with r = C(d+p, p) features

The features are all monomials of degree up to p, each with the root of its multinomial weight. Queries and keys arrive
scaled: each has been multiplied by the square root of the attention's scale, so that q.k is the scaled logit.

Axes: n tokens, d width, r features; any axes may precede them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import comb
from operator import index
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subquad._torch_internals import has_open_size
from subquad.methods.alignment import alignment_suffix, as_vectors
from subquad.methods.checks import check_choice, check_whole
from subquad.methods.error_estimate import UNKNOWN_ERROR, ErrorEstimate
from subquad.methods.method import FeatureMethod, Traits, Vectors
from subquad.methods.series_error import series_error
from subquad.methods.tables import constant

FEW_TOKENS = 2  # up to this many, the number of operations costs more than the arithmetic
NATIVE_DEGREES = range(1, 5)
MAX_CANDIDATE_FEATURES = 1 << 14


@dataclass(frozen=True)
class Taylor(FeatureMethod):
    """The exponential's Maclaurin series up to x^degree, with C(d+degree, degree) features.

    Even degrees have positive weights only. With an odd degree weights can be negative and their sum can vanish;
    `attention` then warns.

    Args:
        degree: The highest power.
        basis: "symmetric" is the series itself. "diagonal" drops the cross terms of every power (degree*d + 1
            features): a known shortcut that no longer equals the series, kept to show what it costs.
        key_shift: A vector of shape (width,) or (heads, width) to subtract from all keys. Softmax does not change, but
            logits come closer to zero.
        query_shift: The same for all queries, one vector for each key head. The series then replaces
            exp((q - b).(k - c)) alone; the rest, exp(b.k), is an exact weight of each key.

    Example:
        >>> Taylor(2).size(64)
        2145
        >>> q, k = torch.randn(2, 1, 3, dtype=torch.float64)
        >>> x = q @ k.mT
        >>> torch.allclose(Taylor(2)(q, is_query=True) @ Taylor(2)(k, is_query=False).mT, 1 + x + x**2 / 2)
        True
    """

    name = "taylor"
    family: ClassVar[str] = "taylor"
    argument = "degree"
    coordinates = ("key_shift", "query_shift")

    degree: int = 2
    basis: Literal["symmetric", "diagonal"] = "symmetric"
    key_shift: Vectors | None = None
    query_shift: Vectors | None = None

    def __post_init__(self) -> None:
        check_whole("degree", self.degree, 0, meaning=", the highest power")
        check_choice("basis", self.basis, ("symmetric", "diagonal"))
        for name in ("key_shift", "query_shift"):
            object.__setattr__(self, name, as_vectors(name, getattr(self, name)))

    @property
    def positive(self) -> bool:  # type: ignore[override]
        return self.degree == 0 or (self.basis == "symmetric" and self.degree % 2 == 0)

    @property
    def warning(self) -> str | None:
        if self.positive:
            return None
        return (
            f"{self.label}: weights can be negative and their sum can vanish, so outputs can lie far outside the range "
            "of the values; an even degree of the symmetric basis avoids this. subquad.normalizer shows such rows."
        )

    @property
    def label(self) -> str:
        basis = "" if self.basis == "symmetric" else f", basis={self.basis!r}"
        return f"Taylor({self.degree}{basis}){alignment_suffix(self)}"

    @property
    def native_map(self) -> str | None:
        return "taylor" if self.basis == "symmetric" and index(self.degree) in NATIVE_DEGREES else None

    @property
    def has_log_scale(self) -> bool:  # type: ignore[override]
        return self.query_shift is not None

    @property
    def of_logits(self) -> Callable[[Tensor], Tensor] | None:
        return self.series if self.basis == "symmetric" else None

    @property
    def is_weighted(self) -> bool:
        return True

    def size(self, width: int) -> int:
        degree = index(self.degree)  # torch.compile(dynamic=True) would take it for a symbol.
        return comb(width + degree, degree) if self.basis == "symmetric" else degree * width + 1

    def series(self, x: Tensor) -> Tensor:
        """Return the polynomial of the logits x, by Horner's rule."""
        if self.degree == 0:
            return torch.ones_like(x)
        one = x.new_ones(())
        result = torch.add(one, x, alpha=1 / self.degree)
        for power in range(self.degree - 1, 0, -1):
            result = torch.addcmul(one, x, result, value=1 / power)
        return result

    def monomials(self, x: Tensor) -> Tensor:
        """Map (..., n, d) to the basis (..., n, r) without its weights."""
        is_short = not has_open_size(x.shape[-2]) and x.shape[-2] <= FEW_TOKENS
        if is_short and self.basis == "symmetric" and self.degree > 0 < x.shape[-1]:
            return _symmetric_monomials_of_few(x, self.degree)
        rows = x.mT  # Feature-major, so that each block below is one long product over contiguous memory.
        one = torch.ones_like(rows[..., :1, :])
        if self.basis == "diagonal":
            return torch.cat([one, *(rows**power for power in range(1, self.degree + 1))], -2).mT
        return _symmetric_monomials(rows, one, self.degree).mT

    def table(self, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return (r,): the weight of the product of two monomials, 1 / the factorials of its exponents."""
        if self.basis == "diagonal":
            powers = torch.arange(self.degree + 1, dtype=torch.float64)
            factorials = torch.lgamma(powers + 1).exp().round()
            return torch.cat([factorials[:1], factorials[1:].repeat_interleave(width)]).reciprocal().to(device, dtype)
        return _symmetric_weights(width, index(self.degree), dtype, device)

    def features(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, None]:
        return self.monomials(x), None

    def __call__(self, x: Tensor, *, is_query: bool = False) -> Tensor:
        """Map (..., n, d) to features (..., n, r) with phi(q).phi(k) the series."""
        return self.monomials(x) * self.table(x.shape[-1], x.dtype, x.device).sqrt()

    def traits(self, width: int) -> Traits:
        r, p, constant, scales = self.size(width), self.degree, self.degree == 0, int(self.has_log_scale)
        if self.basis == "diagonal":  # The weights of features make another copy, and so do derivatives of powers.
            return Traits(r, constant=constant, log_scales=scales, making=2 * r, result=r, kept=r, gradient=3 * r)
        # Products of each degree, then all of them side by side; those of degree p - 1 once more, from p = 3 on.
        before = comb(width + p - 2, p - 1) if p > 2 else 0
        # Horner's rule has the logits, the last result and the next one.
        pairs = (3, p + 1, 4) if p > 1 else (2, 1, 1)
        return Traits(
            r, constant=constant, log_scales=scales, making=(2 if p > 1 else 1) * r + before, result=r,
            kept=r + before, gradient=r, pairs=pairs,
        )  # fmt: skip

    def error(
        self, low: float, high: float, spread: float | None = None, squared_norm: float | None = None,
        width: int | None = None,
    ) -> ErrorEstimate:  # fmt: skip
        if self.basis == "diagonal":
            return UNKNOWN_ERROR
        if spread is not None and (not isinstance(spread, int | float) or not spread >= 0):
            raise ValueError(f"spread: expected a number >= 0, got {spread!r}")
        return ErrorEstimate(series_error(self.degree, low, high, spread), "prediction" if spread is None else "bound")

    @classmethod
    def candidates(cls, width: int) -> Iterable["Taylor"]:
        """Return every degree whose number of features is affordable."""
        return [cls(p) for p in range(9) if comb(width + p, p) <= MAX_CANDIDATE_FEATURES]


def _symmetric_monomials(rows: Tensor, one: Tensor, degree: int) -> Tensor:
    """Map (..., d, n) to (..., C(d+degree, degree), n), ordered by degree, then by the largest variable.

    A monomial of degree p whose largest variable is i is x_i times one of degree p-1 in the variables 0..i, and in this
    order those are the first C(i+p-1, p-1) of degree p-1: a slice, where a gather would cost far more than the product.
    """
    blocks, previous = [one], one
    variables = rows.split(1, -2)
    for power in range(1, degree + 1):
        prefixes = (previous[..., : comb(i + power - 1, power - 1), :] for i in range(len(variables)))
        products = [rows] if power == 1 else [x * prefix for x, prefix in zip(variables, prefixes, strict=True)]
        blocks += products
        if power < degree:
            previous = rows if power == 1 else torch.cat(products, -2)
    return torch.cat(blocks, -2)


def _symmetric_monomials_of_few(x: Tensor, degree: int) -> Tensor:
    """Map (..., n, d) to (..., n, C(d+degree, degree)) in fewer operations, which make more products than needed."""
    blocks, previous = [torch.ones_like(x[..., :1]), x], x
    for power in range(2, degree + 1):
        products = (previous.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
        previous = products[..., _symmetric_places(x.shape[-1], power, x.device)]
        blocks.append(previous)
    return torch.cat(blocks, -1)


@constant
def _symmetric_places(width: int, power: int, device: torch.device) -> Tensor:
    """Return the places of this degree's monomials among all products of a prefix of degree power-1 and a variable."""
    places = [prefix * width + i for i in range(width) for prefix in range(comb(i + power - 1, power - 1))]
    return torch.tensor(places, device=device)


@constant
def _symmetric_weights(width: int, degree: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (r,): 1 / the product of the exponents' factorials, in the order of the monomials."""
    factorial = torch.ones(1, dtype=torch.float64)
    largest = torch.full((1,), -1)  # The monomial 1 has no variable.
    count = torch.zeros(1, dtype=torch.float64)  # The exponent of the largest variable.
    factorials = [factorial]
    for power in range(1, degree + 1):
        blocks = []
        for i in range(width):
            prefix = comb(i + power - 1, power - 1)
            times = torch.where(largest[:prefix] == i, count[:prefix] + 1, 1.0)
            blocks.append((factorial[:prefix] * times, torch.full((prefix,), i), times))
        if not blocks:
            break
        factorial, largest, count = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        factorials.append(factorial)
    return torch.cat(factorials).reciprocal().to(device, dtype)
