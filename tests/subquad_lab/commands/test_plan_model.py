"""Tiny models with random weights, saved and planned for: what is watched is theirs, and what is told follows."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad import native
from subquad.planning import calibration
from subquad.planning.seconds import work
from subquad_lab.cli import main
from subquad_lab.commands import plan_model
from subquad_lab.models import pretrained

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed: the extra `pretrained` brings it", allow_module_level=True)

WORDS = [f"w{i}" for i in range(50)]
SIZES = dict(vocab_size=56, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose calls take as long as their work, so that calibrating it takes no time."""

    def seconds(method: Any, form: str, shape: Any, device: object, dtype: object, known: float) -> float:
        width = 2 * shape.head_dim if isinstance(method, subquad.Exact) else 1  # its work is counted in pairs
        return 1e-4 + 1e-10 * width * sum(work(method, form, shape))

    monkeypatch.setattr(calibration, "measured_seconds", seconds)
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


def make(kind: str, folder: Path, loud: float = 1.0) -> Path:
    """Save a model of the kind, its queries multiplied by `loud`, and a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    more: dict[str, Any] = {
        "llama": dict(num_key_value_heads=2, max_position_embeddings=512),
        "mistral": dict(num_key_value_heads=2, max_position_embeddings=512, sliding_window=16),  # shorter than the text
        "gpt2": dict(n_positions=512, n_inner=32),
        "bert": dict(max_position_embeddings=256),
        "vit": dict(image_size=8, patch_size=4),
        "t5": dict(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4),
    }[kind]
    sizes = SIZES | more if kind != "t5" else more
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"q_proj.weight|query.weight", name):
                weight.mul_(loud)
            elif "c_attn.weight" in name:  # queries, keys and values side by side
                weight[:, : SIZES["hidden_size"]].mul_(loud)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"?": 0} | {word: i + 1 for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?").save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    numbers = torch.randint(50, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    file.write_text(" ".join(WORDS[i] for i in numbers))
    return file


def seen(folder: Path, text: Path, tokens: int) -> list[pretrained.Layer]:
    found: list[pretrained.Layer] = []
    model, tokenizer = pretrained.load(str(folder))
    pretrained.watch(model, pretrained.tokenized(pretrained.read(str(text)), model, tokenizer, tokens), found.append)
    return found


def by_pairs(layer: pretrained.Layer) -> Tensor:
    """Exact attention, written out."""
    group = layer.query.shape[1] // layer.key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (layer.key, layer.value))
    logits = layer.query.double() @ key.mT / layer.query.shape[-1] ** 0.5
    if layer.is_causal:
        n = logits.shape[-1]
        logits = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    return logits.softmax(-1) @ value


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_what_is_watched_reproduces_the_output_of_its_layer(kind, tmp_path, text):
    layers = seen(make(kind, tmp_path / kind, loud=50.0), text, 100)
    assert len(layers) == 2
    for layer in layers:
        assert layer.is_causal == (kind != "bert")
        assert layer.key.shape == (1, 2 if kind == "llama" else 4, 100, 8)
        expected = by_pairs(layer)
        assert torch.dist(layer.output.double(), expected) < 1e-4 * expected.norm()


def test_watching_leaves_the_model_as_it_was(tmp_path, text):
    model, tokenizer = pretrained.load(str(make("llama", tmp_path / "llama")))
    tokens = pretrained.tokenized(pretrained.read(str(text)), model, tokenizer, None)
    assert tokens.shape == (1, 300)
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        pretrained.watch(model, tokens, lambda layer: None)
        assert torch.equal(model(tokens).last_hidden_state, expected)


@pytest.mark.filterwarnings("ignore:.*weights can be negative")
def test_errors_are_those_of_the_layer_and_its_heads(tmp_path, text):
    layer = seen(make("llama", tmp_path / "llama", loud=60.0), text, 128)[1]
    found = plan_model.plan_layer(layer, 0.05)
    exact = by_pairs(layer)
    for number, finding in enumerate([found.whole, *found.heads]):
        out = subquad.attention(*layer[:3], is_causal=True, enable_gqa=True, method=finding.method).double()
        mine = slice(None) if number == 0 else slice(number - 1, number)
        error = (out - exact)[:, mine].norm() / exact[:, mine].norm()
        assert finding.error == pytest.approx(float(error), rel=1e-3, abs=1e-6)
        assert finding.is_kept == (finding.error <= 0.05 / 2)
    assert found.whole.logits == (min(h.logits[0] for h in found.heads), max(h.logits[1] for h in found.heads))
    assert len({head.logits for head in found.heads}) == 4, "each head has a range of its own"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_small_logits_can_be_approximated_and_large_ones_only_by_blocks(kind, tmp_path, text, capfd, monkeypatch):
    quiet, loud = make(kind, tmp_path / "quiet"), make(kind, tmp_path / "loud", loud=3000.0)
    assert main(["plan", "--model", str(quiet), "--text", str(text)]) == 0
    out, _ = capfd.readouterr()
    assert "2 of 2 layers have an approximation within 0.05; considered separately, 8 of 8 heads do." in out
    assert len(re.findall(r" yes .* 4 of 4 +\S+x +\S+x +\S+x$", out, re.MULTILINE)) == 2
    assert "x at 64k the speed of exact attention." in out
    assert "stricter than perplexity" not in out  # Every layer keeps the error.
    assert main(["plan", "--model", str(loud), "--text", str(text)]) == 0
    out, _ = capfd.readouterr()
    assert not native.available() or out.count("Multipole(") >= 2
    monkeypatch.setattr(native, "available", lambda: False)
    assert main(["plan", "--model", str(loud), "--text", str(text), "--all"]) == 0
    out, _ = capfd.readouterr()
    assert "0 of 2 layers" in out
    assert "Keep exact attention." in out
    assert "An error of 0.05 in each layer is stricter than perplexity requires" in out
    assert [line.split()[0] for line in out.splitlines() if re.match(r" *\d+\.\d", line)] == [
        f"{layer}.{head}" for layer in range(2) for head in range(4)
    ]


def test_what_is_not_plain_attention_is_told(tmp_path, text, capfd):
    assert main(["plan", "--model", str(make("mistral", tmp_path / "window")), "--text", str(text)]) == 0
    out, _ = capfd.readouterr()
    assert out.count("not plain attention") == 2
    assert "0 of 2 layers" in out


def test_a_terminal_shows_a_bar_and_a_table(tmp_path, text, capfd, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", "--model", str(make("llama", tmp_path / "llama")), "--text", str(text)]) == 0
    out, err = capfd.readouterr()
    assert "┃" in out
    assert "measuring the layers" in err


def test_unfit_models_are_told(tmp_path, text, complaint):
    ask = lambda model: complaint(["plan", "--model", str(model), "--text", str(text)])
    assert "--model: no such folder" in ask(tmp_path / "no")
    assert "--model: expected a folder saved by transformers or a .gguf file" in ask(text)
    (empty := tmp_path / "empty").mkdir()
    assert "cannot be loaded" in ask(empty)
    for kind in ("vit", "t5"):
        message = f"expected a decoder-only or encoder-only language model, got '{kind}'"
        assert message in ask(make(kind, tmp_path / kind))
    (damaged := make("llama", tmp_path / "damaged") / "model.safetensors").write_bytes(b"no weights")
    assert "cannot be loaded" in ask(damaged.parent)


def test_missing_weights_are_told(tmp_path, text, complaint):
    from safetensors.torch import load_file, save_file

    file = make("llama", tmp_path / "llama") / "model.safetensors"
    weights = load_file(file)
    del weights["layers.1.self_attn.q_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    message = complaint(["plan", "--model", str(file.parent), "--text", str(text)])
    assert "lacks 1 of the model's weights, such as layers.1.self_attn.q_proj.weight" in message


def test_code_of_a_model_is_not_run(tmp_path, text, complaint):
    import json

    folder = make("llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "cannot be loaded" in complaint(["plan", "--model", str(folder), "--text", str(text)])
    assert not (tmp_path / "ran").exists()


def test_unfit_texts_are_told(tmp_path, text, complaint):
    folder = str(make("llama", tmp_path / "llama"))
    ask = lambda *options: complaint(["plan", "--model", folder, *options])
    short = tmp_path / "short.txt"
    short.write_text("w1 w2 w3")
    assert "--text: expected at least 64 tokens, got 3" in ask("--text", str(short))
    assert "--text: expected at least 400 tokens, got 300" in ask("--text", str(text), "--tokens", "400")
    assert "--tokens: expected a number from 64 to 512" in ask("--text", str(text), "--tokens", "513")
    assert "--tokens: expected a number from 64 to 512" in ask("--text", str(text), "--tokens", "10")
    assert "cannot read" in ask("--text", str(tmp_path / "no"))
    short.write_bytes(b"\xff\xfe\xff")
    assert "it is not UTF-8" in ask("--text", str(short))
    assert "got no --text FILE" in ask()
    assert "--max-error: expected a positive number" in ask("--text", str(text), "--max-error", "0")
    assert "got no --model PATH" in complaint(["plan", "--text", str(text)])


def test_a_text_is_read_before_the_model_is_loaded(tmp_path, complaint, monkeypatch):
    loaded: list[str] = []
    monkeypatch.setattr(plan_model, "load", loaded.append)
    assert "--text: cannot read nowhere.txt" in complaint(["plan", "--model", "x", "--text", "nowhere.txt"])
    assert loaded == []


@pytest.mark.parametrize("kind", ["llama", "bert"])  # Without its files, the first is not made and the second is empty.
def test_a_missing_tokenizer_is_told(kind, tmp_path, text, complaint):
    folder = make(kind, tmp_path / kind)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    message = complaint(["plan", "--model", str(folder), "--text", str(text)])
    assert f"--model: {folder} has no tokenizer: none of tokenizer*, vocab*" in message
    assert "tokenizer.save_pretrained(FOLDER)" in message


def test_the_message_about_a_tokenizer_is_whole(tmp_path, text, complaint):
    """transformers begins with a heading, and says what to do in the last of its lines."""
    folder = make("llama", tmp_path / "llama")
    (folder / "tokenizer.json").unlink()
    message = complaint(["plan", "--model", str(folder), "--text", str(text)])
    assert f"--model: the tokenizer in {folder} cannot be loaded: " in message
    assert "installed to convert a slow tokenizer" in message


@pytest.mark.parametrize("option", ["--length=8", "--logit-range=1", "--sample=x", "--causal=false", "--training"])
def test_options_of_a_shape_have_no_place_beside_a_model(option, text, complaint):
    assert "--model: expected no other options than" in complaint(["plan", "--model", "x", "--text", str(text), option])


def test_missing_transformers_is_told(tmp_path, text, complaint, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = complaint(["plan", "--model", str(tmp_path), "--text", str(text)])
    assert "transformers is not installed; install it with: pip install 'subquad[pretrained]'" in message
