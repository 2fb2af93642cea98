"""Multi-head attention as a module.

    head_i = attention(query Wq_i, key Wk_i, value Wv_i)         i = 1 ... h
    output = [head_1, ..., head_h] Wo

The module holds the parameters, which are torch's, and translates torch's masks, in which True *hides*, into
ours, in which True *shows*. The arithmetic is that of `attention`.

Axes: b batch, h heads, n queries, m keys, w embedding, d = w / h.
"""

import warnings
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad._attention import attention
from subquad._features import Exact, RandomFeatures
from subquad._methods import Method, resolve

HIDDEN = float("-inf")


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with a choice of method: the same arguments, parameters and masks.

    query (b, n, w), key (b, m, kdim), value (b, m, vdim) -> output (b, n, w), weights (b, n, m) or None, with
    `batch_first=True`; (n, b, w) and so on without it; (n, w) and so on for inputs without a batch.

    What differs from torch:

    - A query that may see no key gets 0 (before the output projection), not NaN.
    - `is_causal=True` needs no `attn_mask`. A mask given with it has to be the causal one, as torch asks. All
      queries see the keys of `add_bias_kv` and `add_zero_attn` also then; torch hides them at times.
    - Linear methods take a `key_padding_mask`, and an `attn_mask` that is causal or the same for all queries,
      boolean or of 0 and -inf; others are refused. Where values cannot be read (while compiling, under vmap)
      an `attn_mask` needs `is_causal=True`, and in a `key_padding_mask` of numbers all but 0 hides.
    - `need_weights=True` makes a linear method form the n x m matrix that it exists to avoid, and warns.
    - The matrix of `RandomFeatures` is a buffer, and a map that is an `nn.Module` a submodule, so both are
      saved and moved. A checkpoint of torch's module has neither: loading it draws the first from its seed
      and leaves the second alone.

    >>> layer = MultiheadAttention(16, 4, batch_first=True, method="taylor")
    >>> layer.load_state_dict(nn.MultiheadAttention(16, 4).state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(2, 5, 16)
    >>> output, weights = layer(x, x, x, need_weights=False, is_causal=True)
    >>> output.shape, weights
    (torch.Size([2, 5, 16]), None)
    """

    # nn.TransformerEncoderLayer asks for this before it calls its attention: where it is True, eval mode runs
    # a fused softmax on the parameters instead.
    _qkv_same_embed_dim = False

    # Parameters in torch's order: optimisers go by it.
    embed_dim: int
    num_heads: int
    head_dim: int
    kdim: int
    vdim: int
    batch_first: bool
    add_zero_attn: bool
    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    out_proj: nn.Module
    dropout: float
    method: Method
    random_matrix: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        method: Method | str = "exact",
    ) -> None:
        super().__init__()
        model = nn.MultiheadAttention(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device,
            dtype,
        )  # fmt: skip
        self.take_over(model, dropout, resolve(method))

    def take_over(self, model: nn.Module, dropout: float, method: Method) -> None:
        """Use the parameters of another module, the same objects, with a method."""
        if dropout > 0 and not isinstance(method, Exact):
            raise ValueError(
                f"dropout: {type(method).__name__} never forms the weights that dropout={dropout} drops: "
                'expected dropout=0, or method="exact"'
            )
        for name in MultiheadAttention.__annotations__:
            if name not in ("method", "random_matrix"):
                setattr(self, name, getattr(model, name))
        self.dropout = dropout
        self.method = method  # A map that is an nn.Module becomes a submodule by this.
        self.register_buffer("random_matrix", self._draw())
        self.train(model.training)

    def _draw(self) -> Tensor | None:
        if not isinstance(self.method, RandomFeatures):
            return None
        matrix = self.method.draw(self.head_dim) if self.method.matrix is None else self.method.matrix
        weight = next(self.parameters())
        return matrix.to(weight.device, torch.promote_types(weight.dtype, torch.float32))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights if needed: averaged over the heads, or (b, h, n, m).

        key_padding_mask (b, m), attn_mask (n, m) or (b * h, n, m) as torch's: True hides, numbers are added.
        """
        if query.is_nested:
            raise ValueError(
                "query: expected a plain tensor, got a nested one. If it comes from nn.TransformerEncoder, "
                "give replace_attention the whole encoder, or set the encoder's use_nested_tensor to False."
            )
        if not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3):
            dims = (query.dim(), key.dim(), value.dim())
            raise ValueError(f"query, key, value: expected 3 dimensions, or 2 without a batch, got {dims}")
        unbatched = query.dim() == 2
        if unbatched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        b, n, m = *query.shape[:2], key.shape[1]
        _check_shape("query", query, (b, n, self.embed_dim))
        _check_shape("key", key, (b, m, self.kdim))
        _check_shape("value", value, (b, m, self.vdim))
        _check_mask("key_padding_mask", key_padding_mask, (b, m))
        _check_mask("attn_mask", attn_mask, (n, m), (b * self.num_heads, n, m))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.reshape(b, self.num_heads, n, m)

        q, k, v = self._project(query, key, value)
        heads, weights = self._attend(q, k, v, key_padding_mask, need_weights, attn_mask, is_causal)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if unbatched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """(b, length, width) -> (b, h, length, d) each; before keys and values come the module's own."""
        if self.in_proj_weight is None:
            matrices: tuple[Any, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            matrices = self.in_proj_weight.chunk(3)
        offsets = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(*each) for each in zip((query, key, value), matrices, offsets, strict=True))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([self.bias_k.to(k.dtype).expand(len(k), -1, -1), k], 1)
            v = torch.cat([self.bias_v.to(v.dtype).expand(len(v), -1, -1), v], 1)
        split = (self.num_heads, self.head_dim)
        return tuple(x.reshape(*x.shape[:2], *split).transpose(1, 2) for x in (q, k, v))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, need_weights: bool,
        attn_mask: Tensor | None, is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """(b, h, n, d), and the weights (b, h, n, m) or None."""
        own = self.add_zero_attn + (self.bias_k is not None)  # Keys that no mask hides, before the m others.
        exact = isinstance(self.method, Exact)
        keep = None
        if exact:
            lengths = (q.shape[2], k.shape[2] - own)
            mask, is_causal = _as_bias(attn_mask, key_padding_mask, is_causal, need_weights, lengths, q)
        else:
            mask, is_causal = (None, is_causal) if attn_mask is None or is_causal else _factored(attn_mask)
            keep = None if key_padding_mask is None else _shown("key_padding_mask", key_padding_mask)
        if own:
            mask = None if mask is None else F.pad(mask, (own, 0), value=0 if exact else 1)
            keep = None if keep is None else F.pad(keep, (own, 0), value=1)
        # As many queries before the first: then causality lets it see the module's own keys and one more.
        ahead = own if is_causal else 0
        q = F.pad(q, (0, 0, ahead, 0))

        dropout = self.dropout if self.training else 0.0
        if exact and need_weights:
            weights = F.dropout(_softmax(q, k, mask), dropout)
            return weights @ v, weights.roll(-own, -1)  # Torch has the module's own keys last.
        method = self.method
        if isinstance(method, RandomFeatures):
            method = replace(method, matrix=self.random_matrix)
        heads = attention(q, k, v, mask, dropout, is_causal, method=method, key_padding_mask=keep)
        if not need_weights:
            return heads[:, :, ahead:], None
        if not torch.compiler.is_compiling():
            warnings.warn(
                "need_weights=True forms the matrix of all queries times all keys, which a linear method is "
                "there to avoid; pass need_weights=False to stay linear.",
                stacklevel=5,
            )
        # The weights are what attention makes of values that only say which key they belong to.
        one_hot = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
        weights = attention(q, k, one_hot, mask, 0.0, is_causal, method=method, key_padding_mask=keep)
        return heads[:, :, ahead:], weights[:, :, ahead:].roll(-own, -1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A checkpoint of torch's module knows of no method. One that holds a part of a map is left to fail.
        if self.random_matrix is not None:
            state_dict.setdefault(f"{prefix}random_matrix", self._draw())
        place = f"{prefix}method."
        if isinstance(self.method, nn.Module) and not any(name.startswith(place) for name in state_dict):
            state_dict.update(self.method.state_dict(prefix=place))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        method = "" if isinstance(self.method, nn.Module) else f", method={self.method}"
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}{method}"


# --- Torch's masks, in which True hides and numbers are added -----------------------------------------------


def _as_bias(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, need_weights: bool,
    lengths: tuple[int, int], like: Tensor,
) -> tuple[Tensor | None, bool]:  # fmt: skip
    """All masks in one, to be added to the logits of exact attention; and whether it is causal besides."""
    if is_causal and key_padding_mask is None and not need_weights:
        return None, True  # As in torch, is_causal says all that a mask given with it could.
    if is_causal and attn_mask is None:
        attn_mask = torch.ones(lengths, dtype=torch.bool, device=like.device).triu(1)
    total = None
    for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]):
        if mask is not None:
            numbers = torch.where(mask, HIDDEN, 0.0) if mask.dtype == torch.bool else mask
            total = numbers.to(like.dtype) if total is None else total + numbers.to(like.dtype)
    return total, False


def _softmax(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """(b, h, n, m): the weights of exact attention, 0 for a query that sees no key."""
    logits = q @ k.mT / sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + bias
    blind = (logits == HIDDEN).all(-1, keepdim=True)
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def _factored(attn_mask: Tensor) -> tuple[Tensor, bool]:
    """(..., n, m) as the two things that a linear method can do: hide keys, (..., 1, m), and be causal."""
    shown = _shown("attn_mask", attn_mask)
    keys = shown.any(-2, keepdim=True)
    if shown.shape[-2] == 1 or _known((shown == keys).all()):
        return keys, False
    if _known((shown == keys.expand_as(shown).tril()).all()):
        return keys, True
    raise ValueError(
        "attn_mask: a linear method can hide a key from all queries, or from those before it; this mask does "
        "something else, or cannot be looked into while compiling. Pass is_causal=True if it is the causal "
        'mask, key_padding_mask to hide keys, or use method="exact".'
    )


def _shown(name: str, mask: Tensor) -> Tensor:
    """True where a mask lets through; refused if it does more than hide."""
    if mask.dtype == torch.bool:
        return ~mask
    if _known(((mask == 0) | (mask == HIDDEN)).all()) is False:
        raise ValueError(
            f"{name}: expected booleans, or only 0 and -inf; got other numbers, a bias added to the logits, "
            'which no linear method can honour. Use method="exact".'
        )
    return mask == 0


def _known(condition: Tensor) -> bool | None:
    """Whether it holds; None where values cannot be read: while compiling, under vmap, on the meta device."""
    if torch.compiler.is_compiling():
        return None
    try:
        return bool(condition)
    except RuntimeError:
        return None


def _check_mask(name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name}: expected booleans, True = hide, or floats, got {mask.dtype}")
    _check_shape(name, mask, *shapes)


def _check_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    if tuple(tensor.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"{name}: expected shape {wanted}, batch first, got {tuple(tensor.shape)}")
