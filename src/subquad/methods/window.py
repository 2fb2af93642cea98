"""Window: exact softmax attention to the nearest keys and to the first ones. Other keys are not seen.

    causal       query i sees keys i - size + 1 .. i, and the first `sinks` keys up to i
    otherwise    query i sees keys i - size + 1 .. i + size - 1, and the first `sinks` keys

Positions count hidden keys too, as the masks of Hugging Face models do; sinks are the first keys that are visible. Time
O(n (size + sinks) (d + e)), and a state of constant size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from subquad.methods.checks import check_whole
from subquad.methods.error_estimate import NO_ERROR, UNKNOWN_ERROR, ErrorEstimate
from subquad.methods.sparse import SparseMethod

MAX_WINDOW = 1 << 30
CANDIDATE_SIZES, CANDIDATE_SINKS = (128, 512, 2048), 4


@dataclass(frozen=True, repr=False)
class Window(SparseMethod):
    """Exact attention to a sliding window of keys, and to the first keys ("attention sinks").

    Query i stands at the place of key i; with a state, the last query stands at the last key. A call that is not causal
    has a window on both sides, and needs as many queries as keys. Against full attention the error is unknown until
    measured: all other keys are dropped.

    Args:
        size: The number of nearest keys that a query sees, its own included; on either side if the call is not causal.
            None for all keys: exact attention with the options below.
        sinks: The number of first keys that every query sees as well: the first ones that padding does not hide, and in
            packed sequences the first ones of each sequence.
        softcap: Soft-capping of the logits, softcap * tanh(x / softcap), as in Gemma 2.
        sink_logits: A learned logit for each query head, (heads,), which takes part in the softmax and has no value, as
            in gpt-oss.

    Example:
        >>> import torch
        >>> from subquad import attention
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8).unbind()
        >>> near = torch.ones(100, 100, dtype=torch.bool).tril().triu(-15)
        >>> expected = attention(q, k, v, attn_mask=near)
        >>> torch.allclose(attention(q, k, v, is_causal=True, method=Window(16)), expected, atol=1e-6)
        True
    """

    name: ClassVar[str] = "window"
    argument: ClassVar[str | None] = "size"
    second_argument: ClassVar[str] = "sinks"  # "window:64:4"

    size: int | None = 256
    sinks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None:
            check_whole("size", self.size, 1, MAX_WINDOW)
        check_whole("sinks", self.sinks, 0, MAX_WINDOW)

    @property
    def label(self) -> str:
        return (
            f"Window({', '.join([str(self.size), *([f'sinks={self.sinks}'] if self.sinks else []), *self._options])})"
        )

    @property
    def reach(self) -> int:
        """The size as a number."""
        return MAX_WINDOW if self.size is None else self.size

    def error(
        self, low: float, high: float, spread: float | None = None, squared_norm: float | None = None,
        width: int | None = None,
    ) -> ErrorEstimate:  # fmt: skip
        """Return 0 if this is exact attention, with all keys and no option that changes their weights."""
        is_exact = self.size is None and self.softcap is None and self.sink_logits is None
        return NO_ERROR if is_exact else UNKNOWN_ERROR

    @classmethod
    def candidates(cls, width: int) -> Iterable["Window"]:
        """Return a few sizes, with sinks: trained models often attend to the first keys."""
        return [cls(size, CANDIDATE_SINKS) for size in CANDIDATE_SIZES]
