"""RandomFeatures: an unbiased estimate of exp(q.k) from random projections w ~ N(0, I).

    positive        exp(w.y - |y|^2/2)                        each weight positive
    hyperbolic      the same for w and -w: half the draws     each weight positive, less variance
    trigonometric   cos(w.y) and sin(w.y), times exp(|y|^2/2) best near zero, can be negative

    Var[estimate] / exp(2x) = (exp(|q+k|^2) - 1) / r          positive
                              2 (cosh(|q+k|^2) - 1) / r       hyperbolic: r/2 pairs
                              2 (cosh(|q-k|^2) - 1) / r       trigonometric: r/2 pairs

Axes: n tokens, d width, r features; any axes may precede them.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import cosh, expm1, inf, log, sqrt
from operator import index
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subquad._torch_internals import exponential
from subquad.methods.alignment import alignment_suffix, as_vectors
from subquad.methods.checks import check_choice, check_whole
from subquad.methods.error_estimate import ErrorEstimate
from subquad.methods.memory_limit import check_memory
from subquad.methods.method import FeatureMethod, Traits, Vectors
from subquad.methods.tables import constant

Kind = Literal["positive", "hyperbolic", "trigonometric"]
KINDS: tuple[Kind, ...] = ("positive", "hyperbolic", "trigonometric")
CANDIDATE_COUNTS = [1 << power for power in range(4, 14)]


@dataclass(frozen=True)
class RandomFeatures(FeatureMethod):
    """An unbiased estimate of softmax attention's weights, from random projections drawn once from `seed`.

    The matrix follows from (seed, width, num_features); `redraw` returns the method with another one.

    Args:
        num_features: The number of features, even unless kind is "positive".
        kind: "positive", "hyperbolic" (less variance at the same number) or "trigonometric" (weights can be negative).
        orthogonal: Make the draws of each block of d orthogonal, with the lengths of independent ones.
        seed: Of the draw.
        key_shift: As for `Taylor`.
        balance: Positive factors of shape (width,) or (heads, width) that multiply all queries and divide all keys.
            Logits do not change; the variance depends on |q + k|, which does.
        matrix: (rows, width), a stored constant that replaces the draw.

    Example:
        >>> RandomFeatures(256).size(64), RandomFeatures(256).draw(64).shape
        (256, torch.Size([256, 64]))
    """

    name = "random"
    family: ClassVar[str] = "random"
    argument = "num_features"
    has_log_scale = True

    num_features: int = 256
    kind: Kind = "positive"
    orthogonal: bool = True
    seed: int = 0
    key_shift: Vectors | None = None
    balance: Vectors | None = None
    matrix: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_whole("num_features", self.num_features, 1)
        if self.kind != "positive" and self.num_features % 2:
            raise ValueError(
                f"num_features: {self.kind} features come in pairs; expected an even number, got {self.num_features}"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed: expected an integer, got {self.seed!r}")
        object.__setattr__(self, "key_shift", as_vectors("key_shift", self.key_shift))
        object.__setattr__(self, "balance", as_vectors("balance", self.balance, positive=True))

    @property
    def positive(self) -> bool:  # type: ignore[override]
        return self.kind != "trigonometric"

    @property
    def label(self) -> str:
        return f"RandomFeatures({self.num_features}, {self.kind!r}){alignment_suffix(self)}"

    @property
    def native_map(self) -> str | None:
        return self.kind if self.kind != "trigonometric" else None

    @property
    def rows(self) -> int:
        """The number of projections: hyperbolic and trigonometric features make two of each."""
        return self.num_features if self.kind == "positive" else self.num_features // 2

    def size(self, width: int) -> int:
        return self.num_features

    def draw(self, width: int) -> Tensor:
        """Return the projections (rows, width), float64 on the CPU."""
        check_memory(self, width, width)
        return _draw(self.rows, width, self.orthogonal, self.seed, torch.float64, torch.device("cpu")).clone()

    def redraw(self, seed: int) -> "RandomFeatures":
        """Return the same method with other projections."""
        return replace(self, seed=seed, matrix=None)

    def table(self, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the projections (rows, width)."""
        if self.matrix is None:
            # The numbers of a method that is a local variable are symbols to torch.compile(dynamic=True).
            return _draw(index(self.rows), width, bool(self.orthogonal), index(self.seed), dtype, device)
        if self.matrix.shape != (self.rows, width):
            raise ValueError(f"matrix: expected shape {(self.rows, width)}, got {tuple(self.matrix.shape)}")
        return self.matrix.detach().to(device, dtype)

    def __call__(self, x: Tensor, *, is_query: bool = False) -> tuple[Tensor, Tensor]:
        """Map (..., n, d) to features (..., n, r) and their log-scales (..., n)."""
        return self.features(x, self.table(x.shape[-1], x.dtype, x.device))

    def features(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
        assert table is not None
        projected = x @ table.mT  # (..., n, rows)
        half_norm = x.square().sum(-1) / 2
        if self.kind == "trigonometric":
            return torch.cat([projected.cos(), projected.sin()], -1), half_norm - log(self.rows) / 2
        # The log-scale of a token is a constant to the derivative; the whole derivative flows through the features.
        if self.kind == "hyperbolic":
            projected = torch.cat([projected, -projected], -1)
        largest = projected.detach().amax(-1)
        features = exponential(projected - (largest + (half_norm - half_norm.detach()))[..., None])
        return features, largest - half_norm.detach() - log(self.num_features) / 2

    def traits(self, width: int) -> Traits:
        r = self.num_features
        half = r // 2 if self.kind == "trigonometric" else 0  # Cosine and sine both keep their argument.
        return Traits(
            r, self.rows * width, log_scales=1, making=2 * r + half, result=r, kept=r + half, gradient=2 * r + 2 * half
        )

    def error(
        self, low: float, high: float, spread: float | None = None, squared_norm: float | None = None
    ) -> ErrorEstimate:
        square = 2 * max(abs(low), abs(high)) if squared_norm is None else squared_norm
        return ErrorEstimate(sqrt(relative_variance(square, self.kind) / self.num_features), "prediction")

    @classmethod
    def candidates(cls, width: int) -> Iterable["RandomFeatures"]:
        return [cls(count, kind) for kind in ("positive", "hyperbolic") for count in CANDIDATE_COUNTS]


def relative_variance(squared_norm: float, kind: str) -> float:
    """Return r times the relative variance of an estimate of the weight by r independent features."""
    if not squared_norm >= 0:
        raise ValueError(f"squared_norm: expected a number >= 0, got {squared_norm!r}")
    if squared_norm > 700:
        return inf
    return expm1(squared_norm) if kind == "positive" else 2 * (cosh(squared_norm) - 1)


@constant
def _draw(rows: int, width: int, orthogonal: bool, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (rows, width). Drawn by Python's generator: torch's may not be called inside `torch.func.vmap`."""
    generator = random.Random(seed)

    def normal(count: int) -> Tensor:
        values = [generator.gauss(0.0, 1.0) for _ in range(count * width)]
        return torch.tensor(values, dtype=torch.float64).reshape(count, width)

    if not orthogonal or width == 0:
        return normal(rows).to(device, dtype)
    blocks = []
    for start in range(0, rows, width):
        basis, triangle = torch.linalg.qr(normal(width))
        # Householder's basis is uniform only after dividing by the signs of the triangle's diagonal.
        directions = (basis * triangle.diagonal().sign()).mT[: rows - start]
        blocks.append(directions * normal(len(directions)).norm(dim=-1, keepdim=True))
    return torch.cat(blocks).to(device, dtype)
