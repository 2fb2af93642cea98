"""replace_attention changes what its report lists and nothing else, can be undone, and works with files and copies."""

import copy
import json
import re
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from torch import nn

import subquad
from subquad import Linear, Multipole, Taylor

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed; pip install 'subquad[transformers]'", allow_module_level=True)

import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from subquad.integrations.transformers import StateLayer, register, replace_attention, state_cache
from subquad.integrations.transformers.request import dropout_of
from tiny_models import LENGTH, SPECIAL, inputs, padding, prompt, real, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def logits(model, name="llama", side="left", **options):
    return model(**inputs(name, side), **options).logits


def differ(a, b):
    return (a - b)[real("left")].abs().max() > 0.01


# --- Replace and undo -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize("name", ["gpt2", "bart", "t5"])
def test_undo_leaves_no_trace(name, layers):
    model = tiny(name)
    configs = {id(part): part.config for part in model.modules() if hasattr(part, "config")}
    attributes = {id(part): set(vars(part)) for part in model.modules()}
    own, parameters = logits(model, name), {key: id(value) for key, value in model.named_parameters()}
    report = replace_attention(model, "taylor" if name != "t5" else "exact", layers=layers)
    assert {key: id(value) for key, value in model.named_parameters()} == parameters
    report.undo()
    report.undo()  # The second call does nothing.
    assert torch.equal(logits(model, name), own)
    assert {id(part): part.config for part in model.modules() if hasattr(part, "config")} == configs
    assert all(part.config is configs[id(part)] for part in model.modules() if hasattr(part, "config"))
    assert {config._attn_implementation for config in configs.values()} == {"sdpa"}
    assert {id(part): set(vars(part)) for part in model.modules()} == attributes
    assert not model._forward_pre_hooks


def test_the_report_lists_every_layer():
    model = tiny("whisper")
    with replace_attention(model, "linear:identity", layers=[0, 3]) as report:
        assert [layer.name for layer in report.layers if layer.method is not None] == [
            "model.encoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn",
        ]  # fmt: skip
        assert str(report).splitlines()[:3] == [
            "layer  name                                 before  now",
            "0      model.encoder.layers.0.self_attn     sdpa    Linear('identity')",
            "1      model.encoder.layers.1.self_attn     sdpa    unchanged",
        ]
        with replace_attention(model, "exact") as second:
            assert second.layers[0].before == "Linear('identity')"


def test_calls_are_undone_in_reverse():
    model = tiny("llama")
    own = logits(model)
    with replace_attention(model, "taylor"):
        first = logits(model)
        with replace_attention(model, Linear("elu"), layers=[0]):
            assert differ(logits(model), first)
        assert torch.equal(logits(model), first)
    assert torch.equal(logits(model), own)


@pytest.mark.parametrize("layers", [None, [0]])
def test_a_replacement_cannot_be_undone_before_a_later_one(layers):
    model = tiny("llama")
    own = logits(model)
    first = replace_attention(model, "taylor")
    second = replace_attention(model, Linear("elu"), layers=layers)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"undo: .*layers\.0\.self_attn was replaced again .* later .* first"):
            first.undo()
    second.undo()
    assert differ(logits(model), own)
    first.undo()
    assert torch.equal(logits(model), own)


def test_replacements_of_different_layers_are_undone_in_any_order():
    model = tiny("llama")
    own = logits(model)
    first, second = (replace_attention(model, "taylor", layers=[number]) for number in (0, 1))
    both = logits(model)
    first.undo()
    assert differ(logits(model), both) and differ(logits(model), own)
    second.undo()
    assert torch.equal(logits(model), own)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", [None, "left"])
def test_one_query_with_a_mask_of_the_others_is_as_causal_as_its_layer(side, implementation):
    """A matrix of one row does not show whether the mask is causal, which Multipole's window depends on."""
    model = tiny("llama")
    model.set_attn_implementation(implementation)
    with replace_attention(model, Multipole(window=3, sinks=1, block=2, top=1), layers=[1]):
        given = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, return_dict_in_generate=True,
                     output_logits=True)  # fmt: skip
        cached = model.generate(**prompt("llama", side), **given)
        free = model.generate(**prompt("llama", side), use_cache=False, **given)
    for one, other in zip(cached.logits, free.logits, strict=True):
        assert (one - other).abs().max() < 1e-5


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_layers_that_are_left_out_keep_what_they_had(name, side, implementation, monkeypatch):
    """Masks are shared with the unchanged layers, and the cache has states in some layers and keys in others."""
    model = tiny(name)
    model.set_attn_implementation(implementation)
    own = logits(model, name, side)
    with replace_attention(model, "exact", layers=[0]):
        assert (logits(model, name, side) - own)[real(side)].abs().max() < 1e-5
    with replace_attention(model, "taylor") as every:
        whole = logits(model, name, side)
        numbers = [layer.number for layer in every.layers]
    chosen = numbers[-2:] if name == "bart" else numbers[-1:]  # of a decoder's last layer
    with replace_attention(model, "taylor", layers=chosen) as report:
        assert [layer.number for layer in report.layers if layer.method] == chosen
        part = logits(model, name, side)
        assert (part - own)[real(side)].abs().max() > 0.01
        assert (part - whole)[real(side)].abs().max() > 0.01
        given = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        cached = model.generate(**prompt(name, side), **given)
        free = model.generate(**prompt(name, side), use_cache=False, **given)
        assert cached.sequences.tolist() == free.sequences.tolist()
        cache = cached.past_key_values
        parts = [cache.self_attention_cache, cache.cross_attention_cache] if name == "bart" else [cache]
        for kept in parts:
            assert [isinstance(layer, StateLayer) for layer in kept.layers] == [False, True]
        kept_layers = [model.get_submodule(layer.name) for layer in report.layers if layer.method is None]
        assert {layer.config._attn_implementation for layer in kept_layers} == {implementation}


@pytest.mark.parametrize("layers", [None, [0, 1], [2, 4], [3, 5]])
def test_encoder_and_decoder_may_use_the_same_layer_indices(layers):
    """Then the layer that reads a cache is known at its call only."""
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16,
                 attention_probs_dropout_prob=0.0, **SPECIAL)  # fmt: skip
    halves = (
        transformers.BertConfig(**sizes),
        transformers.BertConfig(is_decoder=True, add_cross_attention=True, **sizes),
    )
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*halves)
    config.decoder_start_token_id, config.pad_token_id = 3, 0
    model = transformers.EncoderDecoderModel(config=config).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    with replace_attention(model, "taylor", layers=layers):
        given = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        cached, free = (model.generate(**prompt("llama"), use_cache=flag, **given) for flag in (True, False))
    assert cached.sequences.tolist() == free.sequences.tolist()
    cache = cached.past_key_values
    assert isinstance(cache.self_attention_cache.layers[0], StateLayer) == (layers in (None, [2, 4]))
    assert isinstance(cache.cross_attention_cache.layers[0], StateLayer) == (layers in (None, [3, 5]))


def test_a_method_with_a_warning_warns_once():
    model = tiny("llama")
    with pytest.warns(UserWarning, match=r"Taylor\(3\): weights can be negative") as caught:
        report = replace_attention(model, Taylor(3))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(), report:
        warnings.simplefilter("error", UserWarning)
        logits(model)
        model.generate(**prompt("llama"), max_new_tokens=3, do_sample=False, pad_token_id=0)
    with pytest.warns(UserWarning, match=r"Taylor\(3\): weights can be negative") as caught:
        register(Taylor(3), "subquad_odd")
    assert [warning.filename for warning in caught] == [__file__]


def test_the_two_functions_return_the_same_report_and_refer_to_each_other():
    model = tiny("llama")
    with pytest.raises(
        ValueError, match=r"in LlamaForCausalLM, found none; .* subquad\.integrations\.transformers\.replace"
    ):
        subquad.replace_attention(model, "taylor")
    with replace_attention(model, "taylor") as report:
        assert type(report) is subquad.Replacements
        assert report.replaced == ("model.layers.0.self_attn", "model.layers.1.self_attn")
        assert report.skipped == {}


def test_models_with_different_methods_are_independent():
    models = [tiny("llama") for _ in range(3)]
    own = logits(models[0])
    replace_attention(models[1], "taylor")
    second = logits(models[1])
    replace_attention(models[2], Linear("elu"))
    assert differ(second, own)
    assert differ(logits(models[2]), second)
    assert torch.equal(logits(models[0]), own)
    assert torch.equal(logits(models[1]), second)


def test_a_copy_of_a_model_keeps_its_method():
    model = tiny("llama")
    report = replace_attention(model, "taylor")
    expected, copied = logits(model), copy.deepcopy(model)
    report.undo()
    assert torch.equal(logits(copied), expected)
    output = copied.generate(**prompt("llama"), max_new_tokens=2, return_dict_in_generate=True)
    assert isinstance(output.past_key_values.layers[0], StateLayer)
    copied.set_attn_implementation("sdpa")  # transformers' own function works too
    assert torch.equal(logits(copied), logits(model))
    assert state_cache(copied).layers[0].__class__ is transformers.DynamicCache(config=model.config).layers[0].__class__


# --- Files and names --------------------------------------------------------------------------------------------------

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, logging
logging.set_verbosity_error()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert model.config._attn_implementation == "sdpa" and "subquad" not in sys.modules
print(model(torch.tensor([[5, 6, 7]])).logits.sum().item())
"""


def test_a_saved_model_loads_without_subquad(tmp_path):
    model, ids = tiny("llama"), torch.tensor([[5, 6, 7]])
    own = model(ids).logits.sum().item()
    with replace_attention(model, "taylor"):
        model.save_pretrained(tmp_path)
    assert "subquad" not in (tmp_path / "config.json").read_text()
    found = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(found.stdout) == pytest.approx(own, rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "whisper"])
def test_a_saved_model_comes_back_with_the_same_method(name, tmp_path):
    model, method = tiny(name), "exact" if name == "t5" else "taylor"
    replace_attention(model, method)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    replace_attention(loaded, method)
    assert torch.equal(logits(loaded, name), logits(model, name))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name


def test_names_work_from_the_start(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    load = lambda name: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name).eval()
    assert (logits(load("subquad")) - logits(model)).abs().max() < 1e-5  # exact, as `attention` is
    register(Taylor(2), "subquad_taylor")
    named = load("subquad_taylor")
    with replace_attention(model, Taylor(2)):
        expected = logits(model)
        sequence = model.generate(**prompt("llama"), max_new_tokens=5, do_sample=False)
    assert torch.equal(logits(named), expected)
    assert isinstance(state_cache(named).layers[0], StateLayer)
    for cache in (None, state_cache(named)):
        found = named.generate(**prompt("llama"), max_new_tokens=5, do_sample=False, past_key_values=cache)
        assert found.tolist() == sequence.tolist()


@pytest.mark.parametrize("name", ["sdpa", "subquad/taylor", "subquad:taylor", "paged|subquad", "subquad_flash", ""])
def test_names_that_mean_something_else_in_transformers_raise(name):
    with pytest.raises(
        ValueError, match=f"name: expected one that begins with \"subquad\", .* got '{re.escape(name)}'"
    ):
        register("taylor", name)


def test_the_names_of_the_documentation_are_accepted(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    for name in ("subquad_taylor", "subquad-taylor.2"):
        register(Taylor(2), name)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
        assert loaded.config._attn_implementation == name


MISSING = """
import sys
sys.modules["transformers"] = None
import subquad
try:
    import subquad.integrations.transformers
except ImportError as error:
    print(error)
"""


def test_without_transformers_the_error_says_what_to_install():
    found = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)
    assert "needs transformers 5 or later: pip install 'transformers>=5'" in found.stdout


# --- What raises ------------------------------------------------------------------------------------------------------


def test_a_bias_of_positions_is_served_exactly():
    model = tiny("t5")
    own = logits(model, "t5")
    with replace_attention(model, "taylor") as report:
        assert {layer.method for layer in report.layers} == {subquad.Exact()}
        assert {layer.note for layer in report.layers} == {"because of its position bias"}
        assert (logits(model, "t5") - own).abs().max() < 1e-5


@pytest.mark.parametrize("method", ["exact", "taylor"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "whisper"])
def test_weights_raise_by_name(name, method):
    model = tiny(name)
    with (
        replace_attention(model, method),
        pytest.raises(ValueError, match=r"output_attentions \(the attention weights"),
    ):
        logits(model, name, output_attentions=True)
    if name != "whisper":  # It returns weights under three names.
        replace_attention(model, method)
        model.set_attn_implementation("eager")
        assert model(**inputs(name), output_attentions=True).attentions[0].shape[-1] == LENGTH


DROPOUT = dict(llama="attention_dropout", gpt2="attn_pdrop", bert="attention_probs_dropout_prob",
               bart="attention_dropout", whisper="attention_dropout")  # fmt: skip


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_of_weights_is_for_exact_attention(name):
    model = tiny(name, **{DROPOUT[name]: 0.5}).train()
    is_random = lambda: (logits(model, name) - logits(model, name)).abs().max() > 0.01
    with replace_attention(model, "exact") as report:
        assert is_random()
        assert not any(layer.note for layer in report.layers)
    with pytest.warns(UserWarning, match=r"dropout on the weights is removed from .* \(Taylor\(2\)\)"):
        report = replace_attention(model, "taylor")
    assert {layer.note for layer in report.layers} == {"dropout=0.5 removed"}
    assert not is_random()
    report.undo()
    assert is_random()


def test_dropout_of_the_output_is_not_that_of_the_weights():
    class WithOutputDropout(LlamaAttention):
        def forward(self, *arguments, **keywords):
            attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            output, _ = attention(*arguments, dropout=self.rate if self.training else 0.0)
            return self.dropout(output)

    layer = WithOutputDropout(tiny("llama").config, 0)
    layer.dropout, layer.rate = nn.Dropout(0.5), 0.0
    assert dropout_of(layer, Taylor(2), Taylor(2)) == 0
    layer.rate = 0.25
    assert dropout_of(layer, Taylor(2), Taylor(2)) == 0.25


def test_dropout_of_a_model_with_a_name_is_removed_with_a_warning(tmp_path):
    tiny("llama", attention_dropout=0.5).save_pretrained(tmp_path)
    register(Taylor(2), "subquad_taylor")
    named = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="subquad_taylor").train()
    with pytest.warns(UserWarning, match="LlamaAttention: Taylor does not support dropout on the weights: removed"):
        first = logits(named)
    assert torch.equal(logits(named), first)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-2), "a choice for each pair of query and key"),
        (torch.randn(LENGTH, LENGTH), "numbers added to the logits"),
    ],
)
def test_masks_without_a_linear_form_raise_by_name(mask, message):
    model = tiny("llama")
    own = model(inputs("llama")["input_ids"], attention_mask=mask[None, None]).logits
    with replace_attention(model, "exact"):
        found = model(inputs("llama")["input_ids"], attention_mask=mask[None, None]).logits
        assert (found - own).abs().max() < 1e-5
    with replace_attention(model, "taylor"), pytest.raises(ValueError, match=rf"attention_mask \({message}\)"):
        model(inputs("llama")["input_ids"], attention_mask=mask[None, None])


def test_masks_for_other_kinds_of_attention_raise():
    model = tiny("bert")
    layer = model.bert.encoder.layer[0].attention.self
    with (
        replace_attention(model, "taylor"),
        pytest.raises(ValueError, match=r"attention_mask \(a Tensor for another kind"),
    ):
        layer(torch.zeros(3, LENGTH, 16), attention_mask=padding("left"))


def test_rules_that_are_not_known_raise_by_name():
    """A model may combine causality with rules of its own, as vision-language models do."""
    model = tiny("llama")
    rule = lambda batch, head, query, key: (key + query) % 2 == 0
    make = transformers.masking_utils.create_causal_mask
    with replace_attention(model, "taylor"), pytest.MonkeyPatch.context() as patch:
        for extra in ("or_mask_function", "and_mask_function"):
            changed = lambda *args, extra=extra, **options: make(*args, **options, **{extra: rule})
            patch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", changed)
            with pytest.raises(ValueError, match=r"attention_mask \(a rule for each pair of query and key"):
                logits(model)


def test_arguments_are_checked():
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"layers: expected a list of numbers from 0 to 1, got \[7, 2, True\]"):
        replace_attention(model, "taylor", layers=[0, 7, 2, True])
    with pytest.raises(ValueError, match="layers: expected a list of numbers from 0 to 1, got 1"):
        replace_attention(model, "taylor", layers=1)
    with pytest.raises(TypeError, match=r"model: expected a transformers model, got Linear; .* subquad\.replace"):
        replace_attention(torch.nn.Linear(2, 2), "taylor")
    with pytest.raises(ValueError, match="method: expected one of 'exact'"):
        replace_attention(model, "tailor")
    mamba = transformers.MambaConfig(num_hidden_layers=1, hidden_size=8, state_size=2, **SPECIAL)
    with pytest.raises(ValueError, match="model: MambaForCausalLM has no layer that looks up its attention"):
        replace_attention(transformers.MambaForCausalLM(mamba), "taylor")
    assert model.config._attn_implementation == "sdpa"
