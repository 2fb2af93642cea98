"""The sentences at the top of the report: their numbers are those of the records and of the planner."""

import re

import pytest

import subquad
from subquad_lab.report import summary
from subquad_lab.report.part import Material


def section(*scores, better="lower", **changes):
    rows = [
        {"label": f"model {i}", "score": score, "test": "not finished" if score is None else f"{score + 1:.4f}",
         "seeds": 1, "steps": 30, "data": "a text", "command": f"subquad train language --seed {i}"} | changes
        for i, score in enumerate(scores)
    ]  # fmt: skip
    return {"name": "language", "measure": "perplexity", "better": better, "rows": rows, "groups": {}}


@pytest.mark.parametrize(("better", "best"), [("lower", 2), ("higher", 1)])
def test_the_best_row_by_validation_is_named_with_its_test_result(better, best):
    scores = (5.0, 7.0, 3.0, None)
    found = summary.measured(section(*scores, better=better))
    assert f"model {best}, the best of 3 by validation perplexity," in found.text
    assert f"a test perplexity of {scores[best] + 1:.4f} on a text" in found.text
    assert (found.number, found.command) == (f"{scores[best] + 1:.4f}", f"subquad train language --seed {best}")


def test_an_unfinished_experiment_says_so():
    found = summary.measured(section(None))
    assert "not finished; model 0 has trained for 30 steps" in found.text and found.number == "30 steps"


def test_the_interval_over_seeds_is_in_the_sentence():
    found = summary.measured(section(5.0, test="6.1 +- 0.3", seeds=3))
    assert "6.1 +- 0.3 (mean over 3 seeds, 95 % confidence)" in found.text and found.number == "6.1"


def claim(verdict, *mistakes):
    return {"verdict": verdict, "checks": [{"is_mistake": each} for each in mistakes]}


def test_claims_that_hold_are_counted():
    (found,) = summary.checked([claim("holds", False), claim("holds", False, True, True), claim("fails", False)])
    assert found.text.startswith("2 of 3 claims of the theory hold") and "For 1 of them" in found.text
    assert summary.checked([]) == []


def test_the_speed_is_that_of_the_planner():
    (found,) = summary.planned()
    options = dict(re.findall(r"--([\w-]+) (\S+)", found.command))
    plan = subquad.plan(
        query_length=int(options["length"]), heads=int(options["heads"]), head_dim=int(options["head-dim"]),
        logit_range=float(options["logit-range"]), is_causal=True,
    )  # fmt: skip
    exact = next(each for each in plan.candidates if each.form == "exact")
    assert float(found.number.split()[0]) == pytest.approx(exact.seconds / plan.choice.seconds, rel=0.05)
    assert plan.reason in found.text


def test_a_machine_that_was_not_calibrated_is_not_measured_for_the_report(monkeypatch):
    monkeypatch.setattr(summary, "cached", lambda device, dtype: None)
    monkeypatch.setattr(subquad, "plan", lambda **arguments: pytest.fail("it measures the machine"))
    assert summary.planned() == []


def test_there_are_at_most_four_sentences():
    material = Material([section(1.0) for _ in range(5)], claims=[claim("holds", False)])
    assert [each.section for each in summary.headlines(material)] == ["cost", "claims", *["experiment-language"] * 2]
