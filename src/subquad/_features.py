"""Feature maps: phi with phi(q).phi(k) equal to a kernel of the logit x = q.k, or an estimate of one.

    Taylor(p)           1 + x + x^2/2! + ... + x^p/p!     exactly, with C(d+p, p) features
    RandomFeatures(r)   exp(x)                            on average, with r features
    Linear()            x; or (elu(q)+1).(elu(k)+1); or relu(q).relu(k)         with d features

Axes: n tokens, d width, r features; any axes may stand before them. Queries and keys arrive scaled: each has been
multiplied by the square root of the attention's scale, so that q.k here is the scaled logit.
"""

import random
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from math import comb, isfinite, log
from typing import Literal, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

Table = TypeVar("Table", bound=Callable[..., Tensor])


def constant(make: Table) -> Table:
    """Make a table once for each set of arguments.

    In a thread of its own, because a tensor that is made inside torch.func or torch.compile belongs to that call, and
    must not be kept for others.
    """

    @lru_cache(maxsize=64)
    def once(*arguments: object) -> Tensor:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make, *arguments).result()

    @wraps(make)
    def made(*arguments: object) -> Tensor:
        return once(*arguments)

    # The compiler knows constants by the name in their code, and stumbles over two of the same.
    made.__code__ = made.__code__.replace(co_name=make.__name__)  # type: ignore[attr-defined]
    # What torch.compiler.assume_constant_result does, which would import the whole compiler for it.
    made._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cast(Table, made)


FEW = 2  # tokens

Shift = tuple[float, ...] | tuple[tuple[float, ...], ...]


@runtime_checkable
class FeatureMap(Protocol):
    """The three members by which any object, also a learned `nn.Module`, can be the `method` of an attention.

    positive: whether phi(q).phi(k) >= 0 always. Then every output lies within the range of the values that it sees.
    size(width): the number of features r for inputs of that width.
    __call__(x, is_query=...): (..., n, d) -> (..., n, r), or the pair of that with a log-scale (..., n) if the true
        features are `features * exp(log_scale)`. The log-scale of a query cancels in the normaliser and is not used.

    >>> class Squares:
    ...     positive = True
    ...     def size(self, width: int) -> int:
    ...         return width
    ...     def __call__(self, x: torch.Tensor, *, is_query: bool) -> torch.Tensor:
    ...         return x.square()
    >>> from subquad import attention
    >>> q = k = v = torch.ones(1, 2, 5, 4)
    >>> attention(q, k, v, method=Squares()).shape
    torch.Size([1, 2, 5, 4])
    """

    positive: bool

    def size(self, width: int) -> int: ...

    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor | tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Exact:
    """Softmax attention itself, by torch's `scaled_dot_product_attention`. Its state is the keys and values so far.

    >>> from subquad import attention
    >>> attention(*torch.ones(3, 1, 2, 5, 4), method=Exact()).shape
    torch.Size([1, 2, 5, 4])
    """


@dataclass(frozen=True)
class Taylor:
    """The exponential's Maclaurin series up to x^degree, with the C(d+degree, degree) features of the symmetric basis.

    Even degrees have positive weights only; odd ones warn. `basis="diagonal"` drops the cross terms of every power
    (degree*d + 1 features): a known shortcut that no longer equals the series, kept to show what it costs.
    `key_shift`, of shape (width,) or (heads, width), is subtracted from all keys: softmax does not change, but logits
    come closer to zero.

    >>> Taylor(2).size(64)
    2145
    >>> q, k = torch.randn(2, 1, 3, dtype=torch.float64)
    >>> x = q @ k.mT
    >>> torch.allclose(Taylor(2)(q, is_query=True) @ Taylor(2)(k, is_query=False).mT, 1 + x + x**2 / 2)
    True
    """

    degree: int = 2
    basis: Literal["symmetric", "diagonal"] = "symmetric"
    key_shift: Shift | None = None

    def __post_init__(self) -> None:
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 0:
            raise ValueError(f"degree: expected a whole number >= 0, the highest power, got {self.degree!r}")
        _check_choice("basis", self.basis, ("symmetric", "diagonal"))
        object.__setattr__(self, "key_shift", _as_shift(self.key_shift))
        if not self.positive:
            warnings.warn(
                f"{self}: weights can be negative and their sum can vanish, so outputs can be far outside the range of "
                "the values; an even degree cannot. subquad.normalizer() counts the rows concerned.",
                stacklevel=3,
            )

    @property
    def positive(self) -> bool:
        return self.degree == 0 or (self.basis == "symmetric" and self.degree % 2 == 0)

    def size(self, width: int) -> int:
        return comb(width + self.degree, self.degree) if self.basis == "symmetric" else self.degree * width + 1

    def series(self, x: Tensor) -> Tensor:
        """The kernel itself, from logits, by Horner's rule."""
        if self.degree == 0:
            return torch.ones_like(x)
        one = x.new_ones(())
        result = torch.add(one, x, alpha=1 / self.degree)
        for power in range(self.degree - 1, 0, -1):
            result = torch.addcmul(one, x, result, value=1 / power)
        return result

    def monomials(self, x: Tensor) -> Tensor:
        """(..., n, d) -> (..., n, r): the basis before its weights."""
        if x.shape[-2] <= FEW and self.basis == "symmetric" and self.degree > 0 < x.shape[-1]:
            return _symmetric_monomials_of_few(x, self.degree)
        rows = x.mT  # Feature-major, so that each block below is one long product over contiguous memory.
        one = torch.ones_like(rows[..., :1, :])
        if self.basis == "diagonal":
            return torch.cat([one, *(rows**power for power in range(1, self.degree + 1))], -2).mT
        return _symmetric_monomials(rows, one, self.degree).mT

    def weights(self, x: Tensor) -> Tensor:
        """(r,), for inputs like x: what the product of two monomials counts for, 1 / the exponents' factorials."""
        if self.basis == "diagonal":
            powers = torch.arange(self.degree + 1, dtype=torch.float64)
            factorials = torch.lgamma(powers + 1).exp().round()
            return torch.cat([factorials[:1], factorials[1:].repeat_interleave(x.shape[-1])]).reciprocal().to(x)
        return _symmetric_weights(x.shape[-1], self.degree, x.dtype, x.device)

    def __call__(self, x: Tensor, *, is_query: bool = False) -> Tensor:
        return self.monomials(x) * self.weights(x).sqrt()


def _symmetric_monomials(rows: Tensor, one: Tensor, degree: int) -> Tensor:
    """(..., d, n) -> (..., C(d+degree, degree), n), ordered by degree, then by the largest variable.

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
    """(..., n, d) -> (..., n, C(d+degree, degree)), the same in fewer operations, which make more products than needed:
    for a token or two, it is the number of operations that costs."""
    blocks, previous = [torch.ones_like(x[..., :1]), x], x
    for power in range(2, degree + 1):
        products = (previous.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
        previous = products[..., _symmetric_places(x.shape[-1], power, x.device)]
        blocks.append(previous)
    return torch.cat(blocks, -1)


@constant
def _symmetric_places(width: int, power: int, device: torch.device) -> Tensor:
    """Where the monomials of this degree stand among all products of a prefix of degree power-1 and a variable."""
    places = [prefix * width + i for i in range(width) for prefix in range(comb(i + power - 1, power - 1))]
    return torch.tensor(places, device=device)


@constant
def _symmetric_weights(width: int, degree: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(C(width+degree, degree),): 1 / prod of factorials of the exponents, in the order of the monomials."""
    factorial = torch.ones(1, dtype=torch.float64)
    largest = torch.full((1,), -1)  # The monomial 1 has no variable.
    count = torch.zeros(1, dtype=torch.float64)  # How often the largest variable stands in the monomial.
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


@dataclass(frozen=True)
class RandomFeatures:
    """An unbiased estimate of exp(x) from random projections w ~ N(0, I), drawn once from `seed`.

        positive        exp(w.y - |y|^2/2)                        each weight positive
        hyperbolic      the same for w and -w: half the draws     each weight positive, less variance
        trigonometric   cos(w.y) and sin(w.y), times exp(|y|^2/2) best near zero, can be negative

    `orthogonal` makes the draws of each block of d orthogonal, with the lengths of independent ones. The matrix follows
    from (seed, width, num_features); `redraw` returns another method. `matrix`, (rows, width), replaces the draw by a
    stored one, a constant. `key_shift` as for `Taylor`.

    >>> RandomFeatures(256).size(64), RandomFeatures(256).draw(64).shape
    (256, torch.Size([256, 64]))
    """

    num_features: int = 256
    kind: Literal["positive", "hyperbolic", "trigonometric"] = "positive"
    orthogonal: bool = True
    seed: int = 0
    key_shift: Shift | None = None
    matrix: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, ("positive", "hyperbolic", "trigonometric"))
        if isinstance(self.num_features, bool) or not isinstance(self.num_features, int) or self.num_features < 1:
            raise ValueError(f"num_features: expected a whole number >= 1, got {self.num_features!r}")
        if self.kind != "positive" and self.num_features % 2:
            raise ValueError(
                f"num_features: {self.kind} features come in pairs, an even number is expected; got {self.num_features}"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed: expected a whole number, got {self.seed!r}")
        object.__setattr__(self, "key_shift", _as_shift(self.key_shift))

    @property
    def positive(self) -> bool:
        return self.kind != "trigonometric"

    @property
    def rows(self) -> int:
        """How many projections there are: hyperbolic and trigonometric features make two of each."""
        return self.num_features if self.kind == "positive" else self.num_features // 2

    def size(self, width: int) -> int:
        return self.num_features

    def draw(self, width: int) -> Tensor:
        """(rows, width) float64 on the CPU: the projections, always the same for one (seed, width, num_features)."""
        return _draw(self.rows, width, self.orthogonal, self.seed, torch.float64, torch.device("cpu")).clone()

    def redraw(self, seed: int) -> "RandomFeatures":
        """The same method with other projections."""
        return replace(self, seed=seed, matrix=None)

    def projections(self, x: Tensor) -> Tensor:
        """(rows, width): the matrix for inputs like x."""
        width = x.shape[-1]
        if self.matrix is None:
            return _draw(self.rows, width, self.orthogonal, self.seed, x.dtype, x.device)
        if self.matrix.shape != (self.rows, width):
            raise ValueError(f"matrix: expected shape {(self.rows, width)}, got {tuple(self.matrix.shape)}")
        return self.matrix.detach().to(x)

    def __call__(self, x: Tensor, *, is_query: bool = False) -> tuple[Tensor, Tensor]:
        return self.project(x, self.projections(x))

    def project(self, x: Tensor, projections: Tensor) -> tuple[Tensor, Tensor]:
        """(..., n, d) -> (..., n, r), and the log-scale of each token (..., n)."""
        projected = x @ projections.mT  # (..., n, rows)
        half_norm = x.square().sum(-1) / 2
        if self.kind == "trigonometric":
            return torch.cat([projected.cos(), projected.sin()], -1), half_norm - log(self.rows) / 2
        # The log-scale of each token is a constant to the derivative; the whole derivative flows through the features.
        if self.kind == "hyperbolic":
            projected = torch.cat([projected, -projected], -1)
        largest = projected.detach().amax(-1)
        features = (projected - (largest + (half_norm - half_norm.detach()))[..., None]).exp_()
        return features, largest - half_norm.detach() - log(self.num_features) / 2


@constant
def _draw(rows: int, width: int, orthogonal: bool, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(rows, width). By Python's generator, because torch's may not be called inside `torch.func.vmap`."""
    generator = random.Random(seed)

    def normal(count: int) -> Tensor:
        values = [generator.gauss(0.0, 1.0) for _ in range(count * width)]
        return torch.tensor(values, dtype=torch.float64).reshape(count, width)

    if not orthogonal or width == 0:
        return normal(rows).to(device, dtype)
    blocks = []
    for start in range(0, rows, width):
        basis, triangle = torch.linalg.qr(normal(width))
        # Householder's basis is uniform only once the signs of the triangle's diagonal are taken out.
        directions = (basis * triangle.diagonal().sign()).mT[: rows - start]
        blocks.append(directions * normal(len(directions)).norm(dim=-1, keepdim=True))
    return torch.cat(blocks).to(device, dtype)


@dataclass(frozen=True)
class Linear:
    """The exponential dropped. `identity`: the plain sum of x_j v_j, which is not normalised, because its weights can
    be negative and their sum can vanish. `elu` (elu + 1) and `relu` are positive and normalised.

    >>> from subquad import attention
    >>> attention(*torch.ones(3, 1, 2, 5, 4), method=Linear("elu")).shape
    torch.Size([1, 2, 5, 4])
    """

    activation: Literal["identity", "elu", "relu"] = "identity"

    def __post_init__(self) -> None:
        _check_choice("activation", self.activation, ("identity", "elu", "relu"))

    @property
    def positive(self) -> bool:
        return self.activation != "identity"

    def size(self, width: int) -> int:
        return width

    def __call__(self, x: Tensor, *, is_query: bool = False) -> Tensor:
        if self.activation == "identity":
            return x
        if self.activation == "relu":
            return F.relu(x)
        return x.clamp(max=0).exp() + F.relu(x)  # elu(x) + 1, where small features would drown in the 1


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def _as_shift(shift: object) -> Shift | None:
    """A vector as a tuple of numbers, so that methods stay values: comparable, hashable, of no device."""
    if shift is None:
        return None
    rows = shift.tolist() if isinstance(shift, Tensor) else shift
    if isinstance(rows, list | tuple):
        nested = [row if isinstance(row, list | tuple) else [row] for row in rows]
        numbers = [number for row in nested for number in row]
        flat = all(not isinstance(row, list | tuple) for row in rows)
        alike = flat or len({len(row) for row in nested}) == 1
        if alike and all(isinstance(number, int | float) and isfinite(number) for number in numbers):
            return tuple(rows) if flat else cast(Shift, tuple(map(tuple, rows)))
    raise ValueError(f"key_shift: expected finite numbers of shape (width,) or (heads, width), got {shift!r}")
