"""Rule: the arguments that the three functions share, checked once.

    query i sees key j    if  -right <= i + m - n - j <= left    (the last query is aligned to the last key)
    logit                 softcap * tanh(x_ij / softcap) - slope * |i + m - n - j|,    x_ij = q_i.k_j * scale

Axes: b batch, h query heads, n queries, m keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import Tensor

from subquad._engines import engine_of
from subquad.attention import MethodLike, resolve
from subquad.methods import AnyMethod
from subquad.planning.auto import Auto


@dataclass(frozen=True)
class Rule:
    """What the keys and queries of a call do with each other."""

    method: AnyMethod | Auto
    scale: float | None
    left: int | None  # keys that a query sees before its own position; None for all
    right: int | None  # keys that it sees after its own position; 0 in a causal call
    softcap: float | None
    slopes: Tensor | None  # (b, h)
    dropout_p: float
    needs_lse: bool  # whether to return the log-sum-exp of the logits

    @property
    def is_exact(self) -> bool:
        return engine_of(self.method) == "exact"

    def of_sequences(self, index: Any) -> "Rule":
        """Return the rule of some sequences of the batch."""
        return self if self.slopes is None else replace(self, slopes=self.slopes[index])


def rule_of(
    *, batch: int, heads: int, causal: bool, window_size: Sequence[int], softcap: float, softmax_scale: float | None,
    alibi_slopes: Tensor | None, method: MethodLike, dropout_p: float = 0.0, lse: tuple[str, bool],
) -> Rule:  # fmt: skip
    """Check the arguments and return them as one value.

    Args:
        batch: Number of sequences.
        heads: Number of query heads.
        lse: The name and the value of the argument that asks for the log-sum-exp.
        causal, window_size, softcap, softmax_scale, alibi_slopes, method, dropout_p: As for `flash_attn_func`.
    """
    left, right = _window(window_size)
    if not 0 <= softcap < inf:
        raise ValueError(f"softcap: expected 0.0 (off) or a positive number, got {softcap}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected a probability below 1, got {dropout_p}")
    slopes = None if alibi_slopes is None else _slopes(alibi_slopes, batch, heads)
    rule = Rule(
        resolve(method), softmax_scale, left, 0 if causal else right, softcap or None, slopes, dropout_p, lse[1]
    )
    is_window = rule.left is not None or rule.right not in (None, 0)
    options = [
        ("window_size", window_size, (-1, -1), is_window), ("softcap", softcap, 0.0, softcap > 0),
        (*lse, False, lse[1]), ("alibi_slopes", "a tensor", None, slopes is not None),
        ("dropout_p", dropout_p, 0.0, dropout_p > 0),
    ]  # fmt: skip
    for name, value, default, is_given in options:
        if is_given and not rule.is_exact:
            raise ValueError(f'{name}: expected {default} with {rule.method}, got {value}; use method="exact"')
        if is_given and dropout_p > 0 and name in ("window_size", "softcap", lse[0]):
            advice = "apply dropout to the output instead"
            raise ValueError(f"dropout_p: expected 0.0 together with {name}={value}, got {dropout_p}; {advice}")
    return rule


def _window(window_size: Sequence[int]) -> tuple[int | None, int | None]:
    """Return how many keys are seen to the left and right; None for all."""
    is_pair = isinstance(window_size, Sequence) and len(window_size) == 2
    if not is_pair or not all(isinstance(size, int) for size in window_size):
        raise ValueError(f"window_size: expected two integers, (left, right), -1 for no limit, got {window_size!r}")
    left, right = (None if size < 0 else int(size) for size in window_size)
    return left, right


def _slopes(slopes: Tensor, batch: int, heads: int) -> Tensor:
    """Return (b, h)."""
    if not slopes.is_floating_point() or slopes.shape not in ((heads,), (batch, heads)):
        expected = f"floating-point numbers of shape ({heads},) or ({batch}, {heads})"
        raise ValueError(f"alibi_slopes: expected {expected}, got {slopes.dtype} of shape {tuple(slopes.shape)}")
    return slopes.expand(batch, heads)
