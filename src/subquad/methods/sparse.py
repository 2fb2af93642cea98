"""SparseMethod: exact softmax over some of the pairs of query and key.

    out_i = sum_j p_ij v_j,   p_ij = exp(y_ij) / (exp(a) + sum_j exp(y_ij)),   y = softcap tanh(x / softcap)

over the keys j that query i sees. `softcap` (soft-capping of the logits) and a (the logit of a learned sink, one per
head) are optional.
"""

from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor

from subquad.methods.method import Engine, Method


@dataclass(frozen=True, repr=False)
class SparseMethod(Method):
    """The options that `Window` and `BlockSparse` share.

    `sink_logits` takes no part in comparisons: it changes what queries read from a state, not the state.
    """

    engine: ClassVar[Engine] = "sparse"
    family: ClassVar[str] = "sparse"

    softcap: float | None = field(default=None, kw_only=True)
    sink_logits: Tensor | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        cap, sinks = self.softcap, self.sink_logits
        if cap is not None and not (isinstance(cap, int | float) and isfinite(cap) and cap > 0):
            raise ValueError(f"softcap: expected a positive number or None, got {cap!r}")
        if sinks is not None and not (isinstance(sinks, Tensor) and sinks.dim() == 1 and sinks.is_floating_point()):
            shape = f"shape {tuple(sinks.shape)}, {sinks.dtype}" if isinstance(sinks, Tensor) else repr(sinks)
            raise ValueError(f"sink_logits: expected one floating-point number per query head, got {shape}")

    def __repr__(self) -> str:
        return self.label

    @property
    def _options(self) -> list[str]:
        """The options that differ from their defaults, for the label."""
        shown = [f"softcap={self.softcap:g}"] if self.softcap is not None else []
        return shown + (["sink_logits"] if self.sink_logits is not None else [])

    def logits_of_sinks(self, heads: int, dtype: torch.dtype) -> Tensor | None:
        """Return (heads,): the logits of the learned sinks, or None."""
        if self.sink_logits is None:
            return None
        if len(self.sink_logits) not in (1, heads):
            raise ValueError(
                f"sink_logits: expected one number for each of the {heads} query heads, got {len(self.sink_logits)}"
            )
        return self.sink_logits.to(dtype).expand(heads)
