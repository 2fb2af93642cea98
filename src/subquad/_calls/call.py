"""Call: one call of attention, checked once and passed as a value.

    query (..., heads, n, d)    key (..., key heads, m, d)    value (..., key heads, m, e)

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width.
"""

from dataclasses import replace
from math import isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.layout import Layout, layout_of
from subquad._calls.masks import (
    MaskKind,
    folded_key_mask,
    folded_padding,
    kind_of,
    numbered_segments,
    shown_by,
    split_pairs,
    unexpanded,
    unfactored,
)  # fmt: skip
from subquad._calls.state import State

NOT_REAL = (str, bytes, bool, complex, list, tuple)  # a union made anew in each call would take longer than the check


class Call(NamedTuple):
    """The arguments of one call, whatever its method."""

    layout: Layout
    query: Tensor
    key: Tensor
    value: Tensor
    dtype: torch.dtype  # of the result
    attn_mask: Tensor | None = None
    mask_kind: MaskKind | None = None  # what attn_mask does
    padding: Tensor | None = None  # (b, m), True = attend
    segments: Tensor | None = None  # (b, m), numbered; 0 continues the state's last segment
    last_segment: Tensor | None = None  # (b,)
    state: State | None = None
    return_state: bool = False
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    is_normalized: bool = True  # False: leave out the division by the sum of weights
    is_headless: bool = False  # the query came without a head dimension
    is_autocast: bool = False
    # For calls whose keys are a part of those of all processes; users cannot set them.
    log_scales: Tensor | None = None  # (b, m), of the keys, divided by the root of the scale; see features/alignment.py
    following: State | None = None  # of the keys after these, in the last segment; not causal
    first_row: int | None = None  # position of the first query among the keys, if it is not where torch puts it

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
        key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None, state: State | None = None,
        return_state: bool = False, is_normalized: bool = True,
    ) -> "Call":  # fmt: skip
        """Check the arguments of `attention` and return them as one value."""
        check_tensors(query=query, key=key, value=value)
        if state is not None and not isinstance(state, State):
            raise TypeError(
                f"state: expected the result of attention(..., return_state=True), got {type(state).__name__}"
            )
        check_numbers(dropout_p, scale)
        device = query.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device) and query.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if autocast else query.dtype
        layout = layout_of(query, key, value, enable_gqa, mixed=autocast)
        if layout.width == 0:  # All logits are 0, as with one number that is 0.
            query, key, layout = F.pad(query, (0, 1)), F.pad(key, (0, 1)), replace(layout, width=1)
        headless = query.dim() == 2
        if headless or key.dim() == 2 or value.dim() == 2:
            query, key, value = (x[None] if x.dim() == 2 else x for x in (query, key, value))
        call = cls(
            layout, query, key, value, dtype, attn_mask, state=state, return_state=return_state, is_causal=is_causal,
            scale=scale, dropout_p=dropout_p, is_normalized=is_normalized, is_headless=headless, is_autocast=autocast,
        )  # fmt: skip
        if attn_mask is None and key_padding_mask is None and segment_ids is None:
            return call
        return call._masked(key_padding_mask, segment_ids)

    def _masked(self, key_padding_mask: Tensor | None, segment_ids: Tensor | None) -> "Call":
        masks = dict(attn_mask=self.attn_mask, key_padding_mask=key_padding_mask, segment_ids=segment_ids)
        check_tensors(**{name: mask for name, mask in masks.items() if mask is not None})
        segments = last = None
        if segment_ids is not None:
            before = None if self.state is None else self.state.segment
            segments, last = numbered_segments(self.layout, segment_ids, before)
        mask = self.attn_mask
        if mask is not None and (mask.dim() < 2 or mask.shape[-2] == 1):
            shown = shown_by(mask)
            mask = mask if shown is None else shown
        return self._replace(
            attn_mask=mask,
            mask_kind=None if mask is None else kind_of(mask, self.layout),
            padding=None if key_padding_mask is None else folded_padding(self.layout, key_padding_mask),
            segments=segments,
            last_segment=last,
        )

    @property
    def is_stateful(self) -> bool:
        return self.return_state or self.state is not None or self.following is not None

    @property
    def is_empty(self) -> bool:
        """Whether the call has 0 queries or 0 keys."""
        return self.layout.rows * self.layout.group * self.layout.queries * self.layout.keys == 0

    @property
    def logit_scale(self) -> float:
        return 1 / sqrt(self.layout.width) if self.scale is None else self.scale

    def keep(self) -> Tensor | None:
        """Return the keys that padding and a mask of keys let through, (b, m), True = attend; None if all."""
        if self.attn_mask is None or self.mask_kind != "keys":
            return self.padding
        by_key = folded_key_mask(self.layout, self.attn_mask)
        return by_key if self.padding is None else self.padding & by_key

    def folded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (b, g, n, d), k (b, m, d) and v (b, m, e), in one dtype."""
        query, key, value = self.query, self.key, self.value
        if self.is_autocast:
            query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
        return self.layout.fold_query(query), self.layout.fold_key(key), self.layout.fold_key(value)

    def factored(self) -> "Call":
        """Return the call with its attn_mask as a mask of keys, or raise ValueError: what an approximation needs."""
        if self.attn_mask is None or self.mask_kind == "keys":
            return self
        if self.mask_kind == "pairs":
            return self._from_pairs(self.attn_mask)
        if self.is_stateful:
            raise ValueError(
                "attn_mask: with a state, expected the same mask for all query heads that share a key head; "
                "key_padding_mask takes one per key head"
            )
        return self.ungrouped()

    def _from_pairs(self, attn_mask: Tensor) -> "Call":
        """Return the call with the keys and the causality that a matrix stands for."""
        is_matrix = attn_mask.dim() > 1 and attn_mask.shape[-2] == self.layout.queries
        shown = shown_by(unexpanded(attn_mask)) if is_matrix else None
        split = None if shown is None else split_pairs(shown)
        if split is None or (split[1] and self.is_stateful):  # A causal matrix does not say where the state's keys are.
            raise unfactored(attn_mask, 'use method="exact"')
        keys, is_causal = split
        call = self._replace(
            attn_mask=keys, mask_kind=kind_of(keys, self.layout), is_causal=self.is_causal or is_causal
        )
        return call.factored()

    def ungrouped(self) -> "Call":
        """Return the call with a copy of each key head for every query head, which may then have its own mask."""
        group = self.layout.group
        key, value = (x.repeat_interleave(group, -3) for x in (self.key, self.value))
        return self._replace(
            layout=replace(self.layout, key_heads=self.layout.key_heads * group, group=1, copies=group),
            key=key,
            value=value,
            mask_kind="keys",
            padding=None if self.padding is None else self.padding.repeat_interleave(group, 0),
            segments=None if self.segments is None else self.segments.repeat_interleave(group, 0),
            last_segment=None if self.last_segment is None else self.last_segment.repeat_interleave(group, 0),
        )

    def unfolded(self, output: Tensor) -> Tensor:
        """Return the result (..., heads, n, e) of an output (b, g, n, e)."""
        output = self.layout.unfold_query(output)
        output = output if output.dtype == self.dtype else output.to(self.dtype)
        return output[0] if self.is_headless else output


def check_tensors(**named: object) -> None:
    """Raise TypeError for the first argument that is not a tensor."""
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def check_numbers(dropout_p: float, scale: float | None) -> None:
    """Raise unless dropout_p is a probability and the scale a finite number; symbols of recorded programs pass."""
    if torch.compiler.is_compiling():
        return
    for name, number in (("dropout_p", dropout_p), ("scale", scale)):
        if isinstance(number, NOT_REAL):
            raise TypeError(f"{name}: expected a number, got {number!r}")
    if isinstance(scale, (int, float)) and not isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if isinstance(dropout_p, (int, float)) and not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: expected a number from 0 to 1, got {dropout_p}")
