"""Exchange the attention inside a model that already has one.

    nn.MultiheadAttention  ->  subquad.MultiheadAttention, with the same parameters and another method

What cannot be exchanged without losing something is left alone and named.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from subquad._features import Exact
from subquad._methods import Method, resolve
from subquad._modules import MultiheadAttention


@dataclass(frozen=True)
class Replacements:
    """What `replace_attention` did, by name: the modules replaced, those skipped and why, and the dropout of
    attention weights that was set to 0 because the method has no place for it.

    >>> print(Replacements(("a", "b"), {"c": "it has hooks"}, {"a": 0.1}))
    replaced 2: a, b
    skipped c: it has hooks
    removed dropout=0.1 of a
    """

    replaced: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    dropout_removed: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        names = ", ".join(self.replaced)
        lines = [f"replaced {len(self.replaced)}: {names}" if names else "replaced none"]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped.items()]
        lines += [f"removed dropout={dropout} of {name}" for name, dropout in self.dropout_removed.items()]
        return "\n".join(lines)


def replace_attention(model: nn.Module, method: Method | str) -> Replacements:
    """Exchange every `nn.MultiheadAttention` inside `model`, in place, for ours with this method.

    Parameters stay the same objects, so optimisers go on; a module used in several places stays one, and a
    map that is an `nn.Module` becomes one for all. A second call changes the method. In eval mode too the
    method is what runs: torch's encoders take no fused path any more and make no nested tensors.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(16, 4, dropout=0, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, num_layers=2)
    >>> print(replace_attention(model, "taylor"))
    replaced 2: layers.0.self_attn, layers.1.self_attn
    >>> model.eval()(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """
    method = resolve(method)
    if isinstance(model, nn.MultiheadAttention | MultiheadAttention):
        raise ValueError(
            "model: expected a model with attention inside, got the attention itself, which cannot be "
            "exchanged in place; make a subquad.MultiheadAttention and load the state_dict of this one"
        )
    skipped: dict[str, str] = {}
    dropout_removed: dict[str, float] = {}
    successors: dict[nn.Module, MultiheadAttention] = {}
    names = []
    for name, module in model.named_modules():  # First make all, then exchange all: an error changes nothing.
        if not isinstance(module, nn.MultiheadAttention | MultiheadAttention):
            continue
        if reason := _why_not(module):
            skipped[name] = reason
            continue
        names.append(name)
        if module.dropout > 0 and not isinstance(method, Exact):
            dropout_removed[name] = module.dropout
        successors[module] = successor = MultiheadAttention.__new__(MultiheadAttention)
        nn.Module.__init__(successor)
        successor.take_over(module, 0.0 if name in dropout_removed else module.dropout, method)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in successors:
            model.set_submodule(name, successors[module])
    for encoder in (module for module in model.modules() if isinstance(module, nn.TransformerEncoder)):
        if any(isinstance(module, MultiheadAttention) for module in encoder.modules()):
            encoder.enable_nested_tensor = encoder.use_nested_tensor = False
    if dropout_removed:
        kind, places = type(method).__name__, ", ".join(dropout_removed)
        warnings.warn(f"{kind} has no place for dropout of weights: set to 0 in {places}", stacklevel=2)
    return Replacements(tuple(names), skipped, dropout_removed)


def _why_not(module: nn.Module) -> str | None:
    """Why a module cannot be exchanged: what it does besides its class would be lost without a word."""
    if type(module) not in (nn.MultiheadAttention, MultiheadAttention):
        return f"{type(module).__name__} is a subclass, which may do more than its base"
    if "forward" in vars(module):
        return "its forward was overridden"
    if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks")):
        return "it has hooks; remove them, replace, and attach them again"
    return None
