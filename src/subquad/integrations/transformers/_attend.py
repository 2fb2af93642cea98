"""What transformers calls for a layer under our name: finds the method, reads the mask, refuses what it cannot give.

Axes: b batch, n queries, m keys, both of this call alone.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from subquad._attention import attention
from subquad._features import Exact
from subquad._methods import Method, resolve
from subquad.integrations.transformers._cache import StateLayer
from subquad.integrations.transformers._layers import Choice, method_of, methods
from subquad.integrations.transformers._mask import Mask, read
from subquad.integrations.transformers._refusal import PAIRWISE, UNKNOWN, refusal

NAME = "subquad"


def register(method: Method | str, name: str = NAME) -> None:
    """Let `attn_implementation=name` mean this method, in `from_pretrained` and `set_attn_implementation`.

    "subquad" is registered on import, and means exact attention until told otherwise.

    >>> from subquad import Taylor
    >>> from transformers import BertConfig, BertModel
    >>> register(Taylor(2), "subquad_taylor")
    >>> config = BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    >>> config._attn_implementation = "subquad_taylor"  # what from_pretrained(..., attn_implementation=...) sets
    >>> BertModel(config).eval()(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 8])
    """
    if not name.startswith(NAME):  # Other names have meanings of their own in transformers.
        raise ValueError(f'name: expected one that begins with "{NAME}", got {name!r}')
    methods[name] = resolve(method)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, Mask)


def attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls for a layer under our name: (b, heads, n, d) each -> (b, n, heads, d), and no weights."""
    method = method_of(layer)
    assert method is not None  # or transformers would have called another function
    is_causal = getattr(layer, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = dict(scale=scaling, enable_gqa=query.shape[1] != key.shape[1], method=method)
    asked = {name: thing for name, thing in others.items() if thing is not None and thing is not False}
    try:
        for name, meaning in (UNKNOWN if isinstance(method, Exact) else UNKNOWN | PAIRWISE).items():
            if name in asked or (name == "dropout" and dropout):
                raise refusal(name, meaning)
        if isinstance(method, Exact):
            bias = asked.get("position_bias")
            output = _exact(query, key, value, attention_mask, bias, is_causal, dropout_p=dropout, **options)
        else:
            output = _approximate(query, key, value, attention_mask, is_causal, **options)
    except ValueError as error:
        choice: Choice | None = getattr(layer, "subquad_choice", None)
        place = f"{type(layer).__name__} {getattr(layer, 'layer_idx', '')}" if choice is None else choice.place
        raise ValueError(f"{place} by {type(method).__name__}: {error}") from error
    return output.transpose(1, 2).contiguous(), None


def _exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, is_causal: bool,
    **options: Any,
) -> Tensor:  # fmt: skip
    """As transformers does with torch's function, whatever the mask."""
    if hasattr(key, "subquad_layer"):
        raise ValueError("past_key_values: expected a cache of keys, got states that another method made")
    matrix = mask.matrix if isinstance(mask, Mask) else mask
    is_causal = is_causal and matrix is None and query.shape[-2] > 1
    if bias is not None:
        matrix, is_causal = _with_bias(bias, matrix, is_causal), False
    output: Tensor = attention(query, key, value, matrix, is_causal=is_causal, **options)
    return output


def _approximate(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, is_causal: bool, **options: Any
) -> Tensor:
    """After a state, if the keys come with one; or on all keys, where the cache holds those."""
    state_layer: StateLayer | None = getattr(key, "subquad_layer", None)
    n, m = query.shape[-2], key.shape[-2]
    seen = read(mask, is_causal, m)
    options |= dict(attn_mask=seen.keys, is_causal=seen.is_causal, segment_ids=seen.segment_ids)
    if state_layer is not None:
        return state_layer.attend(query, key, value, **options)
    # Queries stand at the end of their keys; what comes before them nobody asks.
    before = max(0, m - n) if seen.is_causal else 0
    output: Tensor = attention(F.pad(query, (0, 0, before, 0)), key, value, **options)
    return output[:, :, before:]


def _with_bias(bias: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """A bias (1, heads, n, m) that hides what the mask hides. A finite number: a blind row is an average, as theirs."""
    if is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
