"""transformers models with replaced attention: correct for every kind of model, mask and cache."""

import copy
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

import subquad
from reference import weights
from subquad import Exact, Linear, Multipole, RandomFeatures, Taylor

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed; pip install 'subquad[transformers]'", allow_module_level=True)

from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import sdpa_mask

from subquad.integrations.transformers import StateLayer, replace_attention, state_cache
from tiny_models import LENGTH, WORDS, inputs, padding, prompt, real, tiny

METHODS = {"taylor": Taylor(2), "random": RandomFeatures(32, seed=3), "elu": Linear("elu"),
           "multipole": Multipole(window=3, sinks=1, block=2, top=1)}  # fmt: skip
EVERY = {"exact": Exact(), **METHODS}
DECODERS = ["gpt2", "llama"]
SIDES = [None, "left", "right"]
PROMPTS = [*((name, side) for name in (*DECODERS, "bart") for side in SIDES), ("whisper", None)]  # It takes no mask.

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def logits(model, name, side=None, **options):
    return model(**inputs(name, side), **options).logits


# --- One call ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "bart", "whisper"])
def test_exact_attention_is_the_attention_of_the_model(name, side):
    model = tiny(name)
    own = logits(model, name, side)
    with replace_attention(model, "exact"):
        found = logits(model, name, side)
    model.set_attn_implementation("eager")
    eager = logits(model, name, side)
    assert (found - own).abs().max() < 1e-5
    # In a padded row, which sees no key, eager averages all values.
    assert (found - eager)[real(side)].abs().max() < 1e-5


def oracle(method):
    """Register an attention function for transformers that forms all weights, and return its name."""

    def attend(layer, query, key, value, mask, scaling=None, is_causal=None, **_):
        n, m = query.shape[2], key.shape[2]
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        if mask is None:
            mask = torch.ones(n, m, dtype=torch.bool).tril(m - n if layer.is_causal else m)
        all_weights = weights(method, query, key, scaling, mask) * mask
        total = all_weights.sum(-1, keepdim=True)
        return ((all_weights @ value) / total.where(total != 0, 1.0)).transpose(1, 2), None

    AttentionInterface.register("oracle", attend)
    AttentionMaskInterface.register("oracle", sdpa_mask)
    return "oracle"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "bart", "whisper"])
def test_a_linear_method_agrees_with_its_weight_matrix(name, side):
    model = tiny(name)
    own = logits(model, name, side)
    model.set_attn_implementation(oracle(Taylor(2)))
    expected = logits(model, name, side)
    with replace_attention(model, Taylor(2)):
        found = logits(model, name, side)
    assert (found - expected)[real(side)].abs().max() < 1e-4
    assert (found - own)[real(side)].abs().max() > 0.1  # Otherwise the comparison would be empty.


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_batch_of_different_lengths_is_its_rows_alone(name, side, method):
    model, given = tiny(name), inputs(name, side)
    if side == "left":  # Models need the positions of each row; `generate` passes them.
        given["position_ids"] = (padding(side).cumsum(-1) - 1).clamp(min=0)
    with replace_attention(model, EVERY[method]):
        together = model(**given).logits
        for row, tokens in enumerate(real(side)):
            alone = model(given["input_ids"][row][tokens][None]).logits
            assert (together[row][tokens] - alone[0]).abs().max() < 1e-4


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_do_not_see_each_other(name, method):
    model = tiny(name)
    first, second = torch.arange(3, 8), torch.arange(20, 24)
    positions = torch.cat([torch.arange(5), torch.arange(4)])
    with replace_attention(model, EVERY[method]):
        packed = model(torch.cat([first, second])[None], position_ids=positions[None], use_cache=False).logits[0]
        alone = torch.cat([model(part[None]).logits[0] for part in (first, second)])
    assert (packed - alone).abs().max() < 1e-4


@pytest.mark.parametrize("method", EVERY)
def test_a_mask_made_by_hand_is_read(method):
    """(b, 1, n, m), as booleans or as numbers to be added: causal with padding, and hidden keys alone."""
    model, given = tiny("llama"), inputs("llama", "left")
    keys = padding("left").bool()[:, None, None]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & keys
    with replace_attention(model, EVERY[method]):
        expected = model(**given).logits
        added = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
        for mask in (causal, added):
            found = model(given["input_ids"], attention_mask=mask).logits
            assert (found - expected)[real("left")].abs().max() < 1e-5
        full = model(given["input_ids"], attention_mask=keys.expand(-1, 1, LENGTH, -1)).logits
        assert (full - expected)[real("left")].abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", EVERY)
def test_half_precision_stays_and_is_close(dtype, method):
    model = tiny("llama")
    with replace_attention(model, EVERY[method]):
        wide = logits(model, "llama", "left")
        half = logits(model.to(dtype), "llama", "left")
        assert half.dtype == dtype
        difference = (half.float() - wide)[real("left")]
        assert difference.norm() < (0.02 if dtype == torch.float16 else 0.1) * wide[real("left")].norm()


# --- Generation -------------------------------------------------------------------------------------------------------

WAYS = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True, top_k=0),
    "beams": dict(do_sample=False, num_beams=3, num_return_sequences=2),
}


def generated(model, name, side=None, **options):
    torch.manual_seed(5)
    return model.generate(
        **prompt(name, side), max_new_tokens=8, min_new_tokens=8, return_dict_in_generate=True, output_logits=True,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize(("name", "side"), PROMPTS)
def test_generation_with_a_cache_is_generation_without(name, method, way, side, monkeypatch):
    states = []
    attend = StateLayer.attend
    monkeypatch.setattr(
        StateLayer, "attend", lambda *args, **options: states.append(args[0]) or attend(*args, **options)
    )
    model = tiny(name)
    with replace_attention(model, EVERY[method]):
        cached = generated(model, name, side, **WAYS[way])
        held = len(states)
        free = generated(model, name, side, use_cache=False, **WAYS[way])
    assert cached.sequences.tolist() == free.sequences.tolist()
    assert cached.sequences.shape[-1] >= 8
    for one, other in zip(cached.logits, free.logits, strict=True):
        assert (one - other).abs().max() < 1e-4
    layers = 4 if name in ("whisper", "bart") else 2  # of a decoder: with cross-attention twice as many
    assert held == (0 if method == "exact" else 8 * layers)
    assert len(states) == held


@pytest.mark.parametrize("way", WAYS)
def test_generation_with_a_bias_of_positions(way):
    model = tiny("t5")
    own = generated(model, "t5", "left", **WAYS[way])
    with replace_attention(model, "exact"):
        for use_cache in (True, False):
            found = generated(model, "t5", "left", use_cache=use_cache, **WAYS[way])
            assert found.sequences.tolist() == own.sequences.tolist()


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("name", DECODERS)
def test_generation_after_padding_on_the_left_is_generation_without_padding(name, method):
    model = tiny(name)
    with replace_attention(model, EVERY[method]):
        together = generated(model, name, "left", do_sample=False)
        for row, tokens in enumerate(real("left")):
            ids = prompt(name)["input_ids"][row][tokens][None]
            alone = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
            assert together.sequences[row, LENGTH:].tolist() == alone[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("method", [name for name in METHODS if name != "multipole"])  # which keeps its keys
def test_states_do_not_grow(method):
    model = tiny("llama")
    with replace_attention(model, METHODS[method]):
        sizes = []
        for length in (2, 30):
            cache = state_cache(model)
            model.generate(torch.tensor([[5, 6]]), past_key_values=cache, max_new_tokens=length, min_new_tokens=length)
            assert cache.get_seq_length() == length + 1  # The last token was not read.
            sizes.append([layer.state.nbytes for layer in cache.layers])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", ["states", "own", "empty"])
@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("name", DECODERS)
def test_a_sequence_in_pieces_is_the_whole(name, method, kind):
    """With a cache of states, with the cache that the model creates itself, and with an empty one passed in."""
    model, given = tiny(name), inputs(name, "left")
    positions = (padding("left").cumsum(-1) - 1).clamp(min=0)
    with replace_attention(model, EVERY[method]):
        whole = model(**given, position_ids=positions).logits
        cache = {"states": lambda: state_cache(model), "own": lambda: None, "empty": DynamicCache}[kind]()
        pieces = []
        for start, stop in ((0, 4), (4, 7), (7, 8), (8, 9)):
            output = model(
                given["input_ids"][:, start:stop], attention_mask=given["attention_mask"][:, :stop],
                position_ids=positions[:, start:stop], past_key_values=cache, use_cache=True,
            )  # fmt: skip
            cache = output.past_key_values
            pieces.append(output.logits)
    assert (torch.cat(pieces, 1) - whole)[real("left")].abs().max() < 1e-4
    assert [isinstance(layer, StateLayer) for layer in cache.layers] == [method != "exact"] * 2
    assert cache.get_seq_length() == LENGTH


def test_auto_decides_by_the_keys_so_far():
    model = tiny("llama")
    with replace_attention(model, subquad.Auto(max_error=0.5)):
        cached, free = (
            generated(model, "llama", "left", do_sample=False, use_cache=use_cache) for use_cache in (True, False)
        )
    assert cached.sequences.tolist() == free.sequences.tolist()
    assert not any(isinstance(layer, StateLayer) for layer in cached.past_key_values.layers)


# --- The cache --------------------------------------------------------------------------------------------------------


def started(name="llama", method="taylor"):
    """Return a model, and a cache that has read three rows."""
    model = tiny(name)
    replace_attention(model, METHODS[method])
    cache = state_cache(model)
    model(**inputs(name), past_key_values=cache)
    return model, cache


@pytest.mark.parametrize("name", ["llama", "bart"])
@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_of_a_cache_are_reordered_chosen_and_repeated(name, change):
    model, cache = started(name)
    index = dict(batch_repeat_interleave=2).get(change, torch.tensor([2, 0, 0]))
    rows = torch.tensor([0, 0, 1, 1, 2, 2]) if change == "batch_repeat_interleave" else index
    token = torch.full((3, 1), 7)
    step = lambda cache, rows: model(
        **(dict(input_ids=token[rows]) if name == "llama" else
           dict(encoder_outputs=(torch.zeros(len(rows), 1, 16),), decoder_input_ids=token[rows])),
        past_key_values=cache,
    ).logits  # fmt: skip
    expected = step(copy.deepcopy(cache), torch.arange(3))[rows]
    getattr(cache, change)(index)
    assert (step(cache, rows) - expected).abs().max() < 1e-4
    assert (expected[0] - expected[-1]).abs().max() > 0.1


def test_cross_attention_reads_its_keys_once():
    model, cache = started("bart")
    assert isinstance(cache, EncoderDecoderCache)
    before = [layer.state for layer in cache.cross_attention_cache.layers]
    model(decoder_input_ids=torch.full((3, 1), 7), encoder_outputs=(torch.randn(3, LENGTH, 16),), past_key_values=cache)
    assert [layer.state for layer in cache.cross_attention_cache.layers] == before
    assert {layer.state.length for layer in cache.cross_attention_cache.layers} == {LENGTH}
    assert {layer.state.length for layer in cache.self_attention_cache.layers} == {LENGTH + 1}


def test_a_reset_cache_starts_empty():
    model, cache = started()
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(model, "llama", past_key_values=cache), logits(model, "llama"))


def test_a_copied_cache_can_be_rolled_back_to():
    model, cache = started()
    copied = copy.deepcopy(cache)
    assert all(layer.keys.subquad_layer is layer for layer in copied.layers)
    for _ in range(2):
        model(torch.full((3, 1), 7), past_key_values=cache)
    assert (copied.get_seq_length(), cache.get_seq_length()) == (LENGTH, LENGTH + 2)
    assert model(torch.full((3, 1), WORDS - 1), past_key_values=copied).logits.isfinite().all()


def test_cropping_tokens_that_were_not_recorded_raises_by_name():
    model, cache = started()
    message = r"past_key_values\.crop: 1 tokens cannot be removed from a state of Taylor that recorded the last 0; call"
    with pytest.raises(ValueError, match=message):
        cache.crop(-1)
    cache.crop(0)
    assert not cache.is_croppable
    assert model.config.use_cache


def test_a_cache_whose_states_are_not_read_raises():
    model, cache = started()
    key = torch.zeros(3, 2, 1, 8)
    cache.layers[0].expect()
    cache.update(key, key, 0)
    with pytest.raises(RuntimeError, match="did not update its states"):
        model(torch.full((3, 1), 7), past_key_values=cache)


def test_a_cache_of_another_method_raises():
    model, cache = started()
    for method, message in (
        ("exact", "expected a cache of keys, got states"),
        (Taylor(4), "state: expected one made by"),
    ):
        with replace_attention(model, method), pytest.raises(ValueError, match=message):
            model(torch.full((3, 1), 7), past_key_values=copy.deepcopy(cache))


def test_two_layers_that_share_a_state_raise():
    model, cache = started()
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
    key = torch.zeros(3, 2, 1, 8)
    cache.layers[0].expect()
    marked, value = cache.update(key, key, 0)
    first, second = (layer.self_attn for layer in model.model.layers)
    attend = lambda layer: subquad.integrations.transformers.attend(layer, torch.zeros(3, 4, 1, 8), marked, value, None)
    attend(first)
    with pytest.raises(RuntimeError, match="two layers share one state"):
        attend(second)
