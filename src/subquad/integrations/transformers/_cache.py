"""A cache whose layers keep a `State` instead of keys, so for linear methods a fixed size.

A cache gives a layer the keys that it shall attend to. A StateLayer gives it the new ones alone, marked with itself, by
which the attention function finds the state that belongs before them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache

from subquad._attention import attention
from subquad._state import State
from subquad.integrations.transformers._layers import keeps_state, layers_of, method_of


class StateLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types of its own
    """One layer of a cache that keeps what its method remembers, a `State`, and not the keys.

    Also for cross-attention: its queries come again and again to keys that were seen once, and read the state.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self._unread = False  # whether keys were handed over that never came to the state

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values alone, marked."""
        if self._unread:
            raise RuntimeError(
                "past_key_values: the attention that read this cache last did not know of its states. Either the model "
                "changes its keys after it has stored them, and needs use_cache=False; or its attention is no longer "
                "that of subquad, or the last call was refused, and it needs a new cache."
            )
        self._unread = True
        return self._marked(key_states), value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention to all keys so far and the new ones, if any."""
        output: Tensor
        if not key.shape[-2]:
            output = attention(query, key, value, state=self.state, **options)
            return output
        if not self._unread:
            raise RuntimeError("past_key_values: two layers share one state; use layers=[...] without the second")
        output, self.state = attention(query, key, value, state=self.state, return_state=True, **options)
        self._unread = False
        # Models read these where the keys were seen before: none is new.
        keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key, value))
        self.keys = self._marked(keys)
        return output

    def _marked(self, keys: Tensor) -> Tensor:
        keys = keys.view_as(keys)  # A tensor of our own to write on.
        keys.subquad_layer = self  # type: ignore[attr-defined]
        return keys

    def get_seq_length(self) -> int:
        return 0 if self.state is None else self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first keys make the state."""

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a sum does not tell what was added last."""
        if tokens_to_remove and self.state is not None:
            method = type(self.state.method).__name__
            raise ValueError(
                f"past_key_values.crop: a state of {method} cannot forget tokens; keep a copy.deepcopy of the cache to "
                'go back to, or use method="exact" for ways of generating that try tokens and drop them'
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            self.batch_select_indices(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None and self.keys is not None and self.values is not None:
            self.state = self.state[indices]
            self.keys, self.values = self._marked(self.keys[indices]), self.values[indices]


def state_cache(model: PreTrainedModel) -> Cache:
    """An empty cache for `past_key_values=`: states where the methods of the model have them, keys in the other layers.

    `generate` makes its own for a model that `use` was called on, so this is for those who write the loop themselves.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10)).eval()
    >>> from subquad.integrations.transformers import use
    >>> swapped, cache = use(model, "taylor"), state_cache(model)
    >>> logits = [model(torch.tensor([[token]]), past_key_values=cache).logits for token in (1, 2, 3)]
    >>> cache.layers[0].state
    State(Taylor(degree=2, basis='symmetric', key_shift=None), length=3, bytes=608)
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=config))
    hold_states(model, cache)
    return cache


def hold_states(model: nn.Module, cache: Cache) -> None:
    """Layers of an empty cache that can hold states shall do so."""
    layers = [layer for layer in layers_of(model).values() if getattr(layer, "layer_idx", None) is not None]
    if isinstance(cache, EncoderDecoderCache):
        parts = [(cache.self_attention_cache, True), (cache.cross_attention_cache, False)]
        chosen = [(part, [x for x in layers if getattr(x, "is_causal", True) == causal]) for part, causal in parts]
    else:
        chosen = [(cache, layers)]
    for part, readers in chosen:
        # A subclass may know more of its layers than we do.
        if type(part) is not DynamicCache or part.offloading:
            continue
        for index in {layer.layer_idx for layer in readers}:
            # Encoder and decoder may count alike; who reads which is not known, so all of them have to agree.
            if all(keeps_state(method_of(layer)) for layer in readers if layer.layer_idx == index):
                while len(part.layers) <= index:
                    part.layers.append(DynamicLayer())
                part.layers[index] = StateLayer()
