"""Multi-head attention as a module.

    head_i = attention(query Wq_i, key Wk_i, value Wv_i)         i = 1 ... h
    output = [head_1, ..., head_h] Wo

The module holds the parameters, which are torch's, and translates torch's masks, in which True *hides*, into those of
`attention`, in which True *shows*. `attention` does the arithmetic.

Axes: b batch, h heads, n queries, m keys, w embedding, d = w / h.
"""

import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad._engines import engine_of
from subquad.attention import MethodLike, quiet_attention, redirect, resolve, warn_about
from subquad.methods import label_of
from subquad.nn.binding import FITTED, bind_method, bound_method, fitted_by, random_matrix
from subquad.nn.masks import ShapeError, as_bias, check_mask, check_shape, factored, shown_keys, softmax_weights

OWN_ATTRIBUTES = (
    "dropout",
    "method",
    "random_matrix",
    *FITTED,
)  # all others are shared with the module that was replaced


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with a choice of method: the same arguments, parameters and masks.

    Differences from torch:

    - A query that sees no key gets 0 (before the output projection), not NaN.
    - `is_causal=True` does not require an `attn_mask`. A mask passed with it must be the causal one, as in torch. All
      queries see the keys of `add_bias_kv` and `add_zero_attn`, also in causal calls; torch sometimes hides them.
    - Approximate methods support a `key_padding_mask`, and an `attn_mask` that is causal or the same for all queries;
      both boolean, or of 0 and -inf. Other masks raise ValueError. Where values cannot be read (under `torch.compile`
      and `vmap`), an `attn_mask` requires `is_causal=True`, and any nonzero number in a `key_padding_mask` hides.
    - `need_weights=True` makes an approximate method form the n x m matrix that it is meant to avoid, and warns.
    - The matrix of `RandomFeatures` is a buffer, and a feature map that is an `nn.Module` is a submodule, so both are
      saved and moved with the module. Loading a checkpoint of torch's module, which has neither, draws the matrix from
      its seed and leaves the feature map unchanged.

    Args:
        embed_dim: Width w of the queries and of the output.
        num_heads: Number of heads h; divides `embed_dim`.
        dropout: Dropout on the weights; `Exact` only.
        bias: Add a bias to the projections.
        add_bias_kv: Add a learned key and value.
        add_zero_attn: Add a key and value of zeros.
        kdim: Width of the keys; `embed_dim` by default.
        vdim: Width of the values; `embed_dim` by default.
        batch_first: Inputs and output are (b, length, width) instead of (length, b, width). Keyword only.
        device: Of the parameters. Keyword only.
        dtype: Of the parameters. Keyword only.
        method: A method or its name, as for `attention`. Keyword only.

    Raises:
        ValueError: The method is unknown, or does not support `dropout`.

    Example:
        >>> layer = MultiheadAttention(16, 4, batch_first=True, method="taylor")
        >>> layer.load_state_dict(nn.MultiheadAttention(16, 4).state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 5, 16)
        >>> output, weights = layer(x, x, x, need_weights=False, is_causal=True)
        >>> output.shape, weights
        (torch.Size([2, 5, 16]), None)
    """

    # nn.TransformerEncoderLayer reads this flag: if it is True, eval mode does not call this module, but runs a fused
    # softmax on its parameters.
    _qkv_same_embed_dim = False

    # Parameters in torch's order, which optimizers depend on.
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
    method: Any
    random_matrix: Tensor | None
    key_shift: Tensor | None
    query_shift: Tensor | None
    balance: Tensor | None
    feature_scale: Tensor | None

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
        *,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        method: MethodLike = "exact",
    ) -> None:
        super().__init__()
        found = resolve(method)
        source = nn.MultiheadAttention(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self._take_over(source, dropout, found)
        warn_about(found, stacklevel=2)

    @classmethod
    def from_module(cls, source: nn.Module, dropout: float, method: Any) -> "MultiheadAttention":
        """Return a module that shares the parameters of another one; they are the same objects."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take_over(source, dropout, method)
        return module

    def _take_over(self, source: nn.Module, dropout: float, method: Any) -> None:
        if dropout > 0 and engine_of(method) != "exact":
            raise ValueError(
                f"dropout: {type(method).__name__} does not form the weights that dropout={dropout} would apply to; "
                'expected dropout=0, or method="exact"'
            )
        share_parameters(source, self)
        self.dropout = dropout
        bind_method(self, method, self.head_dim, self.num_heads, like=next(self.parameters()))

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this first: it cannot compile a choice of methods."""
        raise NotImplementedError(
            "subquad.MultiheadAttention: torch.jit.script is not supported; use torch.compile or torch.export"
        )

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
        """Compute attention; arguments and results are those of `torch.nn.MultiheadAttention`.

        Args:
            query: (b, n, w) with `batch_first`, else (n, b, w); without a batch (n, w).
            key: (b, m, kdim), (m, b, kdim) or (m, kdim).
            value: (b, m, vdim), (m, b, vdim) or (m, vdim).
            key_padding_mask: (b, m), or (m,) without a batch. True hides a key; numbers are added to the logits.
            need_weights: Also return the weights.
            attn_mask: (n, m) or (b * h, n, m). True hides a key from a query; numbers are added to the logits.
            average_attn_weights: Average the weights over the heads.
            is_causal: Query i sees keys 0..i.

        Returns:
            The output, in the shape of the query, and the weights (b, n, m), (b, h, n, m) without averaging, or None.

        Raises:
            ValueError: A shape does not fit, or the method does not support a mask.
        """
        _check_dimensions(query, key, value)
        unbatched = query.dim() == 2
        if unbatched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        b, n, m = *query.shape[:2], key.shape[1]
        check_shape("query", query, (b, n, self.embed_dim))
        check_shape("key", key, (b, m, self.kdim))
        check_shape("value", value, (b, m, self.vdim))
        check_mask("key_padding_mask", key_padding_mask, (b, m))
        check_mask("attn_mask", attn_mask, (n, m), (b * self.num_heads, n, m))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.reshape(b, self.num_heads, n, m)

        q, k, v = self._project(query, key, value)
        heads, weights = self._attend(
            q, k, v, key_padding_mask, attn_mask, need_weights=need_weights, is_causal=is_causal
        )
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if unbatched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Map (b, length, width) to (b, h, length, d) each; the module's own keys and values come first."""
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
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, *,
        need_weights: bool, is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the heads (b, h, n, d), and the weights (b, h, n, m) or None."""
        own = self.add_zero_attn + (self.bias_k is not None)  # Keys that no mask hides, before the m others.
        is_split = redirect() is not None  # The keys are those of one rank, so a matrix cannot describe their masks.
        if is_split and (need_weights or own):
            what = "need_weights=True" if need_weights else "add_bias_kv or add_zero_attn"
            raise ValueError(f"MultiheadAttention: {what} is not supported by subquad.distributed.sequence_parallel")
        exact = engine_of(self.method) == "exact" and not is_split
        keep = None
        if exact:
            lengths = (q.shape[2], k.shape[2] - own)
            mask, is_causal = as_bias(attn_mask, key_padding_mask, is_causal, need_weights, lengths, q)
        else:
            mask, is_causal = (None, is_causal) if attn_mask is None or is_causal else factored(attn_mask)
            keep = None if key_padding_mask is None else shown_keys("key_padding_mask", key_padding_mask)
        if own:
            mask = None if mask is None else F.pad(mask, (own, 0), value=0 if exact else 1)
            keep = None if keep is None else F.pad(keep, (own, 0), value=1)
        # Prepend `own` queries: then a causal call lets the first query see the module's own keys and one more.
        ahead = own if is_causal else 0
        q = F.pad(q, (0, 0, ahead, 0))

        dropout = self.dropout if self.training else 0.0
        if exact and need_weights:
            weights = F.dropout(softmax_weights(q, k, mask), dropout)
            return weights @ v, weights.roll(-own, -1)  # In torch the module's own keys come last.
        options = dict(attn_mask=mask, is_causal=is_causal, method=bound_method(self), key_padding_mask=keep)
        heads = quiet_attention(q, k, v, dropout_p=dropout, **options)
        if not need_weights:
            return heads[:, :, ahead:], None
        if not torch.compiler.is_compiling():
            warnings.warn(
                "need_weights=True forms the matrix of all pairs of queries and keys, which this method is meant to "
                "avoid; pass need_weights=False to keep the cost of the method.",
                stacklevel=5,
            )
        # One-hot values turn the output into the weights.
        one_hot = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
        weights = quiet_attention(q, k, one_hot, **options)
        return heads[:, :, ahead:], weights[:, :, ahead:].roll(-own, -1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A checkpoint of torch's module does not contain the method. One with only part of a feature map fails to load.
        fitted = fitted_by(self.method, state_dict, prefix)
        if fitted is not self.method:
            bind_method(self, fitted, self.head_dim, like=next(self.parameters()))
        for name in FITTED:
            if (own := getattr(self, name)) is not None:
                state_dict.setdefault(f"{prefix}{name}", own)
        if self.random_matrix is not None:
            matrix = random_matrix(self.method, self.head_dim, like=next(self.parameters()))
            state_dict.setdefault(f"{prefix}random_matrix", matrix)
        place = f"{prefix}method."
        if isinstance(self.method, nn.Module) and not any(name.startswith(place) for name in state_dict):
            state_dict.update(self.method.state_dict(prefix=place))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        method = "" if isinstance(self.method, nn.Module) else f", method={label_of(self.method)}"
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}{method}"


def _check_dimensions(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.is_nested:
        raise ValueError(
            "query: expected a regular tensor, got a nested one. If it comes from nn.TransformerEncoder, pass the "
            "whole encoder to replace_attention, or set the encoder's use_nested_tensor to False."
        )
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3):
        dims = (query.dim(), key.dim(), value.dim())
        raise ShapeError(f"query, key, value: expected 3 dimensions, or 2 without a batch, got {dims}")


def share_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the parameters, sizes and training mode of `source`; the parameters are the same objects."""
    for name in MultiheadAttention.__annotations__:
        if name not in OWN_ATTRIBUTES:
            setattr(target, name, getattr(source, name))
    target.train(source.training)
