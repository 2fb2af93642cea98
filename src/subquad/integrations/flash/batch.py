"""flash_attn_func: sequences of equal length, (batch, length, heads, width)."""

from collections.abc import Sequence

from torch import Tensor

from subquad.attention import MethodLike
from subquad.integrations.flash.attend import attend
from subquad.integrations.flash.checks import check_tensors
from subquad.integrations.flash.rule import rule_of


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, method: MethodLike = "exact",
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """Compute attention with the signature and the meaning of flash_attn's function of this name.

    The last query is aligned to the last key: with n queries and m keys, query i has position i + m - n. A query that
    sees no key gives 0. Query heads that share a key head are consecutive.

    Args:
        q: Queries (batch, n, heads, width).
        k: Keys (batch, m, key heads, width); the number of key heads divides that of the query heads.
        v: Values (batch, m, key heads, value width).
        dropout_p: Dropout on the weights; without a window or soft-capping.
        softmax_scale: Factor of the logits, 1/sqrt(width) by default.
        causal: Hide the keys after the position of the query.
        window_size: How many keys before and after its position a query sees; -1 for no limit.
        softcap: Soft-capping of the logits, softcap * tanh(x / softcap); 0.0 for none.
        alibi_slopes: (heads,) or (batch, heads): subtract slope * |position of the query - j| from the logit of key j.
        deterministic: Accepted; results are always deterministic.
        return_attn_probs: Also return the log-sum-exp of the logits; the weights themselves are not available.
        method: A method of `subquad.attention`, or its name. All but exact attention support only `causal` and
            `softmax_scale`.

    Returns:
        (batch, n, heads, value width), in the dtype of `q`. With `return_attn_probs`, a tuple of that, the log-sum-exp
        (batch, heads, n) and None.

    Raises:
        ValueError: An argument does not fit the others, or the method does not support it.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(1, 3, 4, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
        >>> out = flash_attn_func(q, k, v, causal=True)
        >>> out.shape
        torch.Size([1, 3, 4, 8])
        >>> shorter = flash_attn_func(q[:, :2], k[:, :4], v[:, :4], causal=True)  # both without their last token
        >>> torch.allclose(out[:, :2], shorter, atol=1e-6)
        True
    """
    check_tensors(4, q=q, k=k, v=v)
    if len(q) != len(k):
        raise ValueError(f"k: expected a batch of {len(q)}, like q, got {len(k)}")
    rule = rule_of(
        batch=len(q), heads=q.shape[2], causal=causal, window_size=window_size, softcap=softcap, dropout_p=dropout_p,
        softmax_scale=softmax_scale, alibi_slopes=alibi_slopes, method=method,
        lse=("return_attn_probs", return_attn_probs),
    )  # fmt: skip
    output, lse = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rule)
    output = output.transpose(1, 2).contiguous()
    return output if lse is None else (output, lse, None)
