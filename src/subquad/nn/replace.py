"""Replace the attention inside a model.

    nn.MultiheadAttention  ->  subquad.MultiheadAttention with the same parameters and another method

A module that cannot be replaced without losing something is left unchanged, and the report says why.
"""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from subquad._engines import engine_of
from subquad.attention import MethodLike, resolve, warn_about
from subquad.nn.multihead import MultiheadAttention, share_parameters
from subquad.nn.report import Replacement, Replacements, check_layers, describe


def replace_attention(model: nn.Module, method: MethodLike, *, layers: Iterable[int] | None = None) -> Replacements:
    """Replace each `nn.MultiheadAttention` inside a model, in place, by `subquad.MultiheadAttention`.

    Parameters stay the same objects, so an optimizer keeps working. A module that is used in several places stays
    shared, and a feature map that is an `nn.Module` is shared by all layers, unless it makes one for each layer, as
    `Hedgehog()` does. Calling it again changes the method. The method also runs in eval mode: `nn.TransformerEncoder`
    no longer takes its fused path or creates nested tensors.

    Args:
        model: A model with `nn.MultiheadAttention` inside. For Hugging Face models, use
            `subquad.integrations.transformers.replace_attention`.
        method: A method or its name, as for `attention`.
        layers: Numbers of the layers to replace, in the order of the report; all by default.

    Returns:
        A report that prints as a table. Its `undo()` restores the original modules; used as a context manager, it does
        so on exit.

    Raises:
        ValueError: The model contains no `nn.MultiheadAttention` or is one itself, or `layers` or `method` is invalid.

    Example:
        >>> import torch
        >>> layer = nn.TransformerEncoderLayer(16, 4, dropout=0, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, num_layers=2)
        >>> report = replace_attention(model, "taylor", layers=[1])
        >>> print(report)
        layer  name                before                 now
        0      layers.0.self_attn  nn.MultiheadAttention  unchanged
        1      layers.1.self_attn  nn.MultiheadAttention  Taylor(2)
        >>> model.eval()(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
        >>> report.undo()
    """
    method = resolve(method)
    found = _attention_modules(model)
    selected = check_layers(layers, len(found))
    successors: dict[nn.Module, MultiheadAttention] = {}
    rows, without_dropout = [], []
    # All successors are made before any module is replaced, so that an error leaves the model unchanged.
    for number, (name, module) in enumerate(found.items()):
        note = _obstacle(module) if number in selected else ""
        is_replaced = number in selected and not note
        if is_replaced:
            dropout: Any = module.dropout
            if dropout > 0 and engine_of(method) != "exact":
                without_dropout.append(name)
                note, dropout = f"dropout={dropout} removed", 0.0
            successors[module] = MultiheadAttention.from_module(module, dropout, method)
        own = successors[module].method if is_replaced else None
        rows.append(Replacement(number, name, _before(module), own, note))
    report = Replacements(tuple(rows))
    _exchange(model, successors, report)
    warn_about(method, stacklevel=2)
    if without_dropout:
        names = ", ".join(without_dropout)
        warnings.warn(f"{describe(method)} does not support dropout on the weights: removed from {names}", stacklevel=2)
    return report


def _attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules of a model by name, torch's and ours, each once."""
    kinds = nn.MultiheadAttention | MultiheadAttention
    if isinstance(model, kinds):
        raise ValueError(
            "model: expected a model that contains attention, got the attention module itself, which cannot be "
            "replaced in place; create a subquad.MultiheadAttention and load the state_dict of this one"
        )
    found: dict[str, nn.Module] = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    if not found:
        text = (
            f"model: looked for torch.nn.MultiheadAttention and subquad.MultiheadAttention in {type(model).__name__}, "
            "found none; if the model calls torch.nn.functional.scaled_dot_product_attention, use "
            "`with subquad.sdpa(method):`"
        )
        if any(kind.__module__.partition(".")[0] == "transformers" for kind in type(model).__mro__):
            text += "; for Hugging Face models, use subquad.integrations.transformers.replace_attention"
        raise ValueError(text)
    return found


def _before(module: nn.Module) -> str:
    if isinstance(module, MultiheadAttention):
        return describe(module.method)
    return "nn.MultiheadAttention" if type(module) is nn.MultiheadAttention else type(module).__name__


def _obstacle(module: nn.Module) -> str:
    """Return why a module cannot be replaced without losing what it does beyond its class; "" if it can."""
    if type(module) not in (nn.MultiheadAttention, MultiheadAttention):
        return f"{type(module).__name__} is a subclass, which may do more than its base"
    if "forward" in vars(module):
        return "its forward was overridden"
    if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks")):
        return "it has hooks; remove them, replace the attention, and attach them again"
    return ""


def _exchange(model: nn.Module, successors: dict[nn.Module, MultiheadAttention], report: Replacements) -> None:
    """Put the successors in, wherever their modules are used, and record in the report how to undo it."""

    in_place = {name: successors[module] for name, module in model.named_modules() if module in successors}
    report._is_in_place = lambda name: model.get_submodule(name) is in_place[name]

    def restore(name: str, module: nn.Module) -> None:
        share_parameters(successors[module], module)
        model.set_submodule(name, module)

    def restore_flags(encoder: nn.TransformerEncoder, enabled: bool, used: bool) -> None:
        encoder.enable_nested_tensor, encoder.use_nested_tensor = enabled, used

    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in successors:
            model.set_submodule(name, successors[module])
            report._undo_steps.append(partial(restore, name, module))
    for encoder in [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]:
        if any(isinstance(module, MultiheadAttention) for module in encoder.modules()):
            flags = encoder.enable_nested_tensor, encoder.use_nested_tensor
            encoder.enable_nested_tensor = encoder.use_nested_tensor = False
            report._undo_steps.append(partial(restore_flags, encoder, *flags))
