"""The tool that runs transformers' own tests: what it compares, and that the tests notice another attention."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import transformers_suite as suite  # noqa: E402

PASSED, FAILED = suite.Result("passed", "", 1), suite.Result("failed", "AssertionError: 1 != 2\nmore", 1)
TESTS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

SIZES = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=32, vocab_size=9)


def test_matches_eager():
    kinds = (LlamaModel, LlamaForCausalLM, LlamaForSequenceClassification)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    for model in [kind(LlamaConfig(pad_token_id=0, **SIZES)).eval() for kind in kinds]:
        found = model(ids)[0]
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(ids)[0])


def test_logits_are_large(tmp_path):
    def sizes(model):
        attention = model.model.layers[0].self_attn
        return [float(x.weight.std()) for x in (attention.q_proj, attention.k_proj, attention.v_proj)]

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    q, k, v = sizes(model)
    assert 25 * v < min(q, k) and max(q, k) < 35 * v
    model.save_pretrained(tmp_path)
    assert sizes(LlamaForCausalLM.from_pretrained(tmp_path)) == [q, k, v]


def test_keeps_requested_attention():
    model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_is_replaced(tmp_path):
    config = LlamaConfig(**SIZES)
    for _ in range(2):  # A config that another model has used is no exception.
        assert LlamaForCausalLM(config).config._attn_implementation == "subquad"
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert LlamaForCausalLM.from_pretrained(tmp_path).model.layers[0].self_attn.subquad_choice.method.name == "linear"


def test_slow_is_not_selected():
    raise AssertionError


def test_skipped():
    __import__("pytest").skip("for a reason")
"""


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with the files of a transformers repository that the tool needs."""
    for name, text in {
        "src/transformers/__init__.py": '__version__ = "5.0.0"\n',
        "tests/test_modeling_common.py": "",
        "tests/models/tiny/test_modeling_tiny.py": TESTS,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path


def main(monkeypatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["transformers_suite.py", *map(str, words)])
    return suite.main()


def test_the_tests_notice_another_attention(checkout):
    try:
        version("transformers")
    except PackageNotFoundError:
        pytest.skip("transformers is not installed; pip install 'subquad[transformers]'")
    found = suite.run(checkout, "tiny", "linear", checkout / "results.jsonl")
    assert {name: result.outcome for name, result in found.items()} == {
        "test_matches_eager": "failed",
        "test_logits_are_large": "passed",
        "test_keeps_requested_attention": "passed",
        "test_is_replaced": "passed",
        "test_skipped": "skipped",
    }
    assert [result.replaced for result in found.values()] == [3, 2, 0, 4, 0]
    assert "Mismatched elements" in found["test_matches_eager"].message
    assert found["test_skipped"].message == "Skipped: for a reason"


@pytest.mark.parametrize(("outcome", "code"), [(PASSED, 0), (FAILED, 1)])
def test_the_exit_code_says_whether_there_are_differences(checkout, monkeypatch, capsys, outcome, code):
    monkeypatch.setattr(suite, "run", lambda _, model, method, __: {"T::test_a": outcome if method else PASSED})
    out = checkout / "report.md"
    assert main(monkeypatch, checkout, "--models", "tiny", "--methods", "exact", "--out", out) == code
    text = out.read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert f"| tiny | 1 | 1 / 0 / 0 | {1 - code} / {code} / 0 |" in text
    assert ("| tiny | exact | test_a | passed | failed | **not documented: AssertionError: 1 != 2** |" in text) == code


def test_documented_differences_are_not_faults(monkeypatch):
    monkeypatch.setattr(suite, "DOCUMENTED", [suite.Cause("not supported", "test_a", "1 != 2")])
    found = {("m", ""): {"T::test_a": PASSED, "T::test_b": PASSED}, ("m", "exact"): {"T::test_a": FAILED}}
    (known, missing) = suite.changes(found, ["m"], ["exact"])
    assert known.cause == "not supported" and known.row.endswith("| test_a | passed | failed | not supported |")
    assert not missing.cause and "the process ended before this test" in missing.row
    other = suite.Result("failed", "TypeError", 1)  # of a test for which another failure is documented
    assert not suite.changes({**found, ("m", "exact"): {"T::test_a": other}}, ["m"], ["exact"])[0].cause


def test_a_wrong_folder_is_named(tmp_path, monkeypatch, capsys):
    assert main(monkeypatch, tmp_path / "none") == 2
    assert "none: expected a checkout of the transformers repository" in capsys.readouterr().err


def test_a_model_without_tests_is_named(checkout, monkeypatch, capsys):
    assert main(monkeypatch, checkout, "--models", "missing") == 2
    assert "missing/test_modeling_missing.py: no such file" in capsys.readouterr().err
