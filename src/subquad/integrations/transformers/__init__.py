"""Models of Hugging Face's transformers with the attention of `subquad.attention`.

    a layer -> its key and value -> the cache -> attention(query, key, value, mask) -> the layer goes on

Such a layer looks up its attention by a name in its config, and so does the code that makes its mask. Four parts stand
under our name:

    attend       the attention function: finds the method of its layer, reads the mask, refuses what it cannot give
    Mask         what the mask function hands over: the rule itself, of which a linear method never makes a matrix
    StateLayer   a layer of a cache that keeps a State instead of keys, so for linear methods a fixed size
    use          puts a method into the layers of a model, and takes it out again

Axes: (batch, heads, length, width) as everywhere.
"""

try:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: F401  (of version 5)
except ImportError as error:
    raise ImportError(
        "subquad.integrations.transformers needs transformers 5 or later: pip install 'subquad[transformers]'"
    ) from error

from subquad.integrations.transformers._attend import attend, register
from subquad.integrations.transformers._cache import StateLayer, state_cache
from subquad.integrations.transformers._mask import Mask
from subquad.integrations.transformers._swap import Swap, Swapped, use

__all__ = ["Mask", "StateLayer", "Swap", "Swapped", "attend", "register", "state_cache", "use"]

register("exact")
