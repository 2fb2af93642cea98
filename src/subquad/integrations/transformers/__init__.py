"""Hugging Face transformers models with the methods of `subquad.attention`.

    layer -> key and value -> cache -> attention(query, key, value, mask) -> layer

A layer of a transformers model looks up its attention function by a name in its config, and so does the code that
creates its mask. This package registers its own name, with these parts:

    attend              the attention function: finds the method of the layer, reads its requests and the mask
    Mask                the mask: the rule itself, so that linear methods and windows never form a matrix
    StateLayer          a cache layer that holds a State instead of keys; of fixed size for linear methods and windows
    layout_of           which arguments `subquad.distributed.sequence_parallel` splits, and how the loss is summed
    replace_attention   gives the layers of a model another method, and can undo it
    fit_attention       the same with a method that is fitted to each layer on a text; restore_attention loads it again

Axes: (batch, heads, length, width).
"""

try:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: F401  (of version 5)
except ImportError as error:
    raise ImportError(
        "subquad.integrations.transformers needs transformers 5 or later: pip install 'transformers>=5'"
    ) from error

from subquad.distributed.layouts import kinds
from subquad.integrations.transformers.attend import attend, register
from subquad.integrations.transformers.cache import state_cache
from subquad.integrations.transformers.fit import fit_attention, restore_attention
from subquad.integrations.transformers.mask import Mask
from subquad.integrations.transformers.replace import replace_attention
from subquad.integrations.transformers.split import layout_of
from subquad.integrations.transformers.state_layer import StateLayer

__all__ = [
    "Mask", "StateLayer", "attend", "fit_attention", "register", "replace_attention", "restore_attention",
    "state_cache",
]  # fmt: skip

register("exact")
kinds.append(layout_of)
