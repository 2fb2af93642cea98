"""A cache whose layers hold a `State` instead of keys; its size is fixed for linear methods and for windows.

A cache returns the keys that a layer attends to. A StateLayer returns only the new keys, marked with a reference to
itself, by which the attention function finds the state that precedes them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from subquad._calls.state import State
from subquad._engines import engine_of
from subquad._engines.decoder import Decoder
from subquad.attention import quiet_attention
from subquad.integrations.transformers.layers import keeps_state, layers_of, method_of
from subquad.integrations.transformers.request import planned


class StateLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types of its own
    """A cache layer that holds the `State` of its method instead of the keys.

    It also serves cross-attention, where all queries read the state of the same keys.

    Attributes:
        state: The state after the keys so far; None before the first ones.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self._state: State | None = None
        self._decoder: Decoder | None = None  # takes the state over while tokens come one at a time
        self._length = 0
        self._options: tuple[Any, ...] = ()  # method, scale and grouping of the last call that was not a step
        self._unread = False  # whether `update` returned keys that the state does not contain yet

    @property
    def state(self) -> State | None:
        return self._state if self._decoder is None else self._decoder.state

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return only the new keys, marked, and the new values."""
        if self._unread:
            raise RuntimeError(
                "past_key_values: the last attention function that used this cache did not update its states. If the "
                "model changes its keys after storing them, pass use_cache=False. If its attention is no longer that "
                "of subquad, or the last call raised an error, pass a new cache."
            )
        self._unread = True
        return self._marked(key_states), value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Compute attention to all keys so far and the new ones, if any; arguments as for `attention`."""
        output: Tensor
        if not key.shape[-2]:
            output = quiet_attention(query, key, value, state=self._settled(), **options)
            return output
        if not self._unread:
            raise RuntimeError("past_key_values: two layers share one state; pass layers=[...] without the second one")
        if self._is_step(query, key, value, options):
            if self._decoder is None:
                assert self._state is not None
                _, scale, enable_gqa = self._options
                self._decoder = Decoder(self._state, scale=scale, enable_gqa=enable_gqa)
            output = self._decoder(query, key, value)
        else:
            output, self._state = quiet_attention(
                query, key, value, state=self._settled(), return_state=True, **options
            )
            self._options = (options["method"], options["scale"], options["enable_gqa"])
        self._length += key.shape[-2]
        self._unread = False
        # Models read these attributes in cross-attention after the first call: no key is new.
        keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key, value))
        self.keys = self._marked(keys)
        return output

    def _is_step(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        """Return whether this is one more token, computed like those before it and visible, without gradients."""
        if not query.shape[-2] == key.shape[-2] == 1 or torch.compiler.is_compiling():
            return False
        if (options["method"], options["scale"], options["enable_gqa"]) != self._options:
            return False
        before, sinks = (getattr(method, "sink_logits", None) for method in (self._options[0], options["method"]))
        if sinks is not before:  # They are not part of the comparison of methods.
            return False
        given = (query, key, value) if sinks is None else (query, key, value, sinks)
        is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        return not is_recorded and options["attn_mask"] is None and options["segment_ids"] is None

    def recent(self, window: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the state of a window holds, followed by new ones.

        Raises:
            ValueError: It is not the state of this window.
        """
        state = self._settled()
        if engine_of(window) != "sparse" or (state is not None and state.method != window):
            raise ValueError("past_key_values: expected a cache of keys, got states of another method")
        if state is None or state.keys is None or state.values is None:
            return key, value
        return torch.cat([state.keys, key], -2), torch.cat([state.values, value], -2)

    def _settled(self) -> State | None:
        """Return the state, taken back from the decoder."""
        if self._decoder is not None:
            self._state, self._decoder = self._decoder._settle(), None
        return self._state

    def _marked(self, keys: Tensor) -> Tensor:
        keys = keys.view_as(keys)  # A new tensor object, which can carry the attribute.
        keys.subquad_layer = self  # type: ignore[attr-defined]
        return keys

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first keys create the state."""

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: tokens cannot be removed from a sum, and a window has dropped those before them."""
        if tokens_to_remove and (state := self._settled()) is not None:
            other = 'attn_implementation="eager"' if engine_of(state.method) == "sparse" else 'method="exact"'
            raise ValueError(
                f"past_key_values.crop: tokens cannot be removed from a state of {type(state.method).__name__}; keep a "
                f"copy.deepcopy of the cache to roll back to, or use {other} for assisted or speculative decoding"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            self.batch_select_indices(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if (state := self._settled()) is not None and self.keys is not None and self.values is not None:
            self._state = state[indices]
            self.keys, self.values = self._marked(self.keys[indices]), self.values[indices]


def state_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache for `past_key_values=`, with states in the layers whose method has one, else with keys.

    It is meant for a generation loop of your own: after `replace_attention`, `generate` creates such a cache itself.

    Args:
        model: A transformers model whose layers have methods.

    Returns:
        A `DynamicCache`, or an `EncoderDecoderCache` of two.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10)).eval()
        >>> from subquad.integrations.transformers import replace_attention
        >>> report, cache = replace_attention(model, "taylor"), state_cache(model)
        >>> logits = [model(torch.tensor([[token]]), past_key_values=cache).logits for token in (1, 2, 3)]
        >>> cache.layers[0].state
        State(Taylor(2), length=3, bytes=608)
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=config))
    hold_states(model, cache)
    return cache


def hold_states(model: nn.Module, cache: Cache) -> None:
    """Replace the layers of an empty cache by StateLayers where all methods that read them have states."""
    layers = [layer for layer in layers_of(model).values() if getattr(layer, "layer_idx", None) is not None]
    if isinstance(cache, EncoderDecoderCache):
        parts = [(cache.self_attention_cache, True), (cache.cross_attention_cache, False)]
        chosen = [(part, [x for x in layers if getattr(x, "is_causal", True) == causal]) for part, causal in parts]
    else:
        chosen = [(cache, layers)]
    for part, readers in chosen:
        # A subclass may do more with its layers than this function knows.
        if type(part) is not DynamicCache or part.offloading:
            continue
        if any(getattr(layer.config, "num_kv_shared_layers", None) for layer in readers):
            continue  # Some layers read the keys of others, as in Gemma 3n.
        is_recording = any(getattr(layer, "record_past", False) for layer in part.layers)  # for assisted decoding
        for index in {layer.layer_idx for layer in readers}:
            # Encoder and decoder may use the same indices. Which of them reads a layer is unknown, so all must agree.
            methods = [planned(layer, method_of(layer))[0] for layer in readers if layer.layer_idx == index]
            if not all(keeps_state(method) for method in methods):
                continue
            if is_recording and any(engine_of(method) == "sparse" for method in methods):
                continue  # Tokens will be removed, which transformers' own layers support.
            while len(part.layers) <= index:
                part.layers.append(DynamicLayer())
            if type(part.layers[index]) in (DynamicLayer, DynamicSlidingWindowLayer, StateLayer):
                part.layers[index] = StateLayer()  # Other layers hold more than keys and values.
