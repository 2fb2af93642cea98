"""Conversions: what is trained when, what stays as it was, and what is saved."""

import json
import warnings

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import subquad
from small_runs import small, start
from subquad_lab import UsageError
from subquad_lab.cli import main
from subquad_lab.data.text import load_prose, load_text
from subquad_lab.experiments import convert
from subquad_lab.experiments.stored import trained
from subquad_lab.models.conversion import Conversion, transfer_loss
from subquad_lab.models.converted import load
from subquad_lab.models.decoders import WordDecoder
from subquad_lab.models.language import Transformer
from subquad_lab.models.learned_maps import HeadShape, LearnedMethods, Projected
from subquad_lab.models.pretrained_decoder import PretrainedDecoder
from subquad_lab.models.scores import entropy, repeated_entropies
from subquad_lab.training.run import Run
from tiny_models import tiny

SPECS = ("window:4+hedgehog", "window:4+taylor:2", "hedgehog", "taylor:2", "linear:elu", "window:4", "separable")
WORDS = [f"w{i}" for i in range(37)]


def word_decoder(seed: int = 0) -> WordDecoder:
    torch.manual_seed(seed)
    network = Transformer(20, 16, 2, 2, 32, 0.0, subquad.Exact(), "rotary").eval()
    with torch.no_grad():
        for block in network.blocks:
            block.inward.weight.mul_(2)  # so that attention is far from a plain average
    return WordDecoder(network)


def llama_decoder() -> PretrainedDecoder:
    return PretrainedDecoder(tiny("llama").requires_grad_(False))


@pytest.fixture(params=[word_decoder, llama_decoder], ids=["words", "llama"])
def decoder(request):
    return request.param()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 20, (2, 24), generator=torch.Generator().manual_seed(0))


# --- Decoders ---------------------------------------------------------------------------------------------------------


def test_layers_are_those_that_the_decoder_computes(decoder, tokens):
    layers = decoder.layers(tokens)
    assert len(layers) == decoder.shape.layers
    for layer in layers:
        group = layer.query.shape[1] // layer.key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (layer.key, layer.value))
        logits = layer.query @ key.mT * (layer.scale or layer.query.shape[-1] ** -0.5)
        hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        torch.testing.assert_close(layer.output, expected, rtol=1e-4, atol=1e-5)


def test_a_converted_decoder_shares_its_parameters_and_leaves_the_other_as_it_was(decoder, tokens):
    before = decoder.logits(tokens)
    other = decoder.converted(LearnedMethods("linear:elu", decoder.shape).methods)
    assert {id(p) for p in other.network.parameters()} == {id(p) for p in decoder.network.parameters()}
    assert not torch.allclose(other.logits(tokens), before, atol=1e-3)
    assert torch.equal(decoder.logits(tokens), before)


@pytest.mark.parametrize("spec", SPECS)
def test_a_stream_of_single_tokens_gives_the_logits_of_the_whole_text(spec, decoder, tokens):
    other = decoder.converted(LearnedMethods(spec, decoder.shape).methods)
    stream = other.stream()
    stream.read(tokens[0, :10])
    for token in tokens[0, 10:]:
        last = stream.read(token[None])
    torch.testing.assert_close(last, other.logits(tokens[:1])[0, -1].detach(), rtol=1e-4, atol=1e-4)
    assert stream.nbytes > 0


def test_an_adapter_changes_nothing_at_first_and_adds_a_product_of_two_matrices(decoder, tokens):
    other = decoder.converted(LearnedMethods("linear:elu", decoder.shape).methods)
    before = other.logits(tokens)
    adapters = other.adapt(2)
    projections = 2 if isinstance(decoder, WordDecoder) else 4  # of a layer
    assert len(adapters) == 2 * projections * decoder.shape.layers
    torch.testing.assert_close(other.logits(tokens), before)
    with torch.no_grad():
        for name, parameter in adapters.items():
            if "lora_B" in name:
                parameter.normal_()
    assert not torch.allclose(other.logits(tokens), before, atol=1e-3)


# --- Learned maps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["taylor:2", "linear:elu", "random:16"])
def test_an_untrained_projection_leaves_a_method_as_it_is(spec):
    q = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    k = v = torch.randn(2, 2, 9, 8, generator=torch.Generator().manual_seed(1))
    made = LearnedMethods(spec, HeadShape(1, 4, 2, 8)).methods[0]
    assert isinstance(made, Projected)
    found, expected = (
        subquad.attention(q, k, v, is_causal=True, enable_gqa=True, method=method) for method in (made, spec)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        made.key_weight[1] *= 2  # of the second key head, which query heads 2 and 3 read
    changed = subquad.attention(q, k, v, is_causal=True, enable_gqa=True, method=made)
    same = [torch.allclose(changed[:, h], found[:, h], atol=1e-4) for h in range(4)]
    assert same == [True, True, False, False]


@pytest.mark.parametrize("spec", ["window:4+hedgehog", "hedgehog", "taylor:2", "linear:elu"])
def test_transfer_brings_the_output_of_each_layer_closer(spec, decoder, tokens):
    made, layers = LearnedMethods(spec, decoder.shape), decoder.layers(tokens)
    optimizer = torch.optim.Adam(made.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        losses.append(transfer_loss(made, layers))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


def test_each_stage_trains_its_own_parameters(tokens):
    model = Conversion(word_decoder(), False, ["hedgehog", "window:4"], 2, lambda method: word_decoder(1).network)
    trained_in = {}
    for stage in ("exact", "transfer", "adapt"):
        model.stage = stage
        for parameter in model.network.parameters():
            parameter.requires_grad_(stage == "exact")
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        trained_in[stage] = {
            name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.grad is not None
        }
    assert trained_in == {
        "exact": {"network", "scratch"}, "transfer": {"learned", "scratch"}, "adapt": {"learned", "adapters", "scratch"}
    }  # fmt: skip  # The task also freezes the maps while adapters are trained; see below.


# --- Scores -----------------------------------------------------------------------------------------------------------


def test_entropy_is_the_mean_over_all_tokens_but_the_first(tokens):
    decoder, text = word_decoder(), tokens.flatten()[:45]
    expected = []
    for begin in range(0, 44, 8):
        logits = decoder.logits(text[None, begin : min(begin + 8, 44)])[0].log_softmax(-1)
        expected += [-float(row[word]) for row, word in zip(logits, text[begin + 1 :], strict=False)]
    assert len(expected) == 44
    assert entropy(decoder, text, 8) == pytest.approx(sum(expected) / 44, rel=1e-5)


def test_the_second_copy_of_a_text_is_read_after_the_first(tokens):
    decoder, piece = word_decoder(), tokens.flatten()[:8]
    logits = decoder.logits(torch.cat([piece, piece])[None])[0].log_softmax(-1)
    first = [-float(logits[i, piece[i + 1]]) for i in range(7)]
    second = [-float(logits[8 + i, piece[i + 1]]) for i in range(7)]
    found = repeated_entropies(decoder, piece, 16)
    assert found == pytest.approx((sum(first) / 7, sum(second) / 7), rel=1e-5)


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from small_runs import write_text

    root = tmp_path_factory.mktemp("convert")
    experiment, config = small("conversion", write_text(root / "text"))
    return start(config, root, "whole", experiment)


def test_figures_are_those_of_the_stages(finished):
    run, result = finished
    assert result["steps"] == 30
    names = {"exact", "window:2 untrained"} | {
        f"{spec}{stage}" for spec in ("window:2+hedgehog", "linear:elu")
        for stage in (" untrained", " transferred", "", " from scratch")
    }  # fmt: skip
    assert result["test"].keys() - {"perplexity"} == names
    assert result["test"]["perplexity"] == result["test"]["window:2+hedgehog"]
    for record in (convert.TABLE, convert.DECODING):
        assert json.loads((run.folder / f"{record}.json").read_text())["rows"].keys() == names
    table = convert.EXPERIMENT.table(run)
    assert table.rows[0][0] == "exact" and len(table.rows) == len(names)
    lines = {line["step"]: line for line in run.metrics() if "valid/perplexity" in line}
    assert [step for step, line in lines.items() if "valid/window:2 untrained" in line] == [10]  # at the swap
    assert lines.keys() == {7, 10, 14, 20, 21, 28, 30}  # every 7 steps, and where a stage ends
    assert "valid/exact" in lines[10] and "valid/linear:elu" in lines[10] and "valid/linear:elu" not in lines[7]


def test_what_a_stage_does_not_train_stays_the_same(finished, tmp_path):
    """Recomputed from the weights at the end: the exact model, and the maps without adapters."""
    run, result = finished
    _, task = trained(run.folder)
    again = task.evaluate("test", lambda: None)
    assert again == pytest.approx(result["test"], rel=1e-6)
    stages = []
    for step in (0, 10, 20, 30):
        rates = task.enter(step)
        stages.append([rate > 0 for rate in rates])
        assert [group[0].requires_grad for group in task.groups] == stages[-1]
    assert stages == [  # two maps and the factor of the first, two adapters, two from scratch, the exact model
        [False, False, False, False, False, True, True, True],
        [True, True, True, False, False, True, True, False],
        [False, False, False, True, True, True, True, False],
        [False] * 8,
    ]
    matrices, factors, *_ = task.enter(13)  # The factor of far weights learns faster.
    assert factors == pytest.approx(convert.LOG_FACTOR_RATE * matrices)
    assert [tuple(parameter.shape) for parameter in task.groups[1]] == [(2,)]


def test_the_report_has_its_table_and_plot(finished, tmp_path):
    run, _ = finished
    assert main(["report", str(run.folder), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<h3>convert</h3>" in page and "<td>window:2+hedgehog transferred</td>" in page
    assert page.count("<img") == 2  # its plot, and its curves without scripts


def test_a_run_of_language_is_converted(text, tmp_path, complaint):
    options = [f"--data={text}", "--width=8", "--heads=2", "--layers=1", "--context=8", "--batch=4", "--steps=12"]
    assert main(["train", "language", *options, f"--out={tmp_path}"]) == 0
    base = tmp_path / "language-001"
    own = ["--methods=linear:elu", "--untrained=window:4", "--tokens=64", "--adapt-tokens=0", "--batch=4",
           "--context=8"]  # fmt: skip
    command = ["train", "convert", f"--model={base}", *own, f"--out={tmp_path}"]
    assert main(command) == 0
    result, before = (Run.open(tmp_path / name).result() for name in ("convert-001", "language-001"))
    assert result["test"]["exact"] == pytest.approx(before["test"]["perplexity"], rel=0.2)  # other pieces
    assert "linear:elu transferred" not in result["test"]  # It is the result.
    assert "expected no --data" in complaint([*command, f"--data={tmp_path}"])
    assert "model: expected a run of language" in complaint([*command, f"--model={tmp_path / 'convert-001'}"])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A tiny Llama with a tokenizer, a text, and the run that converted it."""
    root = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    tiny("llama").save_pretrained(root / "llama")
    words = Tokenizer(models.WordLevel({"?": 0} | {word: i + 3 for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?")
    tokenizer.save_pretrained(root / "llama")
    numbers = torch.randint(37, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    (root / "text").mkdir()
    for part in ("train", "valid", "test"):
        (root / "text" / f"{part}.txt").write_text(" ".join(WORDS[i] for i in numbers))
    command = ["train", "convert", f"--model={root / 'llama'}", f"--data={root / 'text'}", "--batch=2", "--context=32",
               "--methods=window:4+hedgehog", "--untrained=window:4,multipole", "--tokens=192", "--adapt-tokens=128",
               "--rank=2", "--evaluate-tokens=64", "--evaluate-every=2", "--warmup=0", f"--out={root}"]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(command) == 0
    return root


def test_a_pretrained_model_is_converted_and_loads_with_one_line(pretrained):
    run = Run.open(pretrained / "convert-001")
    model, tokenizer = load(run.folder / "window-4-hedgehog.json")
    _, task = trained(run.folder)
    tokens = tokenizer("w1 w2 w3 w4 w5 w6 w7 w8", return_tensors="pt").input_ids
    student = task.model.students["window:4+hedgehog"].decoder
    assert torch.equal(model(tokens).logits, student.network(tokens).logits)
    base = task.model.teacher.logits(tokens)
    assert not torch.allclose(model(tokens).logits, base, atol=1e-4)
    out = model.generate(tokens, min_new_tokens=6, max_new_tokens=6, pad_token_id=0)
    assert out.shape == (1, 14)
    for file in run.folder.glob("checkpoints/*/tensors.safetensors"):
        assert file.stat().st_size < 100_000  # The base model is not copied.


def test_damaged_files_and_another_base_model_are_refused(pretrained, tmp_path):
    folder = pretrained / "convert-001"
    config = json.loads((folder / "window-4-hedgehog.json").read_text())
    weights = (folder / "window-4-hedgehog.safetensors").read_bytes()

    def written(weights=weights, **changes):
        (tmp_path / "x.json").write_text(json.dumps(config | changes))
        (tmp_path / "x.safetensors").write_bytes(weights)
        return tmp_path / "x.json"

    load(written())
    with pytest.raises(UsageError, match="is not the model that was converted"):
        load(written(base_sha256="0" * 64))
    with pytest.raises(UsageError, match=r"expected None for adapters\."):
        load(written(rank=None))
    with pytest.raises(UsageError, match="expected 'method', got None"):
        load(written(method=None))
    with pytest.raises(UsageError, match=r"x\.safetensors"):
        load(written(weights[:100]))
    with pytest.raises(UsageError, match="no such folder"):
        load(written(base=str(tmp_path / "gone")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "softmax"], "--methods: expected one of"),
        (["--methods", ","], "--methods: expected at least one method"),
        (["--methods", "taylor:2,exact"], "--methods: expected other methods than exact"),
        (["--methods", "taylor:2,taylor:9"], "--methods: expected at most 65,536 features"),
        (["--untrained", "window:4+taylor:9"], "--untrained: expected at most 65,536 features"),
        (["--schedule", "epochs"], "--schedule: expected one of 'constant', 'linear', 'cosine'"),
        (["--methods", "taylor:2,taylor:2"], "--methods: expected different methods"),
        (["--untrained", "window:x"], "--untrained: expected an integer for size"),
        (["--tokens", "0"], "--tokens: expected a positive integer, got 0"),
        (["--adapt-tokens", "-1"], "--adapt-tokens: expected an integer >= 0, got -1"),
        (["--rank", "0"], "--rank: expected a positive integer"),
        (["--rank", "129"], "--rank: expected at most 128, the smallest side of a projection, got 129"),
        (["--transfer-lr", "-1"], "--transfer-lr: expected a number >= 0"),
        (["--weights", "best"], "--weights: the numbers of tokens set the length of a conversion"),
        (["--patience", "3"], "--patience: the numbers of tokens"),
        (["--epochs", "2"], "--epochs: the numbers of tokens"),
        (["--heads", "3"], "--heads: expected a divisor of the width 128"),
        (["--context", "2"], "--context: expected at least 4"),
        (["--repeats", "maybe"], "--repeats: "),
        (["--units", "bytes"], "--units: expected one of 'words', 'characters', got 'bytes'"),
        (["--batch", "100000"], "--batch: 100000 streams of 128 tokens need more than"),
        (["--model", "nowhere"], "--model: no such folder: "),
        (["--data", "nowhere"], "--data: no such folder: "),
        (["--sequence-parallel", "2"], "--sequence-parallel: "),
    ],
)
def test_what_is_wrong_is_named(options, message, complaint, tmp_path):
    assert f"subquad: error: {message}" in complaint(["train", "convert", *options, "--out", str(tmp_path)])


def test_repeats_are_in_every_part_and_training_sees_them_whole(finished, text):
    """The rows of a batch begin where a piece begins, and the text of another piece is as it was."""
    _, task = trained(finished[0].folder)
    half = task.config.context // 2
    for part in ("train", "valid", "test"):
        plain, found = getattr(task.corpus, part), task.texts[part]
        pieces, own = (x[: len(x) // 8 * 8].view(-1, 8) for x in (found, plain))
        assert torch.equal(pieces[1::2, half:], own[1::2, :half]) and torch.equal(pieces[::2], own[::2])
    inputs = torch.cat([task.batch(0, i)[0] for i in range(task.passes)])
    repeated = (inputs[:, half:] == inputs[:, :half]).all(1)
    assert 0.4 < repeated.float().mean() < 0.6
    _, plain = small("conversion", text, repeats=False)
    assert torch.equal(convert.build(plain).texts["test"], task.corpus.test)


def test_a_pretrained_model_reads_its_text_without_repeats(pretrained):
    _, task = trained(pretrained / "convert-001")
    assert not task.config.has_repeats and torch.equal(task.texts["test"], task.corpus.test)


def test_prose_is_the_text_of_the_words(text):
    for folder in (None, str(text)):
        prose, corpus = load_prose(folder), load_text(folder)
        assert prose.name == corpus.name
        shares = [len(prose.parts[part]) / len(getattr(corpus, part)) for part in ("train", "valid", "test")]
        assert max(shares) / min(shares) < 1.5
    assert prose.parts["test"] == (text / "test.txt").read_text()
