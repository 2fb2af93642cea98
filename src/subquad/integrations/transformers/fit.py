"""Fit the methods of a Hugging Face model on a text, and restore them after `from_pretrained`.

The methods of the layers, plain numbers, are written to the config as `subquad_methods`, which `save_pretrained` saves.
"""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.attention import MethodLike
from subquad.integrations.transformers.layers import layers_of, method_of
from subquad.integrations.transformers.replace import FITTED, replace_attention, set_attribute
from subquad.methods import KINDS, AnyMethod, Method, label_of
from subquad.nn.recording import recorded
from subquad.nn.report import Replacements


def fit_attention(
    model: PreTrainedModel, method: MethodLike, *, layers: Iterable[int] | None = None, rows: int = 512, seed: int = 0,
    **inputs: Any,
) -> Replacements:  # fmt: skip
    """Give the attention layers of a model a method that is fitted to each of them, head by head, in place.

    Runs the model once on the inputs, with exact attention. `save_pretrained` saves what was fitted in the config, and
    `restore_attention` gives it to a model that was loaded from there.

    Args:
        model: A transformers model.
        method: `Taylor`, `RandomFeatures`, or the name of one.
        layers: As for `replace_attention`.
        rows, seed: As for `subquad.fit`.
        **inputs: Calibration inputs of the model, such as `input_ids` and `attention_mask`.

    Returns:
        The report of `replace_attention`, with the error of each layer before and after.

    Raises:
        ValueError: No layer gets a method that can be fitted, or the inputs do not reach one of them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        >>> report = fit_attention(model, "taylor", input_ids=torch.randint(9, (1, 64)))
        >>> report.replaced
        ('model.layers.0.self_attn', 'model.layers.1.self_attn')
        >>> report.undo()
    """
    if getattr(model.config, "use_cache", False):
        inputs = dict(use_cache=False) | inputs
    with replace_attention(model, method, layers=layers) as trial:
        found = layers_of(model)
        chosen = {row.name: row for row in trial.layers if getattr(row.method, "coordinates", ())}
        if not chosen:
            names = {label_of(cast(Method, row.method)) for row in trial.layers if row.method is not None}
            served = ", ".join(sorted(names))
            raise ValueError(
                "method: expected Taylor or RandomFeatures, which have something to fit, in at least one layer, got "
                f"{served}; replace_attention gives layers a method without a fit"
            )
        with torch.no_grad(), recorded({name: found[name] for name in chosen}) as calls:
            model(**inputs)
    missing = [name for name in chosen if name not in calls]
    if missing:
        raise ValueError(f"inputs: the model does not call {', '.join(missing)} with them; use layers=[...]")
    fits = {name: calls[name].fit(cast(Method, row.method), rows, seed) for name, row in chosen.items()}
    methods: dict[int, MethodLike] = {row.number: method for row in trial.layers if row.method is not None}
    report = replace_attention(model, methods | {chosen[name].number: each.method for name, each in fits.items()})
    notes = {name: f"error {each.before.relative:.2g} -> {each.after.relative:.2g}" for name, each in fits.items()}
    report.layers = tuple(replace(row, note=notes.get(row.name, row.note)) for row in report.layers)
    saved = {row.name: _as_json(method_of(found[row.name])) for row in report.layers if row.method is not None}
    set_attribute(report, model.config, FITTED, getattr(model.config, FITTED, {}) | saved)
    return report


def restore_attention(model: PreTrainedModel) -> Replacements:
    """Give a model that was saved after `fit_attention` its fitted methods again.

    Args:
        model: A model from `from_pretrained`.

    Raises:
        ValueError: Its config holds no fitted methods, or layers that the model does not have.
    """
    saved = getattr(model.config, FITTED, None)
    if not saved:
        raise ValueError("model: its config holds no fitted methods; call fit_attention, then save_pretrained")
    numbers = {name: number for number, name in enumerate(layers_of(model))}
    unknown = [name for name in saved if name not in numbers]
    if unknown:
        raise ValueError(f"model: its config has methods for layers that it does not have: {', '.join(unknown)}")
    report = replace_attention(model, {numbers[name]: _from_json(spec) for name, spec in saved.items()})
    set_attribute(report, model.config, FITTED, saved)
    return report


def _as_json(method: Any) -> dict[str, Any]:
    named = {field.name: getattr(method, field.name) for field in fields(method)}
    numbers = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in named.items()}
    return {"method": method.name} | {name: value for name, value in numbers.items() if value is not None}


def _from_json(spec: dict[str, Any]) -> AnyMethod:
    kind: Any = KINDS.get(spec.get("method", ""))
    if kind is None or not issubclass(kind, Method):
        raise ValueError(f"config: expected the name of a method in subquad_methods, got {spec.get('method')!r}")
    named = {name: value for name, value in spec.items() if name != "method"}
    if "matrix" in named:
        named["matrix"] = torch.tensor(named["matrix"], dtype=torch.float64)
    found: AnyMethod = kind(**named)
    return found
