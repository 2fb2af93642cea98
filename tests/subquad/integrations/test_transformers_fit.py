"""fit_attention fits every layer of a transformers model, and save_pretrained keeps what it found."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from subquad import RandomFeatures, Taylor

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed; pip install 'subquad[transformers]'", allow_module_level=True)

from subquad.integrations.transformers import fit_attention, replace_attention, restore_attention
from subquad.integrations.transformers.layers import layers_of, method_of
from subquad.methods import Window
from tiny_models import WINDOW, long_inputs, padding, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def ids(length: int = 48, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 20, (3, length), generator=torch.Generator().manual_seed(seed))


def methods_in(model) -> list[object]:
    return [method_of(layer) for layer in layers_of(model).values()]


@pytest.mark.parametrize("method", [Taylor(2), RandomFeatures(32)], ids=["taylor", "features"])
@pytest.mark.parametrize("name", ["llama", "bert"])
@torch.no_grad()
def test_a_fit_survives_saving_and_loading(name, method, tmp_path) -> None:
    model = tiny(name)
    model.get_input_embeddings().weight.add_(1.0)  # Keys that have something in common can be centered.
    given = dict(input_ids=ids(), attention_mask=padding("left", 48))
    exact = model(**given).logits
    report = fit_attention(model, method, **given)
    fitted = model(**given).logits
    found = methods_in(model)
    assert any(each.is_aligned for each in found)
    assert all("->" in row.note for row in report.layers)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**given).logits, exact)
    restore_attention(loaded)
    assert methods_in(loaded) == found
    assert torch.equal(loaded(**given).logits, fitted)
    report.undo()
    assert not hasattr(model.config, "subquad_methods")
    torch.testing.assert_close(model(**given).logits, exact)


@torch.no_grad()
def test_saving_keeps_a_matrix_that_was_given(tmp_path) -> None:
    model, given = tiny("llama"), dict(input_ids=ids())
    width = model.config.hidden_size // model.config.num_attention_heads
    matrix = torch.randn(32, width, generator=torch.Generator().manual_seed(7))
    fit_attention(model, RandomFeatures(32, matrix=matrix), **given)
    fitted = model(**given).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    restore_attention(loaded)
    assert torch.equal(methods_in(loaded)[0].matrix.float(), matrix)
    assert torch.equal(loaded(**given).logits, fitted)


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
@torch.no_grad()
def test_saving_keeps_the_method_of_layers_with_a_window(name, tmp_path) -> None:
    """It computes texts that are not longer than the window."""
    model = tiny(name)
    short = {key: x[:, :WINDOW] for key, x in long_inputs().items()}
    fit_attention(model, "taylor", **long_inputs())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    restore_attention(loaded)
    assert methods_in(loaded) == methods_in(model)
    for given in (short, long_inputs()):
        assert torch.equal(loaded(**given).logits, model(**given).logits)


@torch.no_grad()
def test_layers_can_be_fitted_one_after_the_other(tmp_path) -> None:
    """The config holds what each layer has now."""
    model, given = tiny("llama"), dict(input_ids=ids())
    exact = model(**given).logits
    first = fit_attention(model, "taylor", layers=[0], **given)
    second = fit_attention(model, RandomFeatures(32), layers=[1], **given)
    fitted = model(**given).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    restore_attention(loaded)
    assert methods_in(loaded) == methods_in(model)
    assert torch.equal(loaded(**given).logits, fitted)
    third = replace_attention(model, "exact", layers=[0])
    assert list(model.config.subquad_methods) == ["model.layers.1.self_attn"]
    third.undo()
    assert len(model.config.subquad_methods) == 2
    second.undo()
    assert list(model.config.subquad_methods) == ["model.layers.0.self_attn"]
    first.undo()
    assert not hasattr(model.config, "subquad_methods")
    torch.testing.assert_close(model(**given).logits, exact)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_does_not_change_the_fit(name, side) -> None:
    model, tokens, shown = tiny(name), ids(), padding(side, 48)
    model.get_input_embeddings().weight.data.add_(1.0)
    reports = []
    for filler in (1, 2):
        given = torch.where(shown.bool(), tokens, filler)
        with fit_attention(model, RandomFeatures(32), input_ids=given, attention_mask=shown) as report:
            reports.append(report.layers)
    assert reports[0] == reports[1]


@torch.no_grad()
def test_a_layer_that_the_method_does_not_serve_keeps_what_it_needs() -> None:
    model = tiny("qwen2")  # Two of three layers have a sliding window.
    report = fit_attention(model, "taylor", **long_inputs())
    kinds = [type(row.method) for row in report.layers]
    assert kinds == [Window, Taylor, Window]
    assert model.generate(long_inputs()["input_ids"], max_new_tokens=2, min_new_tokens=2).shape[1] > 2


@pytest.mark.parametrize("method", ["window:8", "linear", "window:8+taylor:2"])
def test_a_method_without_anything_to_fit_raises_and_leaves_the_model_as_it_was(method) -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"method: expected Taylor or RandomFeatures.*; replace_attention gives"):
        fit_attention(model, method, **long_inputs())
    assert model.config._attn_implementation == before and not hasattr(model.config, "subquad_methods")


def test_a_method_for_each_layer() -> None:
    model = tiny("llama")
    report = replace_attention(model, {1: "taylor:4"})
    assert report.replaced == ("model.layers.1.self_attn",)
    with pytest.raises(ValueError, match="layers: expected None with a method for each layer"):
        replace_attention(model, {1: "taylor"}, layers=[1])
    with pytest.raises(ValueError, match="layers: expected a list of numbers from 0 to 1"):
        replace_attention(model, {7: "taylor"})
    with pytest.raises(ValueError, match="model: its config holds no fitted methods"):
        restore_attention(model)
