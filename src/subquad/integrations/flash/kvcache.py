"""flash_attn_with_kvcache: decoding with keys and values in preallocated tensors, which the caller owns.

    1. rotate the new queries and keys
    2. write the new keys and values into the cache, in place
    3. attend to the filled part of each sequence

Axes: b batch, n new queries, t new keys, h heads, d width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.attention import MethodLike
from subquad.integrations.flash.attend import attend
from subquad.integrations.flash.cache import Cache, cache_of
from subquad.integrations.flash.checks import check_integers, check_tensors
from subquad.integrations.flash.rotary import rotary_of
from subquad.integrations.flash.rule import rule_of


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, method: MethodLike = "exact",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Append new keys and values to a cache, in place, and attend to the filled part of it. There are no gradients.

    Each sequence of the batch is computed as `flash_attn_func` does: its last query is aligned to its last key.

    Args:
        q: Queries (batch, n, heads, width).
        k_cache: Keys (cache batch, capacity, key heads, width); with a block table, (pages, page size, key heads,
            width).
        v_cache: Values, in the layout of the keys.
        k: New keys (batch, t, key heads, width), written at the positions from `cache_seqlens` on.
        v: New values, in the layout of the new keys.
        rotary_cos: (positions, rotated width / 2): rotate the new keys, which are required, and the queries. Token i
            has position cache_seqlens + i; without `causal` and a window, all queries have position cache_seqlens.
        rotary_sin: As rotary_cos.
        cache_seqlens: The filled length of the cache, before the new keys; a number, or (batch,). All of it by default.
        cache_batch_idx: (batch,): which sequence of the cache each one of the batch uses.
        cache_leftpad: (batch,): the first position of each sequence that is not padding.
        block_table: (batch, pages of a sequence): the pages that hold the keys of each sequence, in order.
        softmax_scale, causal, window_size, softcap, alibi_slopes: As for `flash_attn_func`.
        rotary_interleaved: Rotate neighboring numbers together, rather than those half of the rotated width apart.
        num_splits: Accepted, and not used.
        return_softmax_lse: Also return the log-sum-exp of the logits.
        method: As for `flash_attn_func`.

    Returns:
        (batch, n, heads, value width), in the dtype of `q`. With `return_softmax_lse`, a pair of that and the
        log-sum-exp (batch, heads, n).

    Raises:
        ValueError: An argument does not fit the others, or the method does not support it.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 1, 16, 2, 8).unbind()  # room for 16 tokens
        >>> q, k, v = torch.randn(3, 1, 5, 2, 8).unbind()
        >>> for i in range(5):
        ...     token = slice(i, i + 1)
        ...     last = flash_attn_with_kvcache(q[:, token], k_cache, v_cache, k[:, token], v[:, token], cache_seqlens=i)
        >>> from subquad.integrations.flash import flash_attn_func
        >>> torch.allclose(last, flash_attn_func(q, k, v, causal=True)[:, -1:], atol=1e-6)
        True
    """
    check_tensors(4, q=q, k_cache=k_cache, v_cache=v_cache)
    cache = cache_of(k_cache, v_cache, len(q), cache_batch_idx, block_table)
    rule = rule_of(
        batch=len(q), heads=q.shape[2], causal=causal, window_size=window_size, softcap=softcap,
        softmax_scale=softmax_scale, alibi_slopes=alibi_slopes, method=method,
        lse=("return_softmax_lse", return_softmax_lse),
    )  # fmt: skip
    _check_new(cache, len(q), k, v)
    new = torch.arange(0 if k is None else k.shape[1], device=q.device)
    filled = _filled(cache, cache_seqlens, len(q), None if k is None else len(new))
    spans = _spans(cache_leftpad, filled + len(new))
    if rotary_cos is not None or rotary_sin is not None:
        if k is None:
            raise ValueError("rotary_cos: expected None without new keys k, got angles; rotate q before the call")
        rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved, q.shape[-1])
        is_moving = rule.left is not None or rule.right is not None
        steps = torch.arange(q.shape[1], device=q.device) * is_moving
        q, k = rotary.rotate(q, filled[:, None] + steps), rotary.rotate(k, filled[:, None] + new)
    if k is not None and v is not None:
        cache.write(k, v, filled[:, None] + new)
    outputs, sums = [], []
    for sequences, keys, values in cache.read(spans):
        own = q[sequences].transpose(1, 2)
        output, lse = attend(own, keys.transpose(1, 2), values.transpose(1, 2), rule.of_sequences(sequences))
        outputs.append(output.transpose(1, 2))
        sums += [] if lse is None else [lse]
    output = torch.cat(outputs).contiguous()
    return (output, torch.cat(sums)) if return_softmax_lse else output


def _check_new(cache: Cache, batch: int, k: Tensor | None, v: Tensor | None) -> None:
    """Check new keys and values against the cache and against each other."""
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: expected new keys and values together, or neither, got None")
    length = None if k is None or k.dim() < 2 else k.shape[1]
    for name, new, old in (("k", k, cache.keys), ("v", v, cache.values)):
        if new is not None and (new.shape != (batch, length, *old.shape[2:]) or new.dtype != old.dtype):
            expected = f"{old.dtype} of shape {(batch, length or 'new tokens', *old.shape[2:])}"
            raise ValueError(f"{name}: expected {expected}, got {new.dtype} of shape {tuple(new.shape)}")


def _filled(cache: Cache, lengths: int | Tensor | None, batch: int, new: int | None) -> Tensor:
    """Return how many positions of each sequence are filled, (b,), before `new` keys are written."""
    device = cache.keys.device
    if lengths is None:
        if new is not None:
            raise ValueError("cache_seqlens: expected the filled length, behind which k and v are written, got None")
        lengths = cache.capacity
    if isinstance(lengths, int):
        lengths = torch.full((batch,), lengths)
    filled = check_integers("cache_seqlens", lengths, (batch,)).to(device)
    room = cache.capacity - (new or 0)
    if int(filled.min()) < 0 or int(filled.max()) > room:
        reason = f"in a cache of {cache.capacity} with {new or 0} new keys"
        raise ValueError(f"cache_seqlens: expected lengths from 0 to {room}, {reason}, got {filled.tolist()}")
    return filled


def _spans(leftpad: Tensor | None, ends: Tensor) -> list[tuple[int, int]]:
    """Return the first and the end position of the keys of each sequence."""
    starts = torch.zeros_like(ends) if leftpad is None else check_integers("cache_leftpad", leftpad, tuple(ends.shape))
    found: list[tuple[int, int]] = list(zip(starts.tolist(), ends.tolist(), strict=True))
    if any(not 0 <= start <= end for start, end in found):
        raise ValueError(f"cache_leftpad: expected positions up to {ends.tolist()}, got {starts.tolist()}")
    return found
