"""A cache layer that holds a `State` instead of keys; its size is fixed for linear methods and for windows.

A cache returns the keys that a layer attends to. A StateLayer returns only those that its state does not contain yet,
marked with a reference to itself, by which the attention function finds the state that precedes them:

    state before, recorded tokens -> state -> keys that are not read yet

Tokens cannot be removed from a sum. A layer that records its tokens computes the state again without the removed ones.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from subquad._calls.state import State
from subquad._engines import engine_of
from subquad._engines.decoder import Decoder
from subquad.attention import quiet_attention

RECORDED_PROMPT = 256  # tokens of a prompt that stay removable: more than assisted decoding appends to it

Tokens = tuple[Tensor, Tensor, Tensor, dict[str, Any]]  # queries, keys, values, and the options of `attention`


class StateLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types of its own
    """A cache layer that holds the `State` of its method instead of the keys.

    It also serves cross-attention, where all queries read the state of the same keys.

    Args:
        keys: Keys that the cache contains already, (b, key heads, m, d); the next call reads them.
        values: The values of these keys.
        length: The number of tokens so far, more than m if a window has dropped some.
        kept_up_to: The length up to which the keys are kept as well: that of a window, which replaces the method in
            longer sequences, or infinity if tokens may be removed at any time.

    Attributes:
        state: The state after the keys so far; None before the first ones.
        record_past: Whether tokens are recorded until the next `crop`, which may remove them.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(
        self, keys: Tensor | None = None, values: Tensor | None = None, length: int = 0, kept_up_to: float = 0
    ) -> None:
        super().__init__()
        self._state: State | None = None
        self._decoder: Decoder | None = None  # takes the state over while tokens come one at a time
        self._length = length
        self._options: tuple[Any, ...] = ()  # method, scale and grouping of the last call that was not a step
        self._is_watched = self._is_expected = False  # whether `expect` is called before each update, and was
        self._unread = False  # whether `update` returned keys that the state does not contain yet
        is_whole = keys is None or keys.shape[-2] == length
        self._limit, self._kept_up_to, self.record_past = kept_up_to, kept_up_to if is_whole else 0, False
        self._before: State | None = None  # the state before the recorded tokens
        self._recorded: list[Tokens] = []
        # Models read these attributes in cross-attention after the first call.
        self.keys: Tensor | None = None if keys is None else self._marked(keys)
        self.values: Tensor | None = values

    @property
    def state(self) -> State | None:
        return self._state if self._decoder is None else self._decoder.state

    def expect(self) -> None:
        """Expect an update by a layer whose method reads states; from now on, others raise."""
        self._is_watched = self._is_expected = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the keys that were not read yet and the new ones, marked, and their values."""
        if self._unread:
            raise RuntimeError(
                "past_key_values: the last attention function that used this cache did not update its states. If the "
                "model changes its keys after storing them, pass use_cache=False. If its attention was changed "
                "since, or the last call raised an error, pass a new cache."
            )
        if self._is_watched and not self._is_expected and not torch.compiler.is_compiling():
            raise RuntimeError(
                "past_key_values: it holds states of a method, but the attention of this model was changed since; "
                "pass a new cache"
            )
        self._unread, self._is_expected = True, False
        if self._waiting and self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], -2)
            value_states = torch.cat([self.values, value_states], -2)
        return self._marked(key_states), value_states

    @property
    def _waiting(self) -> int:
        """The number of keys that the cache contained before it held a state."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def length_with(self, key: Tensor) -> int:
        """Return the number of tokens after the given keys, which `update` returned."""
        return self._length + key.shape[-2] - self._waiting

    @property
    def has_outgrown(self) -> bool:
        """Whether a sequence with a window has got it for good.

        Tokens that were removed do not change this if they came with the first ones: the window has served both, and
        the keys of the next layers contain its outputs.
        """
        return self._kept_up_to != self._limit

    # A graph that recorded it would be made again for each length of the state.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Compute attention to all keys so far and the new ones, if any; arguments as for `attention`."""
        output: Tensor
        if not key.shape[-2]:
            output = quiet_attention(query, key, value, state=self._settled(), **options)
            return output
        if not self._unread and not self._waiting:
            raise RuntimeError("past_key_values: two layers share one state; pass layers=[...] without the second one")
        n, m, length = query.shape[-2], key.shape[-2], self.length_with(key)
        tokens, outputs, is_first = (query, key, value, options), [], not self._options
        if n < m and n and options["is_causal"]:  # Keys that waited come before the queries.
            first, tokens = cut(tokens, m - n)
            self._advance(*first)
        elif self._kept_up_to and self._options and options["method"] != self._options[0]:
            inside = self._kept_up_to - self._length
            if self.record_past and 0 < inside < n:
                # Tokens that may be removed: each gets the method that it would get in a call of its own.
                first, tokens = cut(tokens, int(inside))
                outputs.append(self._advance(*first[:3], first[3] | dict(method=self._options[0])))
            self._read_again(self._recorded, options["method"])
        elif self.record_past and is_first and options["is_causal"] and n > RECORDED_PROMPT and not self._kept_up_to:
            first, tokens = cut(tokens, n - RECORDED_PROMPT)
            outputs.append(self._advance(*first))
            self._forget_tokens()
        outputs.append(self._advance(*tokens))
        self._length, self._unread = length, False
        if length > self._kept_up_to > 0 and (is_first or not self.record_past):
            self._kept_up_to = 0
            if not self.record_past:
                self._forget_tokens()
        keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key, value))
        self.keys = self._marked(keys)  # No key waits.
        return torch.cat(outputs, -2) if len(outputs) > 1 else outputs[0]

    def _advance(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Continue from the state, and record the tokens if they may be removed."""
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
        if self.record_past or self._kept_up_to:
            self._recorded.append((query.new_empty(*query.shape[:2], 0, query.shape[3]), key, value, options))
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

    # --- Tokens that are recorded ---

    def activate_past_recording(self) -> None:
        """Record the tokens of the next calls, so that `crop` can remove them; called by transformers."""
        if not self.record_past and not self._kept_up_to:
            self._forget_tokens()
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, given as a negative number, as in transformers; the others are final.

        Raises:
            ValueError: The number is positive, or the tokens are more than were recorded since the last call.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: expected a negative number, got {tokens_to_remove}; pass {-tokens_to_remove} to "
                "remove that number of tokens"
            )
        count, recorded = -tokens_to_remove, sum(key.shape[-2] for _, key, _, _ in self._recorded)
        if count > recorded and self._length:
            raise ValueError(
                f"past_key_values.crop: {count} tokens cannot be removed from a state of "
                f"{type(self._options[0]).__name__} that recorded the last {recorded}; call "
                "past_key_values.activate_past_recording() before the tokens that may be removed, or keep a "
                "copy.deepcopy of the cache to roll back to"
            )
        if not self._length:
            return
        if count:
            self._length -= count
            kept, left = [], recorded - count
            for tokens in self._recorded:
                kept += [cut(tokens, left)[0]] if left > 0 else []
                left -= tokens[1].shape[-2]
            self._read_again(kept, kept[-1][3]["method"] if kept else None)
        if self._length > self._kept_up_to:
            self._kept_up_to = 0
            self._forget_tokens()

    def _read_again(self, recorded: list[Tokens], method: Any) -> None:
        """Compute the state again from these tokens, with one method; each remembers the one with which it came."""
        self._state, self._decoder, self._recorded = self._before, None, []
        for query, key, value, options in recorded:
            self._advance(query, key, value, options | dict(method=method))
        self._recorded = recorded

    def _forget_tokens(self) -> None:
        """Make the recorded tokens final."""
        self._before, self._recorded = self._settled(), []

    # --- What a cache asks its layers ---

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first keys create the state."""

    def reset(self) -> None:
        recording = self.record_past
        self.__init__(kept_up_to=self._limit)  # type: ignore[misc]
        self.record_past = recording

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            self.batch_select_indices(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.keys is None or self.values is None:
            return
        self.keys, self.values = self._marked(self.keys[indices]), self.values[indices]
        state = self._settled()
        self._state, self._before = (x if x is None else x[indices] for x in (state, self._before))
        self._recorded = [_rows(tokens, indices) for tokens in self._recorded]


def cut(tokens: Tokens, count: int) -> tuple[Tokens, Tokens]:
    """Return the first keys with their queries, and the other ones; the last queries are those of the last keys."""
    query, key, value, options = tokens
    first = max(0, query.shape[-2] - key.shape[-2] + count)
    masks = {name: options[name] for name in ("attn_mask", "segment_ids") if options[name] is not None}
    before = {name: mask[..., :count] for name, mask in masks.items()}
    after = {name: mask[..., count:] for name, mask in masks.items()}
    return (
        (query[:, :, :first], key[:, :, :count], value[:, :, :count], options | before),
        (query[:, :, first:], key[:, :, count:], value[:, :, count:], options | after),
    )


def _rows(tokens: Tokens, indices: Tensor) -> Tokens:
    """Return the chosen rows of the batch."""
    query, key, value, options = tokens
    masks = {name: options[name] for name in ("attn_mask", "segment_ids") if options[name] is not None}
    options = options | {name: mask if len(mask) == 1 else mask[indices] for name, mask in masks.items()}
    return query[indices], key[indices], value[indices], options
