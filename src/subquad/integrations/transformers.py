"""Models of Hugging Face's transformers with the attention of `subquad.attention`.

    a layer -> its key and value -> the cache -> attention(query, key, value, mask) -> the layer goes on

Such a layer looks up its attention by a name in its config, and so does the code that makes its mask. Four parts stand
under our name:

    attend       the attention function: finds the method of its layer, reads the mask, refuses what it cannot give
    Mask         what the mask function hands over: the rule itself, of which a linear method never makes a matrix
    StateLayer   a layer of a cache that keeps a State instead of keys, so for linear methods a fixed size
    use          puts a method into the layers of a model, and takes it out again

A cache gives a layer the keys that it shall attend to; a StateLayer gives it the new ones alone, marked with itself,
by which `attend` finds the state that belongs before them.

Axes: (batch, heads, length, width) as everywhere; n queries, m keys, both of this call alone.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad._attention import attention
from subquad._auto import Auto
from subquad._features import Exact
from subquad._methods import Method, resolve
from subquad._state import State

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(
        "subquad.integrations.transformers needs transformers 5 or later: pip install 'subquad[transformers]'"
    ) from error

NAME = "subquad"
_methods: dict[str, Method] = {}  # by the name under which transformers knows them

# What a layer may ask for besides: of no method here, and of exact attention alone, which has a weight for each pair.
UNKNOWN = {
    "softcap": "a cap on the logits",
    "s_aux": "attention sinks",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of blocks of keys for each query",
    "cache": "a paged cache",
    "output_attentions": "the weights of attention, which are never formed",
}
PAIRWISE = {
    "position_bias": "a bias added to each logit",
    "sliding_window": "a window of keys that moves with the query",
    "dropout": "drawn for each weight in training",
}


def _refusal(argument: str, meaning: str) -> ValueError:
    way_out = 'method="exact", or use(..., layers=[...]) without this layer'
    way_out = 'attn_implementation="eager"' if argument in UNKNOWN else way_out
    return ValueError(f"{argument} is {meaning}, which this method cannot give. Use {way_out}.")


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
    _methods[name] = resolve(method)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, Mask)


# --- Which layer has which method -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """What `use` leaves in a layer."""

    method: Method
    place: str  # the name of the layer, for errors


def _layers_of(model: nn.Module) -> dict[str, Any]:
    """The layers that look up their attention by name, in the order of the model."""

    def looks_up(module: nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        is_layer = code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
        return is_layer and isinstance(getattr(module, "config", None), PreTrainedConfig)

    return {name: module for name, module in model.named_modules() if looks_up(module)}


def _method_of(layer: Any) -> Method | None:
    """None where the layer's attention is not ours."""
    default = _methods.get(layer.config._attn_implementation)
    choice: _Choice | None = getattr(layer, "subquad_choice", None)
    return default if default is None or choice is None else choice.method


def _keeps_state(method: Method | None) -> bool:
    """Exact attention is better off with the keys themselves, and Auto decides by them."""
    return method is not None and not isinstance(method, Exact | Auto)


# --- The mask ---------------------------------------------------------------------------------------------------------


class Mask:
    """Which keys a query may see, as the rule that transformers made and the padding; it makes a matrix when asked to.

    arguments: those of a mask function of transformers.
    """

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.key_length: int = arguments["kv_length"]

    @cached_property
    def matrix(self) -> Tensor | None:
        """(b, 1, n, m), True = attend; None where `is_causal` of the layer says all."""
        found: Tensor | None = sdpa_mask(**self.arguments)
        return found

    @cached_property
    def rule(self) -> tuple[bool, Tensor | None] | None:
        """Whether it is causal, and the segments of packed sequences; None if it is neither that nor the full rule."""
        rule = self.arguments["mask_function"]
        parts = (rule,)
        if getattr(rule, "__name__", None) == "and_mask":
            parts = inspect.getclosurevars(rule).nonlocals["mask_functions"]
        known = {causal_mask_function: True, bidirectional_mask_function: False}
        if parts[0] not in known or len(parts) > 2:
            return None
        if len(parts) == 1:
            return known[rule], None
        packed = inspect.getclosurevars(parts[1]).nonlocals.get("packed_sequence_mask")
        return None if packed is None else (known[parts[0]], packed)

    @cached_property
    def padding(self) -> Tensor | None:
        """(b, m), True = attend."""
        given, first = self.arguments.get("attention_mask"), self.arguments.get("kv_offset", 0)
        if given is None:
            return None
        missing = first + self.key_length - given.shape[-1]
        return F.pad(given, (0, max(0, missing)))[:, first : first + self.key_length]

    def contiguous(self) -> NoReturn:
        """Asked by `generate`, which for static caches makes masks ahead of the model."""
        raise ValueError('past_key_values: static caches are not supported; leave out cache_implementation="static"')

    @property
    def is_static(self) -> bool:
        """Whether the keys go on after the last query, as those of a cache that was made as long as it may become."""
        queries = self.arguments.get("q_offset", 0) + self.arguments["q_length"]
        return bool(self.key_length + self.arguments.get("kv_offset", 0) != queries)


@dataclass(frozen=True)
class _Seen:
    """A mask as a linear method takes it."""

    is_causal: bool
    keys: Tensor | None = None  # (b, 1 or heads, 1, m)
    segment_ids: Tensor | None = None  # (b, n)


def _read(mask: Mask | Tensor | None, is_causal: bool, m: int) -> _Seen:
    """The mask of the last m keys, taken apart."""
    if mask is None:
        return _Seen(is_causal)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return _read_matrix(mask, m)
    if not isinstance(mask, Mask):
        raise _refusal("attention_mask", f"a {type(mask).__name__} for another kind of attention")
    if mask.rule is None:
        raise _refusal("attention_mask", "a rule for each pair of query and key, such as a window or blocks")
    is_causal, segment_ids = mask.rule
    if is_causal and mask.is_static:
        raise _refusal("past_key_values", "a static cache, which hands over keys that are not there yet")
    keys = None if mask.padding is None else mask.padding[:, mask.key_length - m :]
    if keys is None or bool(keys.all()):
        return _Seen(is_causal, None, segment_ids)
    return _Seen(is_causal, keys[:, None, None], segment_ids)


def _read_matrix(mask: Tensor, m: int) -> _Seen:
    """A matrix (b, 1 or heads, n, ·) that somebody else made is causal, or hides keys, or both; or is refused."""
    shown = mask
    if mask.dtype != torch.bool:
        shown = mask == 0
        if not bool((shown | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            raise _refusal("attention_mask", "numbers added to the logits")
    shown = shown[..., shown.shape[-1] - m :]
    keys, n = shown.any(-2, keepdim=True), shown.shape[-2]
    if bool((shown == keys).all()):
        return _Seen(False, keys)
    if bool((shown == keys.expand_as(shown).tril(m - n)).all()):
        return _Seen(True, keys)
    raise _refusal("attention_mask", "a choice for each pair of query and key")


# --- The attention function -------------------------------------------------------------------------------------------


def attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls for a layer under our name: (b, heads, n, d) each -> (b, n, heads, d), and no weights."""
    method = _method_of(layer)
    assert method is not None  # or transformers would have called another function
    is_causal = getattr(layer, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = dict(scale=scaling, enable_gqa=query.shape[1] != key.shape[1], method=method)
    asked = {name: thing for name, thing in others.items() if thing is not None and thing is not False}
    try:
        for name, meaning in (UNKNOWN if isinstance(method, Exact) else UNKNOWN | PAIRWISE).items():
            if name in asked or (name == "dropout" and dropout):
                raise _refusal(name, meaning)
        if isinstance(method, Exact):
            bias = asked.get("position_bias")
            output = _exact(query, key, value, attention_mask, bias, is_causal, dropout_p=dropout, **options)
        else:
            output = _approximate(query, key, value, attention_mask, is_causal, **options)
    except ValueError as error:
        choice: _Choice | None = getattr(layer, "subquad_choice", None)
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
    seen = _read(mask, is_causal, m)
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


# --- The cache --------------------------------------------------------------------------------------------------------


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
                "changes its keys after it has stored them, and needs use_cache=False, or its attention is no longer "
                "that of subquad, and it needs a new cache."
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
    >>> swapped, cache = use(model, "taylor"), state_cache(model)
    >>> logits = [model(torch.tensor([[token]]), past_key_values=cache).logits for token in (1, 2, 3)]
    >>> cache.layers[0].state
    State(Taylor(degree=2, basis='symmetric', key_shift=None), length=3, bytes=608)
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=config))
    _hold_states(model, cache)
    return cache


def _hold_states(model: nn.Module, cache: Cache) -> None:
    """Layers of an empty cache that can hold states shall do so."""
    layers = [layer for layer in _layers_of(model).values() if getattr(layer, "layer_idx", None) is not None]
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
            if all(_keeps_state(_method_of(layer)) for layer in readers if layer.layer_idx == index):
                while len(part.layers) <= index:
                    part.layers.append(DynamicLayer())
                part.layers[index] = StateLayer()


# --- In and out of a model --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swap:
    """One attention layer of a model: its number and name, what it had, and what it has now; None if it was left."""

    number: int
    name: str
    before: str
    method: Method | None


@dataclass
class Swapped:
    """What `use` did. `print` shows it, `undo` takes it back; as a context manager it does so at the end."""

    layers: tuple[Swap, ...]
    _restore: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give the layers back what they had. Of several calls of `use`, undo the last one first."""
        while self._restore:
            self._restore.pop()()

    def __enter__(self) -> "Swapped":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        rows = [("layer", "name", "before", "now")]
        rows += [(str(x.number), x.name, x.before, str(x.method or "as before")) for x in self.layers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def use(model: PreTrainedModel, method: Method | str, layers: Iterable[int] | None = None) -> Swapped:
    """Give the attention layers of a model, in place, another method; parameters are not touched.

    layers: the numbers of the layers, in the order in which the report lists them; all if not given. The others keep
        what they had.
    A method with parameters of its own is not made a part of the model: hand them to the optimiser yourself.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> swapped = use(model, "taylor", layers=[1])
    >>> print(swapped)
    layer  name                      before  now
    0      model.layers.0.self_attn  sdpa    as before
    1      model.layers.1.self_attn  sdpa    Taylor(degree=2, basis='symmetric', key_shift=None)
    >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False, pad_token_id=0).shape
    torch.Size([1, 5])
    >>> swapped.undo()
    """
    method = resolve(method)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    found = _layers_of(model)
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no layer that looks up its attention by name")
    wanted = set(range(len(found)) if layers is None else layers)
    if outside := wanted - set(range(len(found))):
        raise ValueError(f"layers: expected numbers from 0 to {len(found) - 1}, got {sorted(outside)}")
    swaps = []
    for number, (name, layer) in enumerate(found.items()):
        before = str(_method_of(layer) or layer.config._attn_implementation)
        swaps.append(Swap(number, name, before, method if number in wanted else None))
    swapped = Swapped(tuple(swaps))

    def put(owner: Any, attribute: str, new: Any) -> None:
        missing, old = attribute not in vars(owner), vars(owner).get(attribute)
        swapped._restore.append(lambda: delattr(owner, attribute) if missing else setattr(owner, attribute, old))
        setattr(owner, attribute, new)

    chosen = [(swap, found[swap.name]) for swap in swaps if swap.method is not None]
    for swap, layer in chosen:
        place = f"{type(model).__name__}.{swap.name} (layer {swap.number})"
        put(layer, "subquad_choice", _Choice(method, place))
    if len(chosen) == len(found):
        for config in _configs_of(model):
            put(config, "_attn_implementation_internal", NAME)
    else:
        # Masks are made by the config that all layers share. It stays, for those that stay; we read their masks.
        for _, layer in chosen:
            put(layer, "config", copy.copy(layer.config))
            put(layer.config, "_attn_implementation_internal", NAME)
    swapped._restore.append(model.register_forward_pre_hook(_prepare, with_kwargs=True).remove)
    return swapped


def _configs_of(model: nn.Module) -> Iterator[PreTrainedConfig]:
    """Every config in a model once."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    return (config for config in configs.values() if isinstance(config, PreTrainedConfig))


def _prepare(model: Any, _: Any, arguments: dict[str, Any]) -> None:
    """Before each call of a model: an empty cache that comes in, such as that of `generate`, learns to hold states."""
    weights = arguments.get("output_attentions") or getattr(model.config, "output_attentions", False)
    if weights and any(_method_of(layer) for layer in _layers_of(model).values()):
        # Not all models tell their layers.
        meaning = UNKNOWN["output_attentions"]
        raise ValueError(f'{type(model).__name__}: output_attentions is {meaning}; use attn_implementation="eager"')
    cache = arguments.get("past_key_values")
    if isinstance(cache, Cache) and not cache.get_seq_length():
        _hold_states(model, cache)


register("exact")
