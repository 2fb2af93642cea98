"""Hybrid: exact attention to the nearest keys, features for all older ones, in one normalization.

    out_i = (sum_near exp(x_ij) v_j + g sum_far phi(q_i).phi(k_j) v_j) / (the same sums without v)

Near are the keys that `window` shows, far are all earlier ones. g is a factor for each query head, 1 unless it is
learned. "LoLCATs: On Low-Rank Linearizing of Large Language Models" (2024) converts trained models this way, with a
learned map: features of other maps than Taylor's or random ones are not on the scale of exp(x).

Time O(n (window + r) (d + e)), and a state of constant size.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from subquad.methods.checks import check_whole
from subquad.methods.feature_map import FeatureMap
from subquad.methods.method import Engine, FeatureMethod, Method, feature_method, for_layer
from subquad.methods.window import Window


class Hybrid(nn.Module, Method):
    """A sliding window of exact attention, and a feature method for all keys before it, in one normalization.

    Calls are causal. What is learned, the map and the factor, is part of a model whose layers have this method.

    Args:
        window: The nearest keys, `Window(size)`; its sinks are not far either.
        far: A feature method, or a feature map, for all earlier keys.
        heads: Query heads, if each has a learned factor for the weights of far keys; 1 at first. None for no factor.

    Attributes:
        log_factor: (heads,), the logarithm of the factor, or None.

    Example:
        >>> from subquad import Hedgehog, MultiheadAttention, Taylor, Window, attention
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8).unbind()
        >>> attention(q, k, v, is_causal=True, method=Hybrid(Window(16), Taylor(2))).shape
        torch.Size([1, 2, 100, 8])
        >>> layer = MultiheadAttention(8, 2, method=Hybrid(Window(16), Hedgehog()))  # or "window:16+hedgehog"
        >>> layer.method
        Hybrid(Window(16), Hedgehog(head_dim=4, heads=2))
    """

    engine: ClassVar[Engine] = "hybrid"
    family: ClassVar[str] = "hybrid"
    window: Window
    far: Any
    log_factor: nn.Parameter | None

    def __init__(self, window: Window, far: FeatureMethod | FeatureMap, *, heads: int | None = None) -> None:
        super().__init__()
        if not isinstance(window, Window) or window.size is None:
            raise ValueError(f"window: expected a Window(size) with a number for its size, got {window!r}")
        is_map = isinstance(far, FeatureMethod) or (not isinstance(far, Method | str) and isinstance(far, FeatureMap))
        if not is_map or feature_method(far).normalizer != "row":
            raise ValueError(
                f"far: expected a feature method whose weights are divided by their sum, such as Taylor(2), got {far!r}"
            )
        if heads is not None:
            check_whole("heads", heads, 1)
        self.window, self.far = window, far
        self.register_parameter("log_factor", None if heads is None else nn.Parameter(torch.zeros(heads)))

    @property
    def positive(self) -> bool:  # type: ignore[override]
        return bool(self.far.positive)

    @property
    def label(self) -> str:
        return f"Hybrid({self.window.label}, {getattr(self.far, 'label', self.far)})"

    @property
    def warning(self) -> str | None:
        return getattr(self.far, "warning", None)

    def for_layer(self, head_dim: int, heads: int, key_heads: int) -> "Hybrid":
        """Return the method with its own map and factor for a layer; the method itself if it has no map to make."""
        far = for_layer(self.far, head_dim, heads, key_heads)
        return self if far is self.far else Hybrid(self.window, far, heads=heads)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Hybrid):
            return NotImplemented
        return (self.window, self.far) == (other.window, other.far) and self.log_factor is other.log_factor

    def __hash__(self) -> int:
        return hash((self.window, self.far))

    def __repr__(self) -> str:
        return self.label
