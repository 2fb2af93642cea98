"""Recall: what is learned, what is counted, what is refused, and the pictures of a comparison."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from small_runs import start
from subquad_lab import UsageError
from subquad_lab.cli import main
from subquad_lab.data.recall import IGNORED
from subquad_lab.experiments import EXPERIMENTS, recall
from subquad_lab.experiments.recall import Config, build, family, make_model, numbers_of, variants
from subquad_lab.models.recall import shifted

TINY = dict(pairs="2,3", length=16, vocabulary=12, width=8, heads=2, batch=4)
SMALL = dict(pairs="4,8,16", length=64, vocabulary=64, width=32, heads=2)  # as the preset "quick"
METHODS = ("exact", "taylor:2", "random:16", "linear:elu", "separable", "window:4", "window:4,taylor:2")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("positions", ["none", "rotary", "learned"])
def test_no_token_sees_the_future(method, positions):
    torch.manual_seed(0)
    model = make_model(Config(**TINY | dict(method=method, positions=positions, layers=2))).double()
    tokens = torch.randint(12, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 12
    one, other = model(tokens), model(changed)
    assert torch.equal(one[:, :9], other[:, :9])
    assert not torch.equal(one[:, 9], other[:, 9])


def test_half_of_an_embedding_is_that_of_the_previous_token():
    x = torch.arange(24.0).view(2, 3, 4)
    assert shifted(x)[0].tolist() == [[0, 1, 0, 0], [4, 5, 2, 3], [8, 9, 6, 7]]
    with_shift, without = (make_model(Config(**TINY | dict(shift=shift))) for shift in (True, False))
    one, other = torch.tensor([[1, 2]]), torch.tensor([[3, 2]])
    embedded = [model.transformer.embedding for model in (with_shift, without)]
    assert not torch.equal(embedded[0](one)[:, 1], embedded[0](other)[:, 1])
    assert torch.equal(embedded[1](one)[:, 1], embedded[1](other)[:, 1])


def test_each_layer_has_its_own_method():
    model = make_model(Config(**TINY | dict(method="window:4,taylor:2", layers=3)))
    assert [type(block.method).__name__ for block in model.transformer.blocks] == ["Window", "Taylor", "Window"]


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("exact", 16 * 2 * 8),  # keys and values of all tokens
        ("linear:elu", 2 * 4 * (4 + 1)),  # for each head, d features times d values and the normalizer
        ("taylor:2", 2 * 15 * (4 + 1)),  # C(4 + 2, 2) features
    ],
)
def test_states_have_the_size_on_paper(method, numbers):
    task = build(Config(**TINY | dict(method=method, layers=2)))
    stabilizers = 2 * 2 * 2  # up to two numbers for each head and layer
    assert 0 <= task.about()["state_bytes"] / 4 - (2 * numbers + 8 // 2) <= stabilizers


def test_a_window_is_as_large_at_every_length():
    short, long = (build(Config(**TINY | dict(method="window:4", length=length))).about() for length in (16, 64))
    assert short["state_bytes"] == long["state_bytes"]
    assert short["data"]["sha256"] != long["data"]["sha256"]


def test_the_loss_is_the_mean_of_the_means_of_the_sequences():
    """So that the gradients of two processes, with half of the rows each, have the mean of all rows."""
    task = build(Config(**TINY | dict(task="induction", pairs="8")))
    tokens, targets = task.batch(0, 0)
    assert len({int(count) for count in (targets != IGNORED).sum(1)}) > 1
    loss, _ = task.loss(task.model, (tokens, targets), {})
    rows = [
        F.cross_entropy(task.model(tokens[i : i + 1])[0][targets[i] != IGNORED], targets[i][targets[i] != IGNORED])
        for i in range(len(tokens))
    ]
    torch.testing.assert_close(loss, torch.stack(rows).mean())


def test_accuracy_counts_queries_only():
    task = build(Config(**TINY))
    task.model = lambda tokens: F.one_hot(tokens, 12).float()  # answers each query with its key: never right
    task.model.parameters = lambda: iter([torch.zeros(1)])
    assert set(task.evaluate("test", lambda: None).values()) == {0.0}
    answers = {part: rows[1] for part, rows in task.tests["test"].items()}
    given = iter(answers.values())
    task.model = lambda tokens: F.one_hot(next(given).clamp(min=0), 12).float()
    task.model.parameters = lambda: iter([torch.zeros(1)])
    assert task.evaluate("test", lambda: None) == {
        "accuracy": 1.0, "accuracy_2_pairs": 1.0, "accuracy_3_pairs": 1.0
    }  # fmt: skip


def test_batches_are_new_in_each_step_and_tests_are_the_same_for_all_seeds():
    one, other = build(Config(**TINY)), build(Config(**TINY | dict(seed=1)))
    assert one.about()["data"] == other.about()["data"]
    rows = [task.batch(epoch, index)[0] for task in (one, other) for epoch, index in ((0, 0), (0, 2), (1, 0))]
    assert all(not torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])
    counts = [(one.batch(0, index)[1] != IGNORED).sum(1).tolist() for index in range(4)]
    assert counts == [[2] * 4, [3] * 4, [2] * 4, [3] * 4]  # the numbers of pairs in turn


def test_attention_learns_to_recall_and_a_narrow_window_cannot(tmp_path):
    common = dict(
        pairs="2,4",
        length=24,
        vocabulary=16,
        width=16,
        heads=1,
        batch=32,
        steps=150,
        evaluate_every=150,
        lr=0.01,
        warmup=50,
    )
    _, exact = start(Config(**common), tmp_path, "exact", recall.EXPERIMENT)
    _, window = start(Config(**common | dict(method="window:4")), tmp_path, "window", recall.EXPERIMENT)
    assert exact["test"]["accuracy"] > 0.97
    assert window["test"]["accuracy"] < 0.4  # 1 of 8 values by chance


def test_a_comparison_plots_accuracy_against_the_state(tmp_path, capfd, monkeypatch):
    few = ("exact", "window:8", "window:16")
    chosen = replace(EXPERIMENTS["recall"], variants=lambda own: {name: variants(own)[name] for name in few})
    monkeypatch.setitem(EXPERIMENTS, "recall", chosen)
    options = [f"--{name}={value}" for name, value in (TINY | dict(length=32, steps=2, seeds=2)).items()]
    out = tmp_path / "compare"
    assert main(["compare", "recall", *options, "--out", str(out)]) == 0
    shown = capfd.readouterr().out
    assert re.search(r"variant +parameters .* state", shown)
    assert f"{out / 'recall.svg'}" in shown
    states = {variant: found["runs"][0]["state_bytes"] for variant, found in
              json.loads((out / "compare.json").read_text()).items()}  # fmt: skip
    assert states["window:8"] < states["window:16"] < states["exact"]
    picture = (out / "recall.svg").read_text()
    assert picture.startswith("<?xml")
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert 'alt="recall: recall"' in page


def test_variants_differ_in_the_state_and_not_in_parameters():
    found = variants(Config(**SMALL))
    totals = {build(config).about()["parameters"]["total"] for config in found.values()}
    states = {name: build(config).about()["state_bytes"] for name, config in found.items()}
    assert len(totals) == 1
    assert states["linear:elu 8 wide"] < states["linear:elu 16 wide"] < states["taylor:2 8 wide"] < states["exact"]
    assert "window:16,taylor:2" not in found
    assert "window:16,taylor:2" in variants(Config(**SMALL, layers=2))


def test_methods_of_one_kind_are_one_line():
    assert [family(spec) for spec in ("exact", "random:64", "linear:elu", "window:4,taylor:2")] == [
        "exact", "random", "linear:elu", "window,taylor"
    ]  # fmt: skip


def test_one_number_of_pairs_may_be_a_number(tmp_path):
    """As YAML and `sweep --grid.pairs 2,3` have it."""
    assert numbers_of(8) == numbers_of("8") == [8]
    options = [f"--{name}={value}" for name, value in (TINY | dict(steps=1, pairs=2)).items()]
    assert main(["sweep", "recall", "--grid.pairs", "2,3", *options, "--out", str(tmp_path / "sweep")]) == 0
    assert main(["train", "recall", *options, "--out", str(tmp_path / "runs")]) == 0
    run = str(tmp_path / "runs" / "recall-001")
    assert main(["train", "--resume", run]) == 0
    assert main(["evaluate", run]) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(pairs="4,x"), "pairs: expected positive integers separated by commas, got '4,x'"),
        (dict(pairs=""), "pairs: expected positive integers"),
        (dict(pairs="0"), "pairs: expected positive integers"),
        (dict(pairs="40"), "vocabulary: 64 tokens are enough for at most 32 pairs, got --pairs 40"),
        (dict(length=20), "length: expected at least 48 tokens for 16 pairs, got 20"),
        (dict(length=10**9), "length: expected at most 16,777,216 tokens in a batch"),
        (dict(width=33), "heads: expected a divisor of the width 33, got 2"),
        (dict(layers=0), "layers: expected a positive integer, got 0"),
        (dict(method="taylor:2,nope"), "--method: expected one of 'exact', .* got 'nope'"),
        (dict(method="random:99999999"), "method: expected at most 65,536 features"),
        (dict(method="window:16,taylor:2"), "method: expected no more methods than --layers 1, got"),
    ],
)
def test_configs_that_make_no_sense_are_named(fields, message):
    with pytest.raises(UsageError, match=message):
        Config(**SMALL | fields)
