"""Masks of `torch.nn.MultiheadAttention`, in which True hides and numbers are added to the logits.

Axes: b batch, h heads, n queries, m keys.
"""

from math import sqrt

import torch
from torch import Tensor

from subquad._calls.masks import is_true, only_hides, split_pairs
from subquad._torch_internals import assert_later

HIDDEN = float("-inf")


def as_bias(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, need_weights: bool,
    lengths: tuple[int, int], like: Tensor,
) -> tuple[Tensor | None, bool]:  # fmt: skip
    """Return the sum of all masks, to be added to the logits of exact attention, and whether to also be causal."""
    if is_causal and key_padding_mask is None and not need_weights:
        return None, True  # As in torch, a mask passed with is_causal is the causal one.
    if is_causal and attn_mask is None:
        attn_mask = torch.ones(lengths, dtype=torch.bool, device=like.device).triu(1)
    total = None
    for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]):
        if mask is not None:
            numbers = torch.where(mask, HIDDEN, 0.0) if mask.dtype == torch.bool else mask
            total = numbers.to(like.dtype) if total is None else total + numbers.to(like.dtype)
    return total, False


def softmax_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return the weights of exact attention, (b, h, n, m); 0 for a query that sees no key."""
    logits = q @ k.mT / sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + bias
    blind = (logits == HIDDEN).all(-1, keepdim=True)
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


class ShapeError(ValueError, AssertionError):
    """A wrong shape: ValueError as everywhere in this library, AssertionError as in torch's module."""


def factored(attn_mask: Tensor) -> tuple[Tensor, bool]:
    """Split a mask (..., n, m) into what an approximation supports: the keys shown, (..., 1, m), and causality."""
    split = split_pairs(shown_keys("attn_mask", attn_mask))
    if split is None:
        raise ValueError(
            "attn_mask: this method can hide a key from all queries, or from the queries before it; this mask does "
            "something else, or its values cannot be read under torch.compile. Pass is_causal=True if it is the causal "
            'mask, pass key_padding_mask to hide keys, or use method="exact".'
        )
    return split


def shown_keys(name: str, mask: Tensor) -> Tensor:
    """Return True where a mask shows a key; raise ValueError if it does more than hide keys."""
    if mask.dtype == torch.bool:
        return ~mask
    text = (
        f"{name}: expected booleans, or only 0 and -inf; got other numbers. This method does not support a bias "
        'added to the logits; use method="exact".'
    )
    is_learned = mask.requires_grad and torch.is_grad_enabled()
    if is_learned or is_true(only_hides(mask)) is False:
        raise ValueError(text)
    if torch.compiler.is_compiling():
        assert_later(only_hides(mask), text)
    return mask == 0


def check_mask(name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name}: expected booleans, True = hide, or floats, got {mask.dtype}")
    check_shape(name, mask, *shapes)


def check_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    if tuple(tensor.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ShapeError(f"{name}: expected shape {wanted}, batch first, got {tuple(tensor.shape)}")
