"""Sliding windows, logit soft-capping and learned sinks in transformers models: exact, whatever the method.

Mistral and Phi-3 have a window in all layers, Qwen 2 and Gemma 3 in some. Gemma 2 adds soft-capping, gpt-oss sinks.
"""

import copy
from importlib.metadata import PackageNotFoundError, version
from itertools import product

import pytest
import torch
from torch import nn

from subquad import Multipole, Taylor
from subquad.methods.window import Window

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed; pip install 'subquad[transformers]'", allow_module_level=True)

import transformers
from transformers import DynamicCache

from subquad.integrations.transformers import StateLayer, register, replace_attention, state_cache
from tiny_models import KINDS, LONG, SLIDING, WINDOW, long_inputs, padding, real, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
DECODERS = ["mistral", "phi3", "qwen2", "gemma2", "gemma3", "gpt_oss"]
NAMES = [*DECODERS, "modernbert"]
WITHOUT_SDPA = ["gemma2", "gpt_oss"]
SIDES = [None, "left", "right"]
METHODS = {"exact": "exact", "multipole": Multipole(window=64)}  # whose window contains all keys, so it is exact


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def eager(name, **changes):
    model = tiny(name, **changes)
    model.set_attn_implementation("eager")
    return model


def logits(model, side=None, **options):
    return model(**long_inputs(side), **options).logits


def largest(difference, side=None):
    return difference[real(side, LONG)].abs().max()


# --- One call ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_eager_attention(name, side, method):
    model = eager(name)
    own = logits(model, side)
    with replace_attention(model, METHODS[method]):
        assert largest(logits(model, side) - own, side) < 1e-5


CHANGES = [
    *((name, dict(sliding_window=size)) for name in DECODERS for size in (WINDOW - 1, WINDOW + 1)),
    *(("modernbert", dict(local_attention=size)) for size in (WINDOW - 2, WINDOW + 2)),
    ("gemma2", dict(attn_logit_softcapping=2.5)),
    ("gemma2", dict(attn_logit_softcapping=None)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=str)
def test_the_comparison_would_notice_another_window_or_cap(name, change):
    """Each change moves eager attention by far more than the tolerance."""
    assert largest(logits(eager(name, **change)) - logits(eager(name))) > 0.1


def test_the_comparison_would_notice_other_sinks():
    model = eager("gpt_oss")
    own = logits(model)
    for layer in model.model.layers:
        layer.self_attn.sinks += 0.5
    assert largest(logits(model) - own) > 0.1


@pytest.mark.parametrize("layers", [[0], [1], [1, 2]])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
def test_selected_layers_read_the_masks_of_the_others(name, side, implementation, layers):
    """Masks are then matrices, or None."""
    model = eager(name)
    own = logits(model, side)
    model.set_attn_implementation("eager" if name in WITHOUT_SDPA else implementation)
    for method in METHODS.values():
        with replace_attention(model, method, layers=layers):
            assert largest(logits(model, side) - own, side) < 1e-5


@pytest.mark.parametrize("size", [LONG - 1, LONG, LONG + 1, 100])
@pytest.mark.parametrize("method", METHODS)
def test_a_window_may_be_longer_than_the_sequence(method, size):
    model = eager("mistral", sliding_window=size)
    own = logits(model, "left")
    with replace_attention(model, METHODS[method]):
        assert largest(logits(model, "left") - own, "left") < 1e-5
    if size >= LONG:
        assert largest(logits(eager("mistral", sliding_window=None), "left") - own, "left") < 1e-6


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_do_not_see_each_other(name):
    model = eager(name)
    lengths = (LONG - 11, 11)
    given = dict(input_ids=long_inputs()["input_ids"], position_ids=torch.cat([torch.arange(n) for n in lengths])[None])
    own = model(**given, use_cache=False).logits
    assert (own - model(given["input_ids"]).logits).abs().max() > 0.1
    for method in METHODS.values():
        with replace_attention(model, method):
            assert (model(**given, use_cache=False).logits - own).abs().max() < 1e-5


def test_the_mask_decides_not_the_size_that_the_layer_names():
    """transformers uses a matrix that a caller passes as it is."""
    model, ids = eager("mistral"), long_inputs()["input_ids"]
    causal = torch.ones(LONG, LONG, dtype=torch.bool).tril()[None, None]
    added = lambda mask: torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    for mask in (causal, causal.triu(1 - WINDOW), causal.triu(-2)):
        own = model(ids, attention_mask=added(mask)).logits
        with replace_attention(model, "exact"):
            assert (model(ids, attention_mask=mask).logits - own).abs().max() < 1e-5
        with replace_attention(model, METHODS["multipole"]):
            if mask is not causal and mask[0, 0, -1].sum() != WINDOW:
                with pytest.raises(ValueError, match=r"attention_mask \(a choice for each pair of query and key\)"):
                    model(ids, attention_mask=mask)
            else:
                assert (model(ids, attention_mask=mask).logits - own).abs().max() < 1e-5


def test_layers_without_a_window_have_the_method():
    model = eager("gemma3")
    own = logits(model)
    with replace_attention(model, Taylor(2)):
        every = logits(model)
    with replace_attention(model, Taylor(2), layers=[1]):
        assert (logits(model) - every).abs().max() < 1e-5
    assert (every - own).abs().max() > 0.1


# --- The report -------------------------------------------------------------------------------------------------------


def test_the_report_says_which_layer_has_what():
    report = replace_attention(tiny("gemma2"), "multipole", layers=[0, 1])
    assert str(report).splitlines() == [
        "layer  name                      before  now                      note",
        "0      model.layers.0.self_attn  eager   Window(8, softcap=2)     "
        "exact, because of its sliding window and logit soft-capping",
        "1      model.layers.1.self_attn  eager   Window(None, softcap=2)  exact, because of logit soft-capping",
        "2      model.layers.2.self_attn  eager   unchanged",
    ]
    assert report.skipped == {}


@pytest.mark.parametrize(
    ("name", "method", "expected"),
    [
        ("mistral", "exact", ["Window(8)"] * 3),
        ("phi3", "taylor", ["Window(8)"] * 3),
        ("qwen2", "taylor", ["Window(8)", "Taylor(2)", "Window(8)"]),
        ("gemma3", "exact", ["Window(8)", "Exact()", "Window(8)"]),
        ("gpt_oss", "exact", ["Window(8, sink_logits)", "Window(None, sink_logits)", "Window(8, sink_logits)"]),
        # A Window that the user chose keeps its size in full layers.
        ("gpt_oss", Window(4), ["Window(8, sink_logits)", "Window(4, sink_logits)", "Window(8, sink_logits)"]),
        ("exaone4", "taylor", ["Window(8)", "Taylor(2)", "Window(8)"]),  # All its layers have the attribute.
        ("modernbert", "taylor", ["Window(5)", "Taylor(2)", "Window(5)"]),  # 4 tokens on either side, and the own
    ],
)
def test_layers_are_served_by_window_or_by_the_method(name, method, expected):
    model = tiny(name)
    with replace_attention(model, method) as report:
        assert [layer.method.label for layer in report.layers] == expected
        with replace_attention(model, "exact") as second:
            assert [layer.before for layer in second.layers] == expected


def test_a_layer_that_does_not_pass_its_cap_has_none():
    """Gemma 3 stores the option of Gemma 2 and does not use it."""
    model = eager("gemma3", attn_logit_softcapping=2.0)
    own = logits(model)
    with replace_attention(model, "exact") as report:
        assert [layer.method.label for layer in report.layers] == ["Window(8)", "Exact()", "Window(8)"]
        assert (logits(model) - own).abs().max() < 1e-5


# --- Generation -------------------------------------------------------------------------------------------------------

WAYS = {"greedy": dict(do_sample=False), "beams": dict(do_sample=False, num_beams=3, num_return_sequences=2)}


def generated(model, side=None, tokens=20, **options):
    return model.generate(
        **long_inputs(side), max_new_tokens=tokens, min_new_tokens=tokens, return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_that_of_eager_attention(name, side, way):
    model = eager(name)
    own = generated(model, side, **WAYS[way])
    for method, layers in product(METHODS.values(), [None, [0], [1, 2]] if way == "greedy" else [None, [1, 2]]):
        with replace_attention(model, method, layers=layers) as report:
            found = generated(model, side, **WAYS[way])
        assert found.sequences.tolist() == own.sequences.tolist()
        for one, other in zip(found.logits, own.logits, strict=True):
            assert (one - other).abs().max() < 1e-5
        for cached, layer in zip(found.past_key_values.layers, report.layers, strict=True):
            keeps = layer.method is not None and layer.method.label != "Exact()"
            assert isinstance(cached, StateLayer) == keeps
            if keeps:
                assert cached.state.method == layer.method


def test_generation_without_a_cache_is_the_same():
    model = eager("gpt_oss")
    own = generated(model, "left", do_sample=False)
    with replace_attention(model, "taylor"):
        found = generated(model, "left", do_sample=False, use_cache=False)
    assert found.sequences.tolist() == own.sequences.tolist()


def test_states_of_windows_do_not_grow():
    model = eager("mistral")
    with replace_attention(model, "exact"):
        sizes = []
        for length in (100, 400):
            cache = state_cache(model)
            model.generate(torch.tensor([[5, 6]]), past_key_values=cache, max_new_tokens=length, min_new_tokens=length)
            assert cache.get_seq_length() == length + 1
            sizes.append([layer.state.keys.shape[-2] for layer in cache.layers])
    assert max(sizes[0] + sizes[1]) < 100


PIECES = ((0, 4), (4, 16), (16, 17), (17, 18), (18, LONG))


@pytest.mark.parametrize("kind", ["states", "own", "empty"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_sequence_in_pieces_is_the_whole(name, method, kind):
    """With a cache of states, with the cache that the model creates itself, and with an empty one passed in."""
    model, given = eager(name), long_inputs("left")
    positions = (padding("left", LONG).cumsum(-1) - 1).clamp(min=0)
    whole = model(**given, position_ids=positions).logits
    with replace_attention(model, METHODS[method]):
        cache = {"states": lambda: state_cache(model), "own": lambda: None, "empty": DynamicCache}[kind]()
        pieces = []
        for start, stop in PIECES:
            output = model(
                given["input_ids"][:, start:stop], attention_mask=given["attention_mask"][:, :stop],
                position_ids=positions[:, start:stop], past_key_values=cache, use_cache=True,
            )  # fmt: skip
            cache = output.past_key_values
            pieces.append(output.logits)
    assert largest(torch.cat(pieces, 1) - whole, "left") < 1e-5
    assert cache.get_seq_length() == LONG
    assert isinstance(cache.layers[0], StateLayer)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_assisted_decoding_can_remove_tokens(name, monkeypatch):
    """Caches that will be cropped keep their keys."""
    cropped = []
    crop = DynamicCache.crop
    monkeypatch.setattr(DynamicCache, "crop", lambda *args: cropped.append(args[1]) or crop(*args))
    model = eager(name)
    prompt = torch.tensor([[5, 6, 7, 8, 9] * 5])
    given = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False)
    own = model.generate(prompt, **given)
    with replace_attention(model, "exact"):
        found = model.generate(prompt, prompt_lookup_num_tokens=3, **given)
    assert found.tolist() == own.tolist()
    assert min(cropped) < 0


def test_a_name_selects_windows_too(tmp_path):
    model = eager("gpt_oss")
    model.save_pretrained(tmp_path)
    own = generated(model, "left", do_sample=False)
    register(METHODS["multipole"], "subquad_multipole")
    for name in ("subquad", "subquad_multipole"):
        named = transformers.GptOssForCausalLM.from_pretrained(tmp_path, attn_implementation=name).eval()
        assert largest(logits(named, "left") - logits(model, "left"), "left") < 1e-5
        assert isinstance(state_cache(named).layers[0], StateLayer)
        for cache in (None, state_cache(named)):
            found = generated(named, "left", do_sample=False, past_key_values=cache)
            assert found.sequences.tolist() == own.sequences.tolist()


def test_layers_may_share_keys():
    """In Gemma 3n some layers read the keys of others from the cache."""
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        layer_types=KINDS, num_kv_shared_layers=1, vocab_size_per_layer_input=40, hidden_size_per_layer_input=8,
        altup_num_inputs=2, activation_sparsity_pattern=None, laurel_rank=4, **SLIDING,
    )  # fmt: skip
    model = enlarged(transformers.Gemma3nForCausalLM(config))
    model.set_attn_implementation("eager")
    own = generated(model, "left", do_sample=False)
    for method in METHODS.values():
        with replace_attention(model, method):
            assert generated(model, "left", do_sample=False).sequences.tolist() == own.sequences.tolist()


def enlarged(model):
    """Return the model with parameters as in `tiny`."""
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.normal_(std=1.2 / (1 if isinstance(part, nn.Embedding) else parameter.shape[-1]) ** 0.5)
    return model.eval()


def test_sinks_that_change_between_tokens_are_read_again():
    model, token = eager("gpt_oss"), torch.full((3, 1), 7)

    def steps():
        cache = state_cache(model)
        model(**long_inputs(), past_key_values=cache)
        before = [layer.self_attn.sinks for layer in model.model.layers]
        found = []
        for change in (0.0, 1.0, -1.0):
            for layer, sinks in zip(model.model.layers, before, strict=True):
                layer.self_attn.sinks = nn.Parameter(sinks + change)
            found.append(model(token, past_key_values=cache).logits)
        for layer, sinks in zip(model.model.layers, before, strict=True):
            layer.self_attn.sinks = sinks
        return torch.cat(found, 1)

    own = steps()
    with replace_attention(model, "exact"):
        assert (steps() - own).abs().max() < 1e-5
    assert (own[:, 1] - own[:, 2]).abs().max() > 0.1


def test_a_copied_cache_can_be_rolled_back_to():
    model, token = eager("gpt_oss"), torch.full((3, 1), 7)
    with replace_attention(model, "exact"):
        cache = state_cache(model)
        model(**long_inputs(), past_key_values=cache)
        copied = copy.deepcopy(cache)
        expected = model(token, past_key_values=cache).logits
        assert (model(token, past_key_values=copied).logits - expected).abs().max() < 1e-6


# --- Training ---------------------------------------------------------------------------------------------------------


def gradients(model):
    model.zero_grad()
    given, shown = long_inputs("left"), real("left", LONG)
    shown[:, 1:] &= shown[:, :-1]  # The row before a first token sees no key: eager attention averages all values.
    model(**given, labels=given["input_ids"].where(shown, -100)).loss.backward()
    return {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}


@torch.enable_grad()
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_eager_attention(name, checkpointing):
    model = eager(name).train()
    own = gradients(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    with replace_attention(model, "exact"):
        found = gradients(model)
    assert found.keys() == own.keys()
    for key, value in found.items():
        assert (value - own[key]).norm() <= 1e-4 * own[key].norm() + 1e-6, key
    sinks = [value for key, value in own.items() if key.endswith("sinks")]
    assert len(sinks) == (3 if name == "gpt_oss" else 0)
    assert all(value.abs().min() > 1e-6 for value in sinks)


@torch.enable_grad()
def test_sinks_have_gradients_through_a_cache():
    """Also where no query, key or value has one, as in the first layer of a model whose sinks alone are trained."""
    model, token = eager("gpt_oss"), torch.full((3, 1), 7)
    model.requires_grad_(False)
    sinks = model.model.layers[0].self_attn.sinks.requires_grad_()

    def gradient():
        cache = state_cache(model)
        model(**long_inputs(), past_key_values=cache)
        sinks.grad = None
        model(token, past_key_values=cache).logits.sin().sum().backward()
        return sinks.grad

    own = gradient()
    with replace_attention(model, "exact"):
        assert (gradient() - own).norm() < 1e-4 * own.norm()


def test_dropout_of_weights_is_removed_or_that_of_exact_attention():
    model = tiny("mistral", attention_dropout=0.5).train()
    with replace_attention(model, "exact"):
        assert (logits(model) - logits(model)).abs().max() > 0.01
    for method in ("exact", "taylor"):
        capped = tiny("gemma2", attention_dropout=0.5).train()
        with pytest.warns(UserWarning, match=r"removed from .*layers\.0\.self_attn \(Window\(8, softcap=2"):
            report = replace_attention(capped, method)
        assert all(layer.note.endswith("; dropout=0.5 removed") for layer in report.layers)
        assert (logits(capped) - logits(capped)).abs().max() == 0


# --- Masks that Window cannot express ---------------------------------------------------------------------------------


def gemma3_with_images(side="left"):
    """Return the model, and inputs in which the tokens of an image see each other."""
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=dict(layer_types=KINDS, query_pre_attn_scalar=8, **SLIDING),
        vision_config=dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4, image_token_index=39, boi_token_index=38, eoi_token_index=37,
    )  # fmt: skip
    model = enlarged(transformers.Gemma3ForConditionalGeneration(config))
    model.set_attn_implementation("eager")
    given = long_inputs(side)
    given["input_ids"] %= 37
    kinds = torch.zeros_like(given["input_ids"])
    kinds[:, 17:20] = kinds[:, 24:28] = 1
    return model, given | dict(token_type_ids=kinds)


def test_blocks_inside_a_window_are_exact_or_raise():
    model, given = gemma3_with_images()
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    own, sequence = model(**given).logits, model.generate(**given, **options)
    assert largest(model(**given | dict(token_type_ids=None)).logits - own, "left") > 0.1
    with replace_attention(model, "exact"):
        assert largest(model(**given).logits - own, "left") < 1e-5
        assert model.generate(**given, **options).tolist() == sequence.tolist()
        # A mask that shows more than the state holds raises.
        cache = state_cache(model)
        model(**given, past_key_values=cache)
        every = torch.ones(3, 1, 2, LONG + 2, dtype=torch.bool)
        every[..., -2:] = torch.eye(2, dtype=torch.bool)
        masks = {"full_attention": every, "sliding_attention": every}
        with pytest.raises(ValueError, match=r"self_attn \(layer 1\) .* the mask shows keys that the state of Window"):
            model(torch.full((3, 2), 7), attention_mask=masks, past_key_values=cache)
    name = r"Gemma3ForConditionalGeneration\.model\.language_model\.layers\.0\.self_attn \(layer 1\)"
    with (
        replace_attention(model, "taylor"),
        pytest.raises(ValueError, match=rf"{name} with Taylor: attention_mask \(a rule for each pair"),
    ):
        model(**given)


def test_a_state_after_blocks_hides_padding():
    """The next tokens come without blocks, so that `Window` continues from the state."""
    model, given = gemma3_with_images("right")

    def steps():
        cache = state_cache(model)
        model(**given, past_key_values=cache)
        found, mask = [], given["attention_mask"]
        for _ in range(2):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            found.append(model(torch.full((3, 1), 7), attention_mask=mask, past_key_values=cache).logits)
        return torch.cat(found, 1)

    own = steps()
    with replace_attention(model, "exact"):
        assert (steps() - own).abs().max() < 1e-5


def test_chunks_are_served_exactly():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SLIDING.items() if key != "sliding_window"}
    config = transformers.Llama4TextConfig(
        intermediate_size_mlp=32, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"], **sizes,
    )  # fmt: skip
    model = enlarged(transformers.Llama4ForCausalLM(config))
    model.set_attn_implementation("eager")
    own, sequences = logits(model, "left"), generated(model, "left", do_sample=False).sequences
    with replace_attention(model, "exact"):
        assert largest(logits(model, "left") - own, "left") < 1e-5
        assert generated(model, "left", do_sample=False).sequences.tolist() == sequences.tolist()
    with replace_attention(model, "taylor") as report:
        assert [layer.method.label for layer in report.layers] == ["Exact()", "Taylor(2)", "Exact()"]
        assert report.layers[0].note == "because of its chunks of keys"
        assert logits(model, "left").isfinite().all()
        given = dict(side="left", do_sample=False)
        assert (
            generated(model, **given).sequences.tolist()
            == generated(model, use_cache=False, **given).sequences.tolist()
        )


def test_soft_capping_with_a_mask_of_pairs_raises():
    """torch's function has no soft-capping, so exact attention cannot serve it either."""
    model, ids = eager("gemma2"), long_inputs()["input_ids"]
    mask = torch.ones(LONG, LONG, dtype=torch.bool).tril().triu(-2)[None, None]
    with (
        replace_attention(model, "exact"),
        pytest.raises(ValueError, match=r"\(layer 0\) .* attention_mask \(a choice .* Use attn_implementation=\"eager"),
    ):
        model(ids, attention_mask=mask)
