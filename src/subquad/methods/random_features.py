"""RandomFeatures: an unbiased estimate of exp(q.k) from random projections w ~ N(0, I).

    positive        (1 - 4A)^(d/4) exp(A |w|^2 + sqrt(1 - 4A) w.y - |y|^2/2)    each weight positive
    hyperbolic      the same for w and -w: half the draws                      each weight positive, less variance
    trigonometric   cos(w.y) and sin(w.y), times exp(|y|^2/2)                  best near zero, can be negative

The scale A < 1/8 does not change the mean. A = 0 is FAVOR+ (Rethinking Attention with Performers, 2021); a negative A
bounds the features and reduces the variance (Chefs' Random Tables, 2022; FAVOR#, 2023). `feature_variance` has the
variances, `projections` the couplings of the draws.

Axes: n tokens, d width, r features; any axes may precede them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf, log, log1p, sqrt
from operator import index
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subquad._torch_internals import exponential
from subquad.methods.alignment import alignment_suffix, as_vectors
from subquad.methods.checks import check_choice, check_whole
from subquad.methods.error_estimate import ErrorEstimate
from subquad.methods.feature_variance import MAX_SCALE, optimal_scale, prior_scale, relative_variance
from subquad.methods.memory_limit import check_memory
from subquad.methods.method import FeatureMethod, Traits, Vectors
from subquad.methods.projections import COUPLINGS, Coupling, drawn

__all__ = ["CANDIDATE_COUNTS", "KINDS", "Kind", "RandomFeatures", "Scale", "optimal_scale"]

Kind = Literal["positive", "hyperbolic", "trigonometric"]
KINDS: tuple[Kind, ...] = ("positive", "hyperbolic", "trigonometric")
Scale = float | Literal["auto"]
CANDIDATE_COUNTS = [1 << power for power in range(4, 14)]


@dataclass(frozen=True)
class RandomFeatures(FeatureMethod):
    """An unbiased estimate of softmax attention's weights, from random projections drawn once from `seed`.

    The matrix follows from (seed, coupling, width, num_features); `redraw` returns the method with another one.

    Args:
        num_features: The number of features, even unless kind is "positive".
        kind: "positive", "hyperbolic" (less variance at the same number) or "trigonometric" (weights can be negative).
        coupling: How the directions of each block of d draws depend on each other: "orthogonal", "simplex" (less
            variance for positive features, more for the other kinds) or "independent". All are unbiased.
        seed: Of the draw.
        scale: The parameter A < 1/8 of positive and hyperbolic features. 0 gives FAVOR+. A negative scale has less
            variance if |q+k| is large: `optimal_scale` computes the best from the width and |q+k|^2. "auto" is that
            scale for entries of unit variance, |q+k|^2 = 2 sqrt(d): a constant, so it tells queries nothing about later
            keys. It is worse than 0 where |q+k|^2 is below about 0.6 to 0.8 sqrt(d).
        key_shift: As for `Taylor`.
        balance: Positive factors of shape (width,) or (heads, width) that multiply all queries and divide all keys.
            Logits do not change; the variance depends on |q + k|, which does.
        matrix: (rows, width), a stored constant that replaces the draw.

    Example:
        >>> RandomFeatures(256).size(64), RandomFeatures(256).draw(64).shape
        (256, torch.Size([256, 64]))
        >>> RandomFeatures(256, "hyperbolic", scale=optimal_scale(64, squared_norm=4.0)).label
        "RandomFeatures(256, 'hyperbolic', scale=-0.0284)"
    """

    name = "random"
    family: ClassVar[str] = "random"
    argument = "num_features"
    has_log_scale = True
    coordinates = ("key_shift", "balance")

    num_features: int = 256
    kind: Kind = "positive"
    coupling: Coupling = "orthogonal"
    seed: int = 0
    scale: Scale = 0.0
    key_shift: Vectors | None = None
    balance: Vectors | None = None
    matrix: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("coupling", self.coupling, COUPLINGS)
        check_whole("num_features", self.num_features, 1)
        if self.kind != "positive" and self.num_features % 2:
            raise ValueError(
                f"num_features: {self.kind} features come in pairs; expected an even number, got {self.num_features}"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed: expected an integer, got {self.seed!r}")
        self._check_scale()
        object.__setattr__(self, "key_shift", as_vectors("key_shift", self.key_shift))
        object.__setattr__(self, "balance", as_vectors("balance", self.balance, positive=True))

    def _check_scale(self) -> None:
        scale = self.scale
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if scale != "auto" and not (is_number and -inf < scale < MAX_SCALE):
            raise ValueError(f'scale: expected a number below {MAX_SCALE:g} or "auto", got {scale!r}')
        if self.kind == "trigonometric" and scale != 0:
            raise ValueError(f"scale: trigonometric features have none; expected 0, got {scale!r}")
        if scale != "auto":
            object.__setattr__(self, "scale", float(scale))

    @property
    def positive(self) -> bool:  # type: ignore[override]
        return self.kind != "trigonometric"

    @property
    def label(self) -> str:
        scale = repr(self.scale) if self.scale == "auto" else f"{self.scale:.3g}"
        suffix = f", scale={scale}" if self.scale else ""
        return f"RandomFeatures({self.num_features}, {self.kind!r}{suffix}){alignment_suffix(self)}"

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
        return drawn(self.rows, width, self.coupling, self.seed, torch.float64, torch.device("cpu")).clone()

    def redraw(self, seed: int) -> "RandomFeatures":
        """Return the same method with other projections."""
        return replace(self, seed=seed, matrix=None)

    def draws(self, count: int) -> "list[RandomFeatures]":
        """Return the method with the given number of different projections, its own first."""
        return [self, *(self.redraw(self.seed + place) for place in range(1, count))]

    def table(self, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the projections (rows, width), as drawn; `exponents` applies the scale to them."""
        if self.matrix is None:
            # The numbers of a method that is a local variable are symbols to torch.compile(dynamic=True).
            return drawn(index(self.rows), width, self.coupling, index(self.seed), dtype, device)
        if self.matrix.shape != (self.rows, width):
            raise ValueError(f"matrix: expected shape {(self.rows, width)}, got {tuple(self.matrix.shape)}")
        return self.matrix.detach().to(device, dtype)

    def scale_at(self, width: int) -> float:
        """Return the scale A at this width."""
        return prior_scale(index(width)) if self.scale == "auto" else self.scale

    def exponents(self, table: Tensor) -> tuple[float, Tensor | None]:
        """Return sqrt(1 - 4A), and A |w|^2 + d/4 ln(1 - 4A) (..., rows), None if A = 0."""
        scale = self.scale_at(table.shape[-1])
        if not scale:
            return 1.0, None
        return sqrt(1 - 4 * scale), scale * table.square().sum(-1) + table.shape[-1] / 4 * log1p(-4 * scale)

    def __call__(self, x: Tensor, *, is_query: bool = False) -> tuple[Tensor, Tensor]:
        """Map (..., n, d) to features (..., n, r) and their log-scales (..., n)."""
        return self.features(x, self.table(x.shape[-1], x.dtype, x.device))

    def features(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
        assert table is not None
        stretch, constants = self.exponents(table)
        projected = (x if constants is None else x * stretch) @ table.mT  # (..., n, rows)
        half_norm = x.square().sum(-1) / 2
        if self.kind == "trigonometric":
            return torch.cat([projected.cos(), projected.sin()], -1), half_norm - log(self.rows) / 2
        # The log-scale of a token is a constant to the derivative; the whole derivative flows through the features.
        if self.kind == "hyperbolic":
            projected = torch.cat([projected, -projected], -1)
            constants = None if constants is None else torch.cat([constants, constants], -1)
        if constants is not None:
            projected = projected + constants[..., None, :]
        largest = projected.detach().amax(-1)
        features = exponential(projected - (largest + (half_norm - half_norm.detach()))[..., None])
        return features, largest - half_norm.detach() - log(self.num_features) / 2

    def traits(self, width: int) -> Traits:
        r = self.num_features
        half = r // 2 if self.kind == "trigonometric" else 0  # Cosine and sine both keep their argument.
        return Traits(
            r, self.rows * width, log_scales=1, making=2 * r + half, result=r, kept=r + half, gradient=2 * r + 2 * half
        )

    def relative_variance(self, squared_norm: float, width: int | None = None) -> float:
        """Return `num_features` times the relative variance of the estimate for pairs of this norm.

        Exact for independent draws. Couplings reduce it where |q+k|^2 is well below the width; there it is an upper
        figure.
        """
        if width is None and self.matrix is not None:
            width = self.matrix.shape[-1]
        if width is None and self.scale:
            raise ValueError(f"head_dim: the error of {self.label} depends on the width; expected an integer, got None")
        width = 0 if width is None else width
        return relative_variance(squared_norm, self.kind, self.scale_at(width), width)

    def error(
        self, low: float, high: float, spread: float | None = None, squared_norm: float | None = None,
        width: int | None = None,
    ) -> ErrorEstimate:  # fmt: skip
        square = 2 * max(abs(low), abs(high)) if squared_norm is None else squared_norm
        return ErrorEstimate(sqrt(self.relative_variance(square, width) / self.num_features), "prediction")

    @classmethod
    def candidates(cls, width: int) -> Iterable["RandomFeatures"]:
        return [cls(count, kind) for kind in ("positive", "hyperbolic") for count in CANDIDATE_COUNTS]
