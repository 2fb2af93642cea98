"""flash_attn_varlen_func: packed sequences of different lengths, (tokens, heads, width).

Sequences with the same numbers of queries and keys are computed as one batch. Segment ids, in one call for all
sequences, cost more: exact attention would form all pairs of tokens, and the kernels of linear methods have none.

Axes: s sequences of a batch, n queries, m keys, h heads, e value width.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.sums import NEVER
from subquad._engines.finite import widen
from subquad.attention import MethodLike
from subquad.integrations.flash.attend import attend
from subquad.integrations.flash.checks import check_integers, check_tensors
from subquad.integrations.flash.pages import places_in_pages
from subquad.integrations.flash.rule import Rule, rule_of

Places = tuple[Tensor, ...]  # an index of tokens, (s, n)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    method: MethodLike = "exact",
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """Compute attention in packed sequences, as `flash_attn_func` does in each of them.

    Args:
        q: Queries (tokens, heads, width).
        k: Keys (key tokens, key heads, width); with a block table, (pages, page size, key heads, width).
        v: Values, in the layout of the keys.
        cu_seqlens_q: (batch + 1,): queries of sequence b are tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        cu_seqlens_k: (batch + 1,): the same of the keys. A sequence may be empty.
        max_seqlen_q: At least the length of the longest sequence of queries; checked, and not used otherwise.
        max_seqlen_k: The same of the keys.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes: As for `flash_attn_func`.
        deterministic, return_attn_probs: As for `flash_attn_func`.
        block_table: (batch, pages of a sequence): the pages that hold the keys of each sequence, in order.
        method: As for `flash_attn_func`.

    Returns:
        (tokens, heads, value width), 0 behind the last sequence. With `return_attn_probs`, a tuple of that, the
        log-sum-exp (heads, tokens) and None.

    Raises:
        ValueError: An argument does not fit the others, or the method does not support it.

    Example:
        >>> q, k, v = torch.randn(3, 10, 2, 8).unbind()
        >>> ends = torch.tensor([0, 4, 10], dtype=torch.int32)
        >>> out = flash_attn_varlen_func(q, k, v, ends, ends, 6, 6, causal=True)
        >>> alone = flash_attn_varlen_func(q[:4], k[:4], v[:4], ends[:2], ends[:2], 4, 4, causal=True)
        >>> torch.allclose(out[:4], alone)
        True
    """
    if block_table is None:
        check_tensors(3, q=q, k=k, v=v)
    else:
        check_tensors(4, q=q[None], k=k, v=v)
    starts, lengths = _spans("cu_seqlens_q", cu_seqlens_q, len(q))
    key_starts, key_lengths = _spans("cu_seqlens_k", cu_seqlens_k, len(k) if block_table is None else None)
    if len(lengths) != len(key_lengths):
        expected = f"{len(lengths) + 1} numbers, like cu_seqlens_q"
        raise ValueError(f"cu_seqlens_k: expected {expected}, got {len(key_lengths) + 1}")
    for name, given, own in (("max_seqlen_q", max_seqlen_q, lengths), ("max_seqlen_k", max_seqlen_k, key_lengths)):
        if given < max(own, default=0):
            raise ValueError(f"{name}: expected at least {max(own)}, the longest sequence, got {given}")
    rule = rule_of(
        batch=len(lengths), heads=q.shape[1], causal=causal, window_size=window_size, softcap=softcap,
        dropout_p=dropout_p, softmax_scale=softmax_scale, alibi_slopes=alibi_slopes, method=method,
        lse=("return_attn_probs", return_attn_probs),
    )  # fmt: skip
    table = None if block_table is None else check_integers("block_table", block_table, (len(lengths), None))

    def keys_of(numbers: list[int], m: int) -> Places:
        positions = torch.arange(m, device=k.device).expand(len(numbers), m)
        if table is None:
            return (key_starts.to(k.device)[numbers, None] + positions,)
        return places_in_pages(table.to(k.device)[numbers], positions, k)

    output, lse = _attend_packed((q, k, v), starts.to(q.device), (lengths, key_lengths), keys_of, rule)
    return (output, lse, None) if return_attn_probs else output


def _attend_packed(
    qkv: tuple[Tensor, Tensor, Tensor], starts: Tensor, lengths: tuple[list[int], list[int]],
    keys_of: Callable[[list[int], int], Places], rule: Rule,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (tokens, h, e) and the log-sum-exp (h, tokens); the latter only if the rule asks for it."""
    q, k, v = qkv
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, sizes in enumerate(zip(*lengths, strict=True)):
        batches[sizes].append(number)
    places, outputs, sums = [], [], []
    for (n, m), numbers in batches.items():
        own, keys = starts[numbers, None] + torch.arange(n, device=q.device), keys_of(numbers, m)
        output, lse = attend(
            q[own].transpose(1, 2), k[keys].transpose(1, 2), v[keys].transpose(1, 2), rule.of_sequences(numbers)
        )
        places.append(own.flatten())
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # (s n, h, e)
        sums.append(output.new_empty(0) if lse is None else lse.transpose(0, 1).flatten(1))  # (h, s n)
    whole = F.pad(q[..., :0], (0, v.shape[-1]))  # 0, with a gradient
    all_sums = torch.full(q.shape[1::-1], NEVER, dtype=widen(q[:0]).dtype, device=q.device)
    if places:
        whole = whole.index_copy(0, torch.cat(places), torch.cat(outputs))
        all_sums = all_sums.index_copy(1, torch.cat(places), torch.cat(sums, 1)) if rule.needs_lse else all_sums
    return whole, all_sums


def _spans(name: str, ends: Tensor, tokens: int | None) -> tuple[Tensor, list[int]]:
    """Return the first token of each sequence, and the lengths; `tokens` is how many tokens there are."""
    ends = check_integers(name, ends, (None,))
    found: list[int] = ends.tolist()
    if not found or found[0] < 0 or found != sorted(found) or (tokens is not None and found[-1] > tokens):
        limit = "" if tokens is None else f" up to the {tokens} tokens"
        raise ValueError(f"{name}: expected numbers that grow from 0{limit}, got {found}")
    return ends[:-1], [end - start for start, end in pairwise(found)]
