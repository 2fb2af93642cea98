"""Caches of transformers models: whoever creates them, they hold states, and no token reads old keys again."""

import copy
from importlib.metadata import PackageNotFoundError, version
from math import inf

import pytest
import torch

import subquad
from subquad import Linear, Multipole, Taylor

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed; pip install 'subquad[transformers]'", allow_module_level=True)

import transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.masking_utils import create_masks_for_generate

from subquad.integrations.transformers import Mask, StateLayer, register, replace_attention, state_cache
from subquad.integrations.transformers.state_layer import RECORDED_PROMPT
from tiny_models import LENGTH, LONG, WINDOW, WORDS, inputs, long_inputs, padding, prompt, real, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS = {"taylor": Taylor(2), "elu": Linear("elu"), "multipole": Multipole(window=3, sinks=1, block=2, top=1)}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def lengths(monkeypatch):
    """The number of keys in each call that advances a state."""
    found = []
    advance = StateLayer._advance
    monkeypatch.setattr(
        StateLayer, "_advance", lambda self, *tokens: found.append(tokens[1].shape[-2]) or advance(self, *tokens)
    )
    return found


def named(method, tmp_path, name="llama", **changes):
    """Return a model whose method was selected by a name alone."""
    register(method, "subquad_caches")
    tiny(name, **changes).save_pretrained(tmp_path)
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(tmp_path, attn_implementation="subquad_caches").eval()


# --- The user's own loop ----------------------------------------------------------------------------------------------


def loop(call, ids, cache=None, tokens=4):
    """Return the logits of the last token of each call, in the commonest loop there is."""
    output = call(ids, past_key_values=cache, use_cache=True)
    found = [output.logits[:, -1]]
    for token in range(5, 5 + tokens):
        output = call(torch.full((len(ids), 1), token), past_key_values=output.past_key_values)
        found.append(output.logits[:, -1])
    return torch.stack(found, 1), output.past_key_values


def whole(model, ids, tokens=4):
    ids = torch.cat([ids, torch.arange(5, 5 + tokens).expand(len(ids), -1)], 1)
    return model(ids, use_cache=False).logits[:, -tokens - 1 :]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_each_token_of_a_loop_reads_one_key(name, method, lengths):
    model, ids = tiny(name), inputs("llama")["input_ids"]
    with replace_attention(model, METHODS[method]) as report:
        found, cache = loop(model, ids)
        assert lengths == [LENGTH] * len(report.layers) + [1] * (4 * len(report.layers))
        assert all(isinstance(layer, StateLayer) for layer in cache.layers)
        assert (found - whole(model, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("call", ["positional", "submodule", "embeddings"])
def test_ways_to_call_a_model(call, lengths):
    """The cache is found at the layers, however it came there."""
    model, ids = tiny("llama"), inputs("llama")["input_ids"]
    replace_attention(model, "taylor")
    step = {
        "positional": lambda ids, cache: model(ids, None, None, cache),
        "submodule": lambda ids, cache: model.model(ids, past_key_values=cache),
        "embeddings": lambda ids, cache: model(inputs_embeds=model.model.embed_tokens(ids), past_key_values=cache),
    }[call]
    cache = step(ids, None).past_key_values
    step(torch.full((3, 1), 7), cache)
    assert lengths == [LENGTH] * 2 + [1] * 2
    assert cache.get_seq_length() == LENGTH + 1


@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_a_name_reads_its_keys_once(method, lengths, tmp_path):
    model, ids = named(METHODS[method], tmp_path), inputs("llama")["input_ids"]
    found, cache = loop(model, ids)
    assert lengths == [LENGTH, 1] * 2 + [1] * 6  # The second call reads the keys of the first.
    assert (found - whole(model, ids)).abs().max() < 1e-4
    assert all(isinstance(layer, StateLayer) for layer in cache.layers)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_a_cache_that_holds_keys_is_read_once(name, side, method, lengths):
    """Made before the swap: its keys are not those of the method, so the comparison is with attention to all keys."""
    model, given = tiny(name), inputs("llama", side)
    before = model(**given, use_cache=True).past_key_values
    ones = torch.ones(3, 2, dtype=torch.long)
    step = lambda cache, count: model(
        torch.full((3, 1), 7), attention_mask=torch.cat([given["attention_mask"], ones[:, :count]], 1),
        past_key_values=cache,
    ).logits  # fmt: skip
    with replace_attention(model, METHODS[method]) as report:
        caches = [copy.deepcopy(before) for _ in range(2)]
        found = [step(caches[0], count) for count in (1, 2)]
        keys = min(LENGTH, WINDOW - 1) if name == "gemma3" else LENGTH
        kinds = [keys, LENGTH, keys][: len(report.layers)]
        assert lengths == [length for kind in kinds for length in (kind, 1)] + [1] * len(report.layers)
        with torch.enable_grad():  # In training mode the cache keeps its keys.
            model.train()
            expected = [step(caches[1], count) for count in (1, 2)]
        assert not any(isinstance(layer, StateLayer) for layer in caches[1].layers)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-4
    assert caches[0].get_seq_length() == LENGTH + 2


def test_cross_attention_that_holds_keys_is_read_once(lengths):
    model, given = tiny("bart"), inputs("bart", "left")
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    model(**given, past_key_values=cache)
    step = lambda cache: model(
        decoder_input_ids=torch.full((3, 1), 7), encoder_outputs=(torch.zeros(3, LENGTH, 16),),
        attention_mask=given["attention_mask"], past_key_values=cache,
    ).logits  # fmt: skip
    with replace_attention(model, "taylor"):
        copied = copy.deepcopy(cache)
        found = torch.cat([step(cache), step(cache)], 1)
        assert lengths == [LENGTH, 1, LENGTH] * 2 + [1] * 2
        with torch.enable_grad():
            model.train()
            expected = torch.cat([step(copied), step(copied)], 1)
    assert (found - expected).abs().max() < 1e-4


def test_rows_of_a_cache_that_waits_are_reordered():
    model, given = tiny("llama"), inputs("llama")
    cache = model(**given, use_cache=True).past_key_values
    with replace_attention(model, "taylor"):
        layers = [StateLayer(layer.keys, layer.values, LENGTH, inf) for layer in cache.layers]
        waiting = DynamicCache()
        waiting.layers = layers
        rows = torch.tensor([2, 0, 0])
        expected = model(torch.full((3, 1), 7), past_key_values=cache).logits[rows]
        waiting.reorder_cache(rows)
        assert (model(torch.full((3, 1), 7), past_key_values=waiting).logits - expected).abs().max() < 1e-5
        again = model(torch.full((3, 1), 8), past_key_values=copy.deepcopy(waiting)).logits
        waiting.reorder_cache(torch.tensor([1, 1, 0]))
        waiting.activate_past_recording()
        model(torch.full((3, 1), 9), past_key_values=waiting)
        waiting.crop(-1)
        found = model(torch.full((3, 1), 8), past_key_values=waiting).logits
        assert (found - again[[1, 1, 0]]).abs().max() < 1e-5


@torch.enable_grad()
def test_training_keeps_keys_and_gradient_checkpointing_none():
    model = tiny("llama").train()
    with replace_attention(model, "taylor"):
        output = model(**inputs("llama"))
        assert not any(isinstance(layer, StateLayer) for layer in output.past_key_values.layers)
        model.gradient_checkpointing_enable()
        assert model(**inputs("llama")).past_key_values is None


@torch.enable_grad()
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gradients_with_states_are_those_without_a_cache(name, method):
    """In eval mode, where the cache that the model creates holds states."""
    model, gradients = tiny(name), []
    with replace_attention(model, METHODS[method]):
        for use_cache in (True, False):
            model.zero_grad()
            model(**inputs("llama", "left"), use_cache=use_cache).logits[real("left")].sin().sum().backward()
            gradients.append({key: value.grad.clone() for key, value in model.named_parameters()})
    for key, value in gradients[0].items():
        assert (gradients[1][key] - value).norm() <= 1e-4 * value.norm() + 1e-6, key


# --- Tokens that are removed ------------------------------------------------------------------------------------------

PROMPT = torch.tensor([[5, 6, 7, 8, 9] * 5])


def assisted(name):
    if name == "prompt lookup":
        return dict(prompt_lookup_num_tokens=3)
    return dict(assistant_model=tiny("llama", seed=1))


@pytest.mark.parametrize("way", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_assisted_decoding_is_greedy_decoding(name, method, way, monkeypatch):
    cropped = []
    crop = StateLayer.crop
    monkeypatch.setattr(StateLayer, "crop", lambda *args: cropped.append(args[1]) or crop(*args))
    model, given = tiny(name), dict(max_new_tokens=24, min_new_tokens=24, do_sample=False)
    replace_attention(model, METHODS[method])
    options = assisted(way)
    if way == "assistant":
        replace_attention(options["assistant_model"], METHODS[method])
    assert model.generate(PROMPT, **options, **given).tolist() == model.generate(PROMPT, **given).tolist()
    assert min(cropped) < 0


@pytest.mark.parametrize("way", ["prompt lookup", "assistant"])
def test_assisted_decoding_of_a_model_with_a_name(way, tmp_path):
    model, given = named(Taylor(2), tmp_path), dict(max_new_tokens=24, min_new_tokens=24, do_sample=False)
    options = assisted(way)
    if way == "assistant":
        options["assistant_model"].set_attn_implementation("subquad_caches")
    for _ in range(2):  # The first call is the one that finds no hooks.
        assert model.generate(PROMPT, **options, **given).tolist() == model.generate(PROMPT, **given).tolist()


def test_a_long_prompt_is_not_read_twice(lengths):
    model, ids = tiny("llama"), torch.randint(3, WORDS, (1, RECORDED_PROMPT + 40))
    with replace_attention(model, "taylor"):
        cache = state_cache(model)
        cache.activate_past_recording()
        found = model(ids, past_key_values=cache).logits
        assert (found - model(ids, use_cache=False).logits).abs().max() < 1e-4
        cache.crop(-3)
        assert lengths == [40, RECORDED_PROMPT] * 2 + [RECORDED_PROMPT - 3] * 2
        assert cache.get_seq_length() == ids.shape[1] - 3
        again = model(ids[:, -3:], past_key_values=cache).logits
        assert (again - found[:, -3:]).abs().max() < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", METHODS)
def test_recorded_tokens_can_be_removed(method, side):
    """From several calls, with padding, by one call of `crop` or several."""
    model, given = tiny("llama"), inputs("llama", side)
    positions = (padding(side).cumsum(-1) - 1).clamp(min=0)
    with replace_attention(model, METHODS[method]):
        expected = model(**given, position_ids=positions).logits
        cache = state_cache(model)
        cache.activate_past_recording()

        def read(start, stop):
            return model(
                given["input_ids"][:, start:stop], attention_mask=given["attention_mask"][:, :stop],
                position_ids=positions[:, start:stop], past_key_values=cache,
            ).logits  # fmt: skip

        for start, stop in ((0, 3), (3, 7), (7, 8), (8, 9)):
            read(start, stop)
        cache.crop(-5)
        assert cache.get_seq_length() == 4
        read(4, 9)
        cache.crop(-4)
        cache.crop(0)
        found = read(5, 9)
        assert (found - expected[:, 5:])[real(side)[:, 5:]].abs().max() < 1e-4
        with pytest.raises(ValueError, match=r"crop: 5 tokens .* recorded the last 4; call .*activate_past_recording"):
            cache.crop(-5)


# --- Static caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", *METHODS])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mistral"])
def test_static_generation_is_dynamic_generation(name, method):
    model, given = tiny(name), dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    with replace_attention(model, METHODS.get(method, method)):
        for side in (None, "left"):
            ids = prompt("llama", side) if name in ("llama", "gpt2") else long_inputs(side)
            expected = model.generate(**ids, **given)
            cache = StaticCache(config=model.config, max_cache_len=40)
            for option in (dict(cache_implementation="static"), dict(past_key_values=cache)):
                if name == "gemma3" and method == "exact":  # Windows have states, the other layers keys.
                    with pytest.raises(ValueError, match="a static cache holds keys, but some layers"):
                        model.generate(**ids, **given, **option)
                else:
                    assert model.generate(**ids, **given, **option).tolist() == expected.tolist()


def test_a_mask_that_is_made_before_the_call_is_not_made_again():
    """Versions of transformers differ: `generate` passes what the mask function returned, or its matrix."""
    model, ids = tiny("llama"), inputs("llama", "left")
    with replace_attention(model, "exact"):
        first, second = (StaticCache(config=model.config, max_cache_len=20) for _ in range(2))
        embeddings = torch.empty(*ids["input_ids"].shape, 0)
        mask = create_masks_for_generate(model.config, embeddings, ids["attention_mask"], past_key_values=first)
        assert isinstance(mask, Mask)
        found = model(ids["input_ids"], attention_mask=mask, past_key_values=first).logits
        assert found.equal(model(**ids, past_key_values=second).logits)


def test_a_static_cache_is_refused_where_layers_differ(tmp_path):
    model, given = tiny("llama"), dict(max_new_tokens=3, do_sample=False, cache_implementation="static")
    for layers in ([0], [1]):
        with replace_attention(model, "taylor", layers=layers):
            with pytest.raises(ValueError, match=r"past_key_values: a static cache holds keys, but some layers"):
                model.generate(**prompt("llama", "left"), **given)
            cache = StaticCache(config=model.config, max_cache_len=20)
            with pytest.raises(
                ValueError,
                match=r"past_key_values: a static cache holds keys, but Taylor keeps a state; use a DynamicCache",
            ):
                model(**inputs("llama"), past_key_values=cache)
    model = named(Taylor(2), tmp_path)
    with pytest.raises(ValueError, match="static caches are not supported by Taylor when it is selected by name; call"):
        model.generate(**prompt("llama"), **given)
    cache = StaticCache(config=model.config, max_cache_len=20)
    with pytest.raises(ValueError, match=r"past_key_values \(a static cache"):
        model(**inputs("llama"), past_key_values=cache)


# --- Windows longer than the sequence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, [0, 2]])
@pytest.mark.parametrize("method", METHODS)
def test_a_window_longer_than_the_sequence_is_no_window(method, layers):
    model, free = (tiny("mistral", sliding_window=size) for size in (LONG + 4, None))
    ids, given = long_inputs("left"), dict(max_new_tokens=4, min_new_tokens=4, do_sample=False)
    with replace_attention(model, METHODS[method], layers=layers) as report, replace_attention(
        free, METHODS[method], layers=layers
    ):  # fmt: skip
        row = report.layers[0]
        assert row.method.label == f"Window({LONG + 4})"
        assert row.note == f"exact, because of its sliding window; {METHODS[method].label} up to {LONG + 4} tokens"
        assert (model(**ids).logits - free(**ids).logits)[real("left", LONG)].abs().max() < 1e-5
        found = model.generate(**ids, **given, return_dict_in_generate=True)
        assert found.sequences.tolist() == free.generate(**ids, **given).tolist()
        assert found.past_key_values.layers[0].state.method == METHODS[method]


@pytest.mark.parametrize("pieces", [(LONG,), (4, LONG), (WINDOW, WINDOW + 1, LONG), (WINDOW, WINDOW + 3, LONG)])
@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_outgrows_its_window_gets_it(method, pieces):
    """From then on the window reads the keys, which the cache kept."""
    model, ids = tiny("mistral", num_hidden_layers=1), long_inputs()["input_ids"]
    expected = model(ids).logits
    with replace_attention(model, METHODS[method]):
        cache, start = None, 0
        for stop in pieces:
            output = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            cache, first, start = output.past_key_values, start, stop
            if stop > WINDOW:
                assert (output.logits - expected[:, first:stop]).abs().max() < 1e-5
        assert cache.layers[0].state.method.label == f"Window({WINDOW})"
        assert cache.layers[0]._recorded == []
    assert cache.get_seq_length() == LONG


@pytest.fixture
def crossings(monkeypatch):
    """The lengths before and after each `crop` from outside a window of 32 keys to its inside."""
    found = []
    crop = StateLayer.crop

    def recorded(self, count):
        before = self._length
        crop(self, count)
        found.extend([(before, self._length)] if before > 32 >= self._length else [])

    monkeypatch.setattr(StateLayer, "crop", recorded)
    return found


@pytest.mark.parametrize("length", [20, 30])
@pytest.mark.parametrize("method", METHODS)
def test_assisted_decoding_may_cross_the_window(method, length, crossings):
    """Proposals begin inside the window and end outside, and some are removed.

    The first call contains the first proposals. If it ends outside, the window serves the prompt too.
    """
    ids, given = PROMPT.repeat(1, 2)[:, :length], dict(max_new_tokens=24, min_new_tokens=24, do_sample=False)
    for seed in range(4):
        model, model_of_window = (tiny("mistral", seed=seed, sliding_window=32) for _ in range(2))
        replace_attention(model, METHODS[method])
        expected = (model if length < 28 else model_of_window).generate(ids, **given)
        assert model.generate(ids, **given, prompt_lookup_num_tokens=5).tolist() == expected.tolist()
    assert crossings


@pytest.mark.parametrize("method", METHODS)
def test_tokens_outside_a_window_can_be_removed(method):
    """The state is that of the method again, unless the window read the first tokens."""
    model, ids = tiny("mistral", num_hidden_layers=1), long_inputs()["input_ids"]
    first = ids[:, WINDOW - 3 : WINDOW - 1]
    window = model(ids).logits
    with replace_attention(model, METHODS[method]):
        short = model(ids[:, : WINDOW - 1]).logits
        for pieces, expected in (((WINDOW - 3, LONG), short), ((LONG,), window)):
            cache, start = state_cache(model), 0
            cache.activate_past_recording()
            for stop in pieces:
                model(ids[:, start:stop], past_key_values=cache)
                start = stop
            cache.crop(WINDOW - 3 - LONG)
            found = model(first, past_key_values=cache).logits
            assert (found - expected[:, WINDOW - 3 : WINDOW - 1]).abs().max() < 1e-5
            found = model(ids[:, WINDOW - 1 :], past_key_values=cache).logits
            assert (found - window[:, WINDOW - 1 :])[:, 1:].abs().max() < 1e-5
            assert (
                found[:, 0] - (window if expected is window else model(ids[:, :WINDOW]).logits)[:, WINDOW - 1]
            ).abs().max() < 1e-5
            cache.crop(0)
            assert cache.layers[0].state.method.label == f"Window({WINDOW})"
            assert cache.layers[0]._recorded == []


def test_a_reset_cache_may_outgrow_its_window_again():
    model, ids = tiny("mistral"), long_inputs()["input_ids"]
    with replace_attention(model, "taylor"):
        cache, found = state_cache(model), []
        for _ in range(2):
            found.append([model(part, past_key_values=cache).logits for part in ids.tensor_split([4], 1)])
            cache.reset()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_queries_of_cross_attention_are_not_cut():
    """Many queries of few keys, in a cache that records: all of them see all keys."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 8) for n in (RECORDED_PROMPT + 40, 60, 60))
    layer = StateLayer()
    layer.activate_past_recording()
    options = dict(method=Taylor(2), is_causal=False, scale=None, enable_gqa=False)
    marked, values = layer.update(key, value)
    found = layer.attend(query, marked, values, attn_mask=None, segment_ids=None, **options)
    assert torch.equal(found, subquad.attention(query, key, value, method=Taylor(2)))


def test_recorded_tokens_do_not_keep_their_queries():
    model = tiny("llama")
    with replace_attention(model, "taylor"):
        cache = state_cache(model)
        cache.activate_past_recording()
        model(**inputs("llama"), past_key_values=cache)
    assert [tokens[0].untyped_storage().nbytes() for tokens in cache.layers[0]._recorded] == [0]


def test_a_length_is_not_a_number_of_tokens_to_remove():
    """As in transformers' own layers."""
    model = tiny("llama")
    caches = [model(**inputs("llama")).past_key_values]
    with replace_attention(model, "taylor"):
        caches.append(state_cache(model))
        caches[1].activate_past_recording()
        model(**inputs("llama"), past_key_values=caches[1])
    for cache in caches:
        with pytest.raises(ValueError, match="negative"):
            cache.crop(8)


@pytest.mark.parametrize("way", ["undo", "sdpa", "named"])
def test_states_are_not_ignored_by_another_attention(way, tmp_path):
    model = named(Taylor(2), tmp_path) if way == "named" else tiny("llama")
    report = None if way == "named" else replace_attention(model, "taylor")
    cache, token = state_cache(model), torch.full((3, 1), 7)
    model(**inputs("llama"), past_key_values=cache)
    model(token, past_key_values=cache)
    model(token, past_key_values=copy.deepcopy(cache))
    if way == "undo":
        report.undo()
    else:
        model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="attention of this model was changed since; pass a new cache"):
        model(token, past_key_values=cache)
