"""The mask of a call, as a rule: linear methods never form its matrix.

Axes: b batch, n queries of this call, m keys of this call.
"""

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from subquad.integrations.transformers.unsupported import unsupported


class Mask:
    """The keys that a query may see: the rule that transformers made, and the padding.

    Args:
        **arguments: The arguments of a transformers mask function.
    """

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.key_length: int = arguments["kv_length"]

    @cached_property
    def matrix(self) -> Tensor | None:
        """(b, 1, n, m), True = attend, computed on first use; None if `is_causal` of the layer is enough."""
        found: Tensor | None = sdpa_mask(**self.arguments)
        return found

    @cached_property
    def rule(self) -> tuple[bool, Tensor | None] | None:
        """Whether the mask is causal, and the segments of packed sequences; None if it is a rule of another kind."""
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
        """Raise ValueError: `generate` calls this for static caches, whose masks it creates before the model runs."""
        raise ValueError('past_key_values: static caches are not supported; remove cache_implementation="static"')

    @property
    def is_static(self) -> bool:
        """Whether there are keys after the last query, as in a cache that is allocated at its maximum length."""
        queries = self.arguments.get("q_offset", 0) + self.arguments["q_length"]
        return bool(self.key_length + self.arguments.get("kv_offset", 0) != queries)


@dataclass(frozen=True)
class Seen:
    """A mask in the form that approximate methods support."""

    is_causal: bool
    keys: Tensor | None = None  # (b, 1 or heads, 1, m)
    segment_ids: Tensor | None = None  # (b, n)


def read(mask: Mask | Tensor | None, is_causal: bool, m: int) -> Seen:
    """Split the mask of the last m keys into what approximate methods support.

    Raises:
        ValueError: The mask is not causal, packed, padded, or a combination of these.
    """
    if mask is None:
        return Seen(is_causal)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return _read_matrix(mask, is_causal, m)
    if not isinstance(mask, Mask):
        raise unsupported("attention_mask", f"a {type(mask).__name__} for another kind of attention")
    if mask.rule is None:
        raise unsupported("attention_mask", "a rule for each pair of query and key, such as a window or blocks")
    is_causal, segment_ids = mask.rule
    if is_causal and mask.is_static:
        raise unsupported("past_key_values", "a static cache, which contains keys that do not exist yet")
    keys = None if mask.padding is None else mask.padding[:, mask.key_length - m :]
    if keys is None or bool(keys.all()):
        return Seen(is_causal, None, segment_ids)
    return Seen(is_causal, keys[:, None, None], segment_ids)


def _read_matrix(mask: Tensor, is_causal: bool, m: int) -> Seen:
    """Split a matrix (b, 1 or heads, n, ...) that is causal, or hides keys, or both; otherwise raise ValueError."""
    shown = mask
    if mask.dtype != torch.bool:
        shown = mask == 0
        if not bool((shown | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            raise unsupported("attention_mask", "numbers added to the logits")
    shown = shown[..., shown.shape[-1] - m :]
    keys, n = shown.any(-2, keepdim=True), shown.shape[-2]
    if bool((shown == keys).all()):
        return Seen(is_causal and n == 1, keys)  # The mask of one query does not show causality; the layer knows.
    if bool((shown == keys.expand_as(shown).tril(m - n)).all()):
        return Seen(True, keys)
    raise unsupported("attention_mask", "a choice for each pair of query and key")
