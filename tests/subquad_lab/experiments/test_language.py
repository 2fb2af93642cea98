"""The language models: their equations, their streams, what they say."""

import json
import math
import re
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from small_runs import reseal
from subquad_lab import UsageError
from subquad_lab.cli import main
from subquad_lab.experiments import language, stored
from subquad_lab.experiments.language import Config, count_parameters, make_model, matched
from subquad_lab.experiments.positions import by_position
from subquad_lab.models import parameters
from subquad_lab.models.language import Transformer, choose, generate, rotate

WORDS = 30
RECURRENT = ("rnn", "lstm")
METHODS = ("exact", "taylor:2", "random:16", "linear:elu", "separable")


def model_of(name: str, **fields) -> torch.nn.Module:
    torch.manual_seed(0)
    model, _, method = name.partition("/")
    config = Config(
        model=model, method=method or "exact", embedding=6, width=8, heads=2, layers=2, context=40, **fields
    )
    return make_model(config, WORDS).double().eval()


ALL = [*RECURRENT, *(f"transformer/{method}" for method in METHODS)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_text_cut_anywhere_gives_what_the_whole_gives(name, positions):
    model = model_of(name, positions=positions)
    tokens = torch.randint(WORDS, (3, 17), generator=torch.Generator().manual_seed(1))
    whole, _ = model(tokens, None)
    for sizes in ((17,), (1,) * 17, (5, 1, 11)):
        state, parts = model.start(3), []
        for piece in tokens.split(sizes, 1):
            logits, state = model(piece, state)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_no_word_sees_the_future(name):
    model = model_of(name)
    tokens = torch.randint(WORDS, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % WORDS
    one, other = model(tokens, None)[0], model(changed, None)[0]
    assert torch.equal(one[:, :7], other[:, :7])
    assert not torch.equal(one[:, 7:], other[:, 7:])


def test_the_recurrent_network_is_the_published_one():
    """h = sigmoid(h' H + e I + b1), y = h U + b2."""
    model = model_of("rnn", tied=False)
    tokens, h = torch.randint(WORDS, (1, 5), generator=torch.Generator().manual_seed(1)), torch.zeros(8).double()
    logits, last = model(tokens, None)
    L, H, I, b1 = model.embedding.inward, model.recurrent.weight.T, model.inward.weight.T, model.inward.bias  # noqa: E741
    U, b2 = model.embedding.outward.T, model.embedding.bias
    for t, word in enumerate(tokens[0]):
        h = torch.sigmoid(h @ H + L[word] @ I + b1)
        torch.testing.assert_close(logits[0, t], h @ U + b2)
    torch.testing.assert_close(last[0], h)


def test_the_gradient_of_one_step_is_the_one_on_paper():
    """d1 = y^ - y, d2 = (d1 U^T) h (1 - h), and what follows from them."""
    model = model_of("rnn", tied=False)
    before = torch.rand(1, 8, dtype=torch.float64, requires_grad=True)
    logits, h = model(torch.tensor([[3]]), before)
    F.cross_entropy(logits[0], torch.tensor([5])).backward()
    e, y = model.embedding.inward[3], F.one_hot(torch.tensor(5), WORDS)
    d1 = logits[0, 0].softmax(-1) - y
    d2 = (d1 @ model.embedding.outward) * h[0] * (1 - h[0])
    torch.testing.assert_close(model.embedding.outward.grad.T, h[0][:, None] * d1)
    torch.testing.assert_close(model.embedding.bias.grad, d1)
    torch.testing.assert_close(model.inward.weight.grad.T, e[:, None] * d2)
    torch.testing.assert_close(model.recurrent.weight.grad.T, before[0].detach()[:, None] * d2)
    torch.testing.assert_close(model.inward.bias.grad, d2)
    torch.testing.assert_close(model.embedding.inward.grad[3], d2 @ model.inward.weight)
    torch.testing.assert_close(before.grad[0], d2 @ model.recurrent.weight)


def test_parameters_are_counted_by_part():
    published = make_model(Config(model="rnn", embedding=256, width=512, tied=False), 10_000)
    d, D, V = 256, 512, 10_000
    assert parameters(published) == {
        "embedding": V * d + D * V + V, "inward": d * D + D, "recurrent": D * D,
        "total": V * d + D * D + d * D + D * V + D + V,
    }  # fmt: skip
    for name in ALL:
        model = model_of(name)
        assert parameters(model)["total"] == sum(p.numel() for p in model.parameters())
    tied, untied = (parameters(model_of("lstm", tied=tied))["total"] for tied in (True, False))
    assert untied - tied == WORDS * 8 - 6 * 8  # another matrix, and no narrowing to the width of the word vectors


@pytest.mark.parametrize("name", RECURRENT)
def test_models_are_compared_at_equal_parameters(name):
    total = count_parameters(Config(width=64), 2000)
    found = matched(Config(model=name, layers=1), 2000, total)
    assert count_parameters(found, 2000) == pytest.approx(total, rel=0.02)


def test_rotary_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    places = torch.arange(30)
    products = (rotate(q.expand(30, 6), places) @ rotate(k.expand(30, 6), places).T).float()
    for distance in (0, 3, 11):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert products.diagonal(0)[0] != pytest.approx(float(products.diagonal(5)[0]), rel=1e-3)


def test_learned_positions_end_with_the_context():
    model = Transformer(WORDS, 8, 1, 2, 10, 0.0, language.parse_method("exact"), "learned")
    with pytest.raises(ValueError, match="tokens: expected at most 10 with learned positions, got 11"):
        model(torch.zeros(1, 11, dtype=torch.long), None)


# --- Generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_generation_keeps_the_state_of_the_prompt(name):
    """The likeliest words, one by one, are those of reading the whole text again for each."""
    model = model_of(name)
    said = generate(model, [3, 1, 4], 8, temperature=0)
    text = [3, 1, 4]
    for word in said:
        assert word == int(model(torch.tensor([text]), None)[0][0, -1].argmax())
        text.append(word)


def test_generation_is_repeated_by_its_seed_and_ends_with_the_end():
    model = model_of("lstm")
    one, same, other = (generate(model, [1], 40, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert one == same != other
    assert len(one) == 40
    end = one[5]
    assert generate(model, [1], 40, generator=torch.Generator().manual_seed(1), end=end) == one[: one.index(end) + 1]
    assert 7 not in generate(model, [1], 400, generator=torch.Generator().manual_seed(1), banned=7)
    assert 7 in generate(model, [1], 400, generator=torch.Generator().manual_seed(1))


def test_choices_are_drawn_from_what_is_allowed():
    shares = torch.tensor([0.05, 0.5, 0.15, 0.3])
    generator = torch.Generator().manual_seed(0)

    def drawn(**limits) -> dict[int, float]:
        settings = dict(temperature=1.0, top_k=None, top_p=None) | limits
        words = [int(choose(shares.log(), generator=generator, **settings)) for _ in range(4000)]
        return {word: words.count(word) / 4000 for word in sorted(set(words))}

    assert drawn() == pytest.approx({0: 0.05, 1: 0.5, 2: 0.15, 3: 0.3}, abs=0.03)
    assert drawn(top_k=2) == pytest.approx({1: 0.625, 3: 0.375}, abs=0.03)
    assert drawn(top_p=0.8) == pytest.approx({1: 0.625, 3: 0.375}, abs=0.03)
    assert drawn(top_p=0.81).keys() == {1, 2, 3}
    assert drawn(top_p=0.01) == {1: 1.0}
    assert drawn(temperature=0) == {1: 1.0}
    assert drawn(temperature=0.5)[1] == pytest.approx(0.25 / 0.365, abs=0.03)


# --- The task -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rnn", "lstm", "transformer"])
def test_perplexity_counts_every_word_once(name, text):
    """Against reading each stream word by word, with the state, or the window, that the model has."""
    torch.manual_seed(0)
    task = language.build(Config(data=str(text), model=name, embedding=6, width=8, heads=2, context=8, batch=2))
    task.model.double().eval()
    words = task.corpus.test
    length = -(-(len(words) - 1) // language.EVALUATION_STREAMS)
    total = 0.0
    for first in range(0, len(words) - 1, length):
        stream = words[first : min(first + length, len(words) - 1) + 1]
        window = len(stream) if name != "transformer" else 8
        for begin in range(0, len(stream) - 1, window):
            piece = stream[begin : begin + window + 1]
            logits = task.model(piece[None, :-1], None)[0]
            total += F.cross_entropy(logits[0], piece[1:], reduction="sum").item()
    found = task.evaluate("test", lambda: None)
    assert found["cross_entropy"] == pytest.approx(total / (len(words) - 1), rel=1e-9)
    assert found["perplexity"] == pytest.approx(math.exp(found["cross_entropy"]))


def test_batches_are_contiguous_streams(text):
    task = language.build(Config(data=str(text), model="rnn", batch=3, context=7))
    rows = [torch.cat([task.batch(0, i)[0][row] for i in range(task.batches)]) for row in range(3)]
    length = (len(task.corpus.train) - 1) // 3
    for row, stream in enumerate(rows):
        assert torch.equal(stream, task.corpus.train[row * length :][: len(stream)])
    inputs, targets = task.batch(0, 1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_state_is_carried_between_steps_without_history(text):
    task = language.build(Config(data=str(text), model="lstm", batch=2, context=4))
    _, carry = task.loss(task.model, task.batch(0, 0), task.begin(2))
    assert not carry["state"].requires_grad
    assert carry["state"].abs().sum() > 0


def test_a_prompt_is_told_what_is_wrong_with_it(text):
    task = language.build(Config(data=str(text), model="rnn", context=8))
    with pytest.raises(UsageError, match="--prompt: 'zebra' is not in the model's vocabulary"):
        task.sample("w1 zebra", 5, 1.0, None, None, 0)
    with pytest.raises(UsageError, match="--prompt: expected at least one word"):
        task.sample(" ", 5, 1.0, None, None, 0)
    assert task.sample("w1 w2", 5, 1.0, None, None, 0).startswith("w1 w2 ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(width=10, heads=4), "heads: expected a divisor of the width 10, got 4"),
        (dict(dropout=1.0), r"dropout: expected a number in \[0, 1\), got 1.0"),
        (dict(method="nope"), "--method: expected one of 'exact', .* got 'nope'"),
        (dict(context=0), "context: expected a positive integer, got 0"),
    ],
)
def test_configs_that_make_no_sense_are_named(fields, message):
    with pytest.raises(UsageError, match=message):
        Config(**fields)


def test_a_text_that_is_too_short_is_named(text):
    with pytest.raises(UsageError, match="batch: 16 streams of 128 words need more than the 1,320 training words"):
        language.build(Config(data=str(text)))


# --- Perplexity by position ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_rotary_models_see_distances_only(name):
    """All positions moved by the same number: the same logits."""
    if name in RECURRENT:
        pytest.skip("has no positions")
    tokens = torch.randint(WORDS, (2, 12), generator=torch.Generator().manual_seed(1))
    places = torch.arange(12)
    rotary = model_of(name, positions="rotary")
    one, moved = (rotary(tokens, None, places + by)[0] for by in (0, 1000))
    # Kernels of feature methods depend on the rotated vectors themselves, not on their products alone.
    if name.endswith(("exact", "taylor:2")):
        torch.testing.assert_close(one, moved, rtol=1e-3, atol=1e-3)
    else:
        assert not torch.allclose(one, moved, rtol=1e-6, atol=1e-6)
    learned = model_of(name, positions="learned")
    one, moved = (learned(tokens, None, places + by)[0] for by in (0, 20))
    assert not torch.allclose(one, moved, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("longest", [5, 16, 40])
def test_each_position_is_predicted_from_all_words_before_it(longest):
    model = model_of("transformer/exact")
    words = torch.randint(WORDS, (60,), generator=torch.Generator().manual_seed(2))
    found = by_position(model, words, longest, lambda: None)
    edges = [0, *(edge for edge in (16, 32) if edge < longest), longest]
    assert found["edges"] == edges
    last = 59 - longest
    count = min(32, 1 + last // max(1, longest // 16))
    starts = [i * last // (count - 1) for i in range(count)]
    assert starts[0] == 0 and starts[-1] == last  # the whole text
    sums = [0.0] * longest
    for start in starts:
        for i in range(longest):
            logits, _ = model(words[None, start : start + i + 1], None)
            sums[i] += F.cross_entropy(logits[0, -1], words[start + i + 1]).item() / count
    wanted = [sum(sums[a:b]) / (b - a) for a, b in pairwise(edges)]
    assert found["cross_entropy"] == pytest.approx(wanted, rel=1e-9)


def test_positions_are_recorded_read_and_plotted(text, tmp_path, capfd):
    options = [f"--data={text}", "--width=8", "--heads=2", "--layers=1", "--context=8", "--batch=4", "--steps=2"]
    out = tmp_path / "runs"
    assert main(["train", "language", *options, "--longest=64", f"--out={out}"]) == 0
    record = json.loads((out / "language-001" / "positions.json").read_text())
    assert record["edges"] == [0, 16, 32, 64]
    capfd.readouterr()
    assert main(["evaluate", str(out / "language-001"), "--longest=64"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["position", "perplexity"]
    assert [line.split()[-1] for line in lines[1:]] == [f"{math.exp(x):.4g}" for x in record["cross_entropy"]]
    assert main(["train", "language", *options, f"--out={out}"]) == 0
    assert main(["report", f"--root={out}", "--out", str(tmp_path / "page.html")]) == 0
    assert 'alt="language: positions"' in (tmp_path / "page.html").read_text()


def test_learned_positions_are_not_evaluated_beyond_the_context(text, tmp_path, complaint):
    options = [f"--data={text}", "--width=8", "--heads=2", "--context=8", "--batch=4", "--steps=1"]
    message = complaint(["train", "language", *options, "--positions=learned", "--longest=9"])
    assert "longest: learned positions end with the context of 8 words, got 9; train with --positions rotary" in message
    out = tmp_path / "runs"
    assert main(["train", "language", *options, "--positions=learned", "--longest=8", f"--out={out}"]) == 0
    assert "learned positions end" in complaint(["evaluate", str(out / "language-001"), "--longest=9"])
    assert "expected at most 164, the number of predicted" in complaint(
        ["train", "language", *options, "--longest=999"]
    )


def test_a_config_without_the_new_fields_is_still_read(trained):
    """Runs of earlier versions have no `tokens` and no `longest`."""
    config = trained / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith(("tokens:", "longest:"))))
    reseal(trained)
    assert len(config.read_text().splitlines()) == len(lines) - 2
    _, task = stored.trained(trained)
    assert task.config.tokens == "words" and task.config.longest is None


# --- Characters -----------------------------------------------------------------------------------------------------


def test_a_character_model_is_trained_and_sampled(text, tmp_path, capfd):
    options = [f"--data={text}", "--model=rnn", "--embedding=6", "--width=8", "--context=5", "--batch=4", "--steps=2"]
    assert main(["train", "language", *options, "--tokens=characters", f"--out={tmp_path}"]) == 0
    about = json.loads((tmp_path / "language-001" / "run.json").read_text())
    assert about["data"]["words"] == 14  # <unk>, <eos>, w, a space, and ten digits
    capfd.readouterr()
    assert main(["sample", str(tmp_path / "language-001"), "--prompt=w1 w", "--words=4", "--count=1"]) == 0
    assert re.fullmatch(r"w1 w[w\d ]{0,4}", capfd.readouterr().out.rstrip("\n"))
