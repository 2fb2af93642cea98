"""The needle experiment of the page: the shipped measurements fit together, and the tool measures what it says."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import subquad
from subquad.methods import label_of
from subquad_lab.models.pretrained import Layer
from subquad_lab.report.needle_data import needle_data

TOOLS = Path(__file__).parents[3] / "tools"


def load_tool(name, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = spec_from_file_location(name, TOOLS / f"{name}.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


class Letters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text):
        return type("Encoded", (), {"input_ids": list(map(ord, text))})

    def decode(self, numbers):
        return "".join(map(chr, numbers))


def test_the_shipped_answers_fit_together():
    data = needle_data()
    assert data["answer"] in data["needle"]
    assert len(data["sha256"]) == 64
    for length in data["lengths"]:
        assert [place["depth"] for place in length["places"]] == sorted({place["depth"] for place in length["places"]})
        assert length["sentences"] <= len(data["sentences"])
        for place in length["places"]:
            assert len(place["methods"]) == len(data["methods"])
            for row in place["methods"]:
                assert row["is_found"] == (row["answer"].strip() == data["answer"])
                assert 0 <= row["probability"] <= 1


def test_the_tool_measures_what_the_page_says(monkeypatch):
    tool, data = load_tool("page_needle", monkeypatch), needle_data()
    assert [label_of(method) for method in tool.METHODS] == data["methods"]
    assert [length["tokens"] for length in data["lengths"]] == [*tool.LENGTHS]
    assert (tool.NEEDLE.strip(), tool.QUESTION.strip(), tool.ANSWER.strip()) == (
        data["needle"], data["question"], data["answer"],
    )  # fmt: skip


@pytest.mark.parametrize("depth", [0, 0.5, 1])
def test_a_case_puts_the_needle_between_two_sentences(monkeypatch, depth):
    tool, sentences = load_tool("page_needle", monkeypatch), [" One two.", " Three.", " Four five six."]
    whole = len("".join(sentences)) + len(tool.NEEDLE) + len(tool.QUESTION) + len(tool.ANSWER)
    case = tool.Case(Letters(), sentences, whole, depth)
    text = Letters().decode(case.tokens[0].tolist())
    cut = {0: 0, 0.5: 2, 1: 3}[depth]
    before, after = "".join(sentences[:cut]), "".join(sentences[cut:])
    assert text == before + tool.NEEDLE + after + tool.QUESTION + tool.ANSWER
    assert (case.sentence, case.place) == (cut, len(before))
    assert "".join(text[i] for i in case.answer_places) == tool.ANSWER
    assert text[: case.asking + 1].endswith(tool.QUESTION)


def test_the_weight_of_the_needle_is_that_of_its_answer(monkeypatch):
    tool = load_tool("page_needle", monkeypatch)
    case = tool.Case(Letters(), [" One two."], 500, 0)
    q, k = torch.randn(1, 4, case.asking + 1, 8), torch.randn(1, 2, case.asking + 1, 8)
    layer = Layer(q, k, k, q, None, True)
    weights = (q[0, 3, -1] @ k[0, 1].mT / 8**0.5).softmax(-1)
    expected = float(weights[case.answer_places.start : case.answer_places.stop].sum())
    assert tool.weight(subquad.Exact(), layer, case, head=3) == pytest.approx(expected, rel=1e-4)


def test_kinds_of_heads_are_measured(monkeypatch):
    tool = load_tool("page_heads", monkeypatch)
    n = 80
    tokens = torch.arange(n) % 40  # Every token from 40 on has occurred before.
    rows = torch.arange(n)
    weights = torch.zeros(4, n, n)
    weights[0, rows, (rows - 15).clamp(min=0)] = 1  # the farthest token that counts as near
    weights[1, :, 0] = 1
    weights[2, rows, (rows - 39).clamp(min=0)] = 1  # the token after the earlier occurrence
    weights[3] = torch.ones(n, n).tril() / (rows + 1)[:, None]
    found = tool.figures(weights, tokens)
    assert [float(own) for own in found["local"][:3]] == [1, 0, 0]
    assert [float(own) for own in found["sink"][:3]] == [0, 1, 0]
    assert [float(own) for own in found["induction"][:3]] == [0, 0, 1]
    assert float(found["diffuse"][3]) == pytest.approx(float((rows[64:] + 1).log().mean()), rel=1e-5)
