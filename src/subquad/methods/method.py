"""The interface of methods, used by engines, cost, planner and lab.

A method is a frozen value that a user can name. It defines which engine computes it; a `FeatureMethod` also defines how
its features are computed, what they cost and how large its error is. A user-defined object needs only the three members
of `FeatureMap`; `UserMap` supplies the rest.

Axes: n tokens, d width, r features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from subquad.methods.error_estimate import UNKNOWN_ERROR, ErrorEstimate
from subquad.methods.feature_map import FeatureMap

Engine = Literal["exact", "features", "hybrid", "multipole", "sparse"]
Vectors = tuple[float, ...] | tuple[tuple[float, ...], ...]  # one, or one for each key head


class Traits(NamedTuple):
    """What a feature method costs per token, for the formulas in `planning`.

    The last five count numbers held in memory: per token while its features are made, for its features, kept for the
    backward pass and for gradients; and tensors of the size of the weight matrix while it is made, kept, and
    for gradients.
    """

    size: int  # features r
    project: int = 0  # multiplications of the map itself
    constant: bool = False  # features do not depend on the input
    log_scales: int = 0  # log-scales of the sums of one head
    making: int = 0
    result: int = 0
    kept: int = 0
    gradient: int = 0
    pairs: tuple[int, int, int] = (1, 1, 1)


class Method(ABC):
    """A way to compute attention, as a value.

    Attributes:
        name: What a user may write instead of the value, as in `method="taylor"`.
        argument: The field that follows the colon, as the degree in "taylor:2"; None if there is none.
        engine: Which engine computes it.
        family: Methods whose calls do the same kind of work, and so share the coefficients of a calibration.
        positive: Whether its weights are never negative, so that a sample of rows tells about the others.
        coordinates: The fields that `fit` can set, whose vectors change neither logits nor softmax; see `alignment.py`.
    """

    name: ClassVar[str]
    argument: ClassVar[str | None] = None
    engine: ClassVar[Engine]
    family: ClassVar[str]
    positive: bool | property = True
    coordinates: ClassVar[tuple[str, ...]] = ()

    @property
    def label(self) -> str:
        """A short name for tables, without the numbers of a key shift."""
        return str(self)

    @property
    def warning(self) -> str | None:
        """What a user should know before the method computes anything."""
        return None

    def error(
        self, low: float, high: float, spread: float | None = None, squared_norm: float | None = None,
        width: int | None = None,
    ) -> ErrorEstimate:  # fmt: skip
        """Return the relative error on logits in [low, high]; arguments as for `subquad.error`."""
        return UNKNOWN_ERROR

    @classmethod
    def candidates(cls, width: int) -> "Iterable[Method]":
        """Return the values of this class that the planner should consider."""
        return ()


class FeatureMethod(Method):
    """A method whose weights are phi(q).phi(k), with features from this class.

    Attributes:
        native_map: The kernels' name of the map, or None if they do not know it.
        degree: The degree of the kernels' map, where it has one.
        normalizer: Each row is divided by its weights' sum ("row"), each feature by its own ("feature"), or not at all.
        has_log_scale: Whether features come with a log-scale per token.
        key_shift, query_shift, balance: Fitted coordinates; see `alignment.py`.
        is_learned: Whether the map may hold parameters.
    """

    engine: ClassVar[Engine] = "features"
    family: ClassVar[str] = "linear"
    degree: int = 1
    normalizer: Literal["row", "feature", "none"] = "row"
    has_log_scale: bool | property = False
    is_learned: ClassVar[bool] = False
    key_shift: Vectors | None = None
    query_shift: Vectors | None = None
    balance: Vectors | None = None

    @property
    def native_map(self) -> str | None:
        return None

    @property
    def is_aligned(self) -> bool:
        """Whether queries or keys are brought to fitted coordinates first."""
        return any(vectors is not None for vectors in (self.key_shift, self.query_shift, self.balance))

    @property
    def of_logits(self) -> Callable[[Tensor], Tensor] | None:
        """The weights from the logits q.k, where that is cheaper than by features; else None."""
        return None

    def draws(self, count: int) -> "list[Any]":
        """Return the method as often as it differs by chance: once, unless it is random."""
        return [self]

    @abstractmethod
    def size(self, width: int) -> int:
        """Return the number of features r."""

    @abstractmethod
    def features(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map (..., n, d) to features (..., n, r), and a log-scale (..., n) if there is one."""

    def table(self, width: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the map's constant tensor for inputs of this kind, or None."""
        return None

    @property
    def is_weighted(self) -> bool:
        """Whether the table (r,) holds a weight for the product of each feature."""
        return False

    def scale_at(self, width: int) -> float:
        """Return the scale of random features at this width."""
        return 0.0

    def exponents(self, table: Tensor) -> tuple[float, Tensor | None]:
        """Return a factor s and constants c (rows,), None if all are 0, of features exp(s w.y + c)."""
        return 1.0, None

    @abstractmethod
    def traits(self, width: int) -> Traits:
        """Return what the method costs per token."""


class UserMap(FeatureMethod):
    """A user's `FeatureMap`, with the answers of a `FeatureMethod`.

    Its features are made once, before the engine's forms: the map may hold parameters, which only plain differentiation
    finds, and for each head its own. The forms then compute with `Given` features.
    """

    is_learned = True

    def __init__(self, feature_map: FeatureMap) -> None:
        self.map = feature_map

    @property
    def positive(self) -> bool:  # type: ignore[override]
        return self.map.positive

    @property
    def native_map(self) -> str | None:
        return "identity"

    def size(self, width: int) -> int:
        return self.map.size(width)

    def features(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Evaluate the map in the dtype of its parameters, if it has any, and check the shapes of the result."""
        return self.mapped(x, is_query=False)

    def mapped(self, x: Tensor, is_query: bool) -> tuple[Tensor, Tensor | None]:
        weight = next(self.map.parameters(), None) if isinstance(self.map, nn.Module) else None
        result = self.map(x if weight is None else x.to(weight.dtype), is_query=is_query)
        features, log_scale = result if isinstance(result, tuple) else (result, None)
        expected = (*x.shape[:-1], self.size(x.shape[-1]))
        if features.shape != expected:
            raise ValueError(f"method: its size() promises features of shape {expected}, got {tuple(features.shape)}")
        if log_scale is not None and log_scale.shape != x.shape[:-1]:
            raise ValueError(
                f"method: expected a log-scale of shape {tuple(x.shape[:-1])}, got {tuple(log_scale.shape)}"
            )
        return features.to(x.dtype), None if log_scale is None else log_scale.to(x.dtype)

    def traits(self, width: int) -> Traits:
        """Count the layers of the map by running it on one token of each key head."""
        from torch.utils.flop_counter import FlopCounterMode  # here: it imports much that nothing else needs

        weight = next(self.map.parameters(), None) if isinstance(self.map, nn.Module) else None
        heads: int = getattr(self.map, "key_heads", 1)
        x = torch.zeros(heads, 1, width) if weight is None else weight.new_zeros(heads, 1, width)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            result = self.map(x, is_query=False)
        products = counter.get_total_flops() // (2 * heads)
        return Traits(self.size(width), products, log_scales=int(isinstance(result, tuple)))


@dataclass(frozen=True)
class Given(FeatureMethod):
    """Features that were made before the call, and take the place of its queries and keys.

    With a log-scale, both have one more column, which holds that of the keys.
    """

    count: int
    has_log_scale: bool = False

    @property
    def native_map(self) -> str | None:
        return "logged" if self.has_log_scale else "identity"

    def size(self, width: int) -> int:
        return self.count

    def features(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return x[..., : self.count], x[..., self.count] if x.shape[-1] > self.count else None

    def traits(self, width: int) -> Traits:
        return Traits(self.count, log_scales=int(self.has_log_scale))


def feature_method(method: Any) -> FeatureMethod:
    """Return a built-in feature method itself, or a user's map with the same answers."""
    return method if isinstance(method, FeatureMethod) else UserMap(cast(FeatureMap, method))


def for_layer(method: Any, head_dim: int, heads: int, key_heads: int | None = None) -> Any:
    """Return the method of one layer: a map that is learned layer by layer makes its parameters, others stay.

    Args:
        method: A method, or a feature map; one with a member `for_layer(head_dim, heads, key_heads)` is asked.
        head_dim: Width of queries and keys.
        heads: Query heads.
        key_heads: Key heads, `heads` by default.

    Example:
        >>> from subquad import Hedgehog, Taylor
        >>> for_layer(Taylor(2), 16, 4) == Taylor(2), for_layer(Hedgehog(), 16, 4)
        (True, Hedgehog(head_dim=16, heads=4))
    """
    make = getattr(method, "for_layer", None)
    return method if make is None else make(head_dim, heads, heads if key_heads is None else key_heads)
