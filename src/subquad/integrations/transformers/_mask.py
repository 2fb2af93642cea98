"""The mask of a call: the rule itself, of which a linear method never makes a matrix.

Axes: b batch, n queries, m keys, both of this call alone.
"""

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from subquad.integrations.transformers._refusal import refusal


class Mask:
    """Which keys a query may see, as the rule that transformers made and the padding; it makes a matrix when asked to.

    arguments: those of a mask function of transformers.
    """

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.key_length: int = arguments["kv_length"]

    @cached_property
    def matrix(self) -> Tensor | None:
        """(b, 1, n, m), True = attend; None where `is_causal` of the layer says all."""
        found: Tensor | None = sdpa_mask(**self.arguments)
        return found

    @cached_property
    def rule(self) -> tuple[bool, Tensor | None] | None:
        """Whether it is causal, and the segments of packed sequences; None if it is neither that nor the full rule."""
        rule = self.arguments["mask_function"]
        parts = (rule,)
        if getattr(rule, "__name__", None) == "and_mask":
            parts = inspect.getclosurevars(rule).nonlocals["mask_functions"]
        known = {causal_mask_function: True, bidirectional_mask_function: False}
        if parts[0] not in known or len(parts) > 2:
            return None
        if len(parts) == 1:
            return known[rule], None
        packed = inspect.getclosurevars(parts[1]).nonlocals.get("packed_sequence_mask")
        return None if packed is None else (known[parts[0]], packed)

    @cached_property
    def padding(self) -> Tensor | None:
        """(b, m), True = attend."""
        given, first = self.arguments.get("attention_mask"), self.arguments.get("kv_offset", 0)
        if given is None:
            return None
        missing = first + self.key_length - given.shape[-1]
        return F.pad(given, (0, max(0, missing)))[:, first : first + self.key_length]

    def contiguous(self) -> NoReturn:
        """Asked by `generate`, which for static caches makes masks ahead of the model."""
        raise ValueError('past_key_values: static caches are not supported; leave out cache_implementation="static"')

    @property
    def is_static(self) -> bool:
        """Whether the keys go on after the last query, as those of a cache that was made as long as it may become."""
        queries = self.arguments.get("q_offset", 0) + self.arguments["q_length"]
        return bool(self.key_length + self.arguments.get("kv_offset", 0) != queries)


@dataclass(frozen=True)
class Seen:
    """A mask as a linear method takes it."""

    is_causal: bool
    keys: Tensor | None = None  # (b, 1 or heads, 1, m)
    segment_ids: Tensor | None = None  # (b, n)


def read(mask: Mask | Tensor | None, is_causal: bool, m: int) -> Seen:
    """The mask of the last m keys, taken apart."""
    if mask is None:
        return Seen(is_causal)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return _read_matrix(mask, is_causal, m)
    if not isinstance(mask, Mask):
        raise refusal("attention_mask", f"a {type(mask).__name__} for another kind of attention")
    if mask.rule is None:
        raise refusal("attention_mask", "a rule for each pair of query and key, such as a window or blocks")
    is_causal, segment_ids = mask.rule
    if is_causal and mask.is_static:
        raise refusal("past_key_values", "a static cache, which hands over keys that are not there yet")
    keys = None if mask.padding is None else mask.padding[:, mask.key_length - m :]
    if keys is None or bool(keys.all()):
        return Seen(is_causal, None, segment_ids)
    return Seen(is_causal, keys[:, None, None], segment_ids)


def _read_matrix(mask: Tensor, is_causal: bool, m: int) -> Seen:
    """A matrix (b, 1 or heads, n, ·) that somebody else made is causal, or hides keys, or both; or is refused."""
    shown = mask
    if mask.dtype != torch.bool:
        shown = mask == 0
        if not bool((shown | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            raise refusal("attention_mask", "numbers added to the logits")
    shown = shown[..., shown.shape[-1] - m :]
    keys, n = shown.any(-2, keepdim=True), shown.shape[-2]
    if bool((shown == keys).all()):
        return Seen(is_causal and n == 1, keys)  # The mask of one query does not tell; the layer does.
    if bool((shown == keys.expand_as(shown).tril(m - n)).all()):
        return Seen(True, keys)
    raise refusal("attention_mask", "a choice for each pair of query and key")
