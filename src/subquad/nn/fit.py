"""Fit the methods of the attention modules inside a model, on inputs like those that it will get."""

from typing import Any

import torch
from torch import nn

from subquad.nn.binding import bind_method, bound_method
from subquad.nn.multihead import MultiheadAttention
from subquad.nn.recording import recorded
from subquad.planning.fit import Fit


def fit_attention(model: nn.Module, *inputs: Any, rows: int = 512, seed: int = 0, **named: Any) -> dict[str, Fit]:
    """Fit the method of every `subquad.MultiheadAttention` in a model, in place, head by head.

    Runs the model once on the inputs, with exact attention, and gives each module the method that `fit` finds for its
    queries and keys. What was fitted is saved in buffers: it is part of the state_dict, and a module with the same
    method restores it from there.

    Args:
        model: A model with `subquad.MultiheadAttention` inside, usually after `replace_attention`; or such a module.
        *inputs: Calibration inputs, passed to the model.
        rows, seed: As for `fit`.
        **named: The same by keyword.

    Returns:
        The result of `fit` for each module that was called, by its name.

    Raises:
        ValueError: No module has a method that can be fitted, or the model calls none of them.

    Example:
        >>> from subquad import replace_attention
        >>> layer = nn.TransformerEncoderLayer(16, 4, dropout=0, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, num_layers=2).eval()
        >>> report = replace_attention(model, "taylor")
        >>> fits = fit_attention(model, torch.randn(4, 64, 16))
        >>> list(fits)
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MultiheadAttention) and len(getattr(module.method, "coordinates", ()))
    }
    if not layers:
        raise ValueError(
            "model: expected a subquad.MultiheadAttention whose method is Taylor or RandomFeatures, found none; "
            "call replace_attention first"
        )
    with torch.no_grad(), recorded(layers) as calls:
        model(*inputs, **named)
    if not calls:
        raise ValueError("model: none of its attention modules was called with these inputs")
    fits = {name: calls[name].fit(bound_method(layers[name]), rows, seed) for name in layers if name in calls}
    for name, found in fits.items():
        layer = layers[name]
        bind_method(layer, found.method, layer.head_dim, like=next(layer.parameters()))
    return fits
