"""Each claim holds, for any seed and size; each can fail; and the page about them is current."""

import importlib.util
import json
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from subquad import Linear, RandomFeatures, Separable
from subquad._engines.features import forms
from subquad_lab.cli import main
from subquad_lab.experiments import language
from subquad_lab.models import images
from subquad_lab.theory import SUBJECTS, all_claims, networks, optimizers, recurrence
from subquad_lab.theory.attention import costs, features, kernels, scaled_features
from subquad_lab.theory.claims import CLAIMS, Check, Finding, Setting, at_least, at_most, claim, equal, shown, small
from subquad_lab.theory.counting import attention, counted, misfit

ROOT = Path(__file__).parents[3]
NUMBERS = [claim.number for claim in all_claims()]


@cache
def finding(number: int, seed: int = 0, size: int = 1) -> Finding:
    return CLAIMS[number].check(Setting(seed, size))


def test_there_are_23_claims_on_four_subjects():
    assert list(range(1, 24)) == NUMBERS
    assert {claim.subject for claim in all_claims()} == set(SUBJECTS)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_claim_holds_for_other_seeds_and_sizes(number):
    """5 of the 15 settings of five seeds and three sizes: each seed once, and each size. By hand all were run."""
    wanted = finding(number).verdict
    assert wanted.startswith("holds"), [c for c in finding(number).checks if c.holds == c.is_mistake]
    assert ("mistake" in wanted) == (CLAIMS[number].mistake is not None)
    for seed, size in ((1, 0), (2, 2), (3, 0), (4, 2)):
        found = finding(number, seed, size)
        assert found.verdict == wanted, [c for c in found.checks if c.holds == c.is_mistake]


def wrong_gradients(*given):
    """The slope of the sigmoid forgotten."""
    e, before, h, y, wanted, parts = given
    d1 = y - wanted
    d2 = d1 @ parts["U"].mT
    return {"U": h.mT @ d1, "b2": d1[0], "I": e.mT @ d2, "H": before.mT @ d2, "b1": d2[0], "e": d2 @ parts["I"].mT,
            "h'": d2 @ parts["H"].mT}  # fmt: skip


class LearnedPool(nn.MaxPool2d):
    """Pooling that has something to learn."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.weight = nn.Parameter(torch.ones(3))


BROKEN = [
    (1, costs, "HEAD_TIME", [(1, 1)]),
    (1, costs, "HEAD_MEMORY", [(1, 1)]),
    (1, costs, "Exact", Separable),
    (2, costs, "IN_TURN_TIME", [(2, 1, 1), (1, 1, 1)]),
    (2, costs, "IN_TURN_MEMORY", [(2, 0, 1), (1, 1, 1), (0, 2, 1)]),
    (2, costs, "Exact", Separable),
    (3, costs, "head_parameters", lambda width, heads: 3 * width**2 * heads),
    (3, costs, "layer_work", lambda length, width, heads: 8 * length * width**2 + 4 * length**2 * width // heads),
    (3, costs, "softmax_work", lambda length, heads: length**2),
    (4, features, "feature_count", lambda width, degree: degree * width + 1),
    (4, features, "feature_count_of_degree_2", lambda width: 1 + width + width**2 // 2),
    (4, features, "monomial_weight", lambda exponents: 1.0),
    (4, features, "monomials", lambda width, degree: [tuple(p * (i == j) for j in range(width)) for i in range(width)
                                                      for p in range(degree + 1)]),
    (5, features, "normalized", lambda weights, values: weights @ values * weights.sum(-1, keepdim=True)),
    (6, features, "linear_crossover", lambda features, width: features),
    (6, features, "REASSOCIATED", [(2, 1, 1)]),
    (6, features, "AS_WRITTEN", [(1, 1, 1)]),
    (7, kernels, "separable_rank", lambda length, width: length),
    (7, kernels, "SEPARABLE_TIME", [(2, 1)]),
    (8, features, "estimate_variance", lambda q, k, count: float((2 * q[0] @ k[0]).exp() / count)),
    (8, features, "estimate_variance", lambda q, k, count: float(
        (q[0] @ k[0]).exp() * torch.expm1((q[0] + k[0]).square().sum()) / count)),
    (8, features, "kernel", lambda q, k: float((-q[0] @ k[0]).exp())),
    (8, features, "orthogonal_gain", lambda apart: 1.0),
    (9, kernels, "WITHOUT_RIGHT", [(2, 1)]),
    (9, kernels, "WITHOUT_LEFT", [(1, 2)]),
    (9, kernels, "Linear", lambda _: Linear("relu")),
    (10, kernels, "copied_weight", lambda size: (1 / (1 + 2 * math.exp(-2 * size**2)), 1 / (1 + math.exp(-size**2)))),
    (10, kernels, "copied_norm", lambda size: 2 * size),
    (10, kernels, "shared_product", lambda size: 0.0),
    (11, recurrence, "one_from_the_other", lambda h, s: h),
    (12, recurrence, "step_jacobian", lambda w, slope: w * slope[..., :, None]),
    (12, recurrence, "largest_eigenvalue", lambda delta, gamma: delta / gamma**2),
    (12, recurrence, "largest_eigenvalue", lambda delta, gamma: delta**2 / gamma),
    (12, recurrence, "vanishing_bound", lambda delta, steps: delta ** (2 * steps)),
    (12, recurrence, "vanishing_bound", lambda delta, steps: delta ** (steps - 1)),
    *((13, recurrence, "explosion_threshold", wrong) for wrong in (
        lambda gamma: 1 / gamma, lambda gamma: 2 / gamma**2, lambda gamma: gamma, lambda gamma: 4 / gamma**2)),
    (14, recurrence, "even_wins", lambda x: (torch.sign(x[..., 0::2].sum(-1) - x[..., 1::2].sum(-1)) + 1) / 2),
    (15, recurrence, "one_step_gradients", wrong_gradients),
    (15, recurrence, "language_model_shapes", lambda words, embedding, width: {}),
    (15, recurrence, "language_model_shapes", lambda words, embedding, width: {
        "L": (embedding, words), "H": (width, width), "I": (embedding, width), "U": (width, words), "b1": (width,),
        "b2": (words,)}),
    (15, recurrence, "finite_differences", lambda loss, x: torch.zeros_like(x)),
    (16, recurrence, "perplexity", lambda entropy: 2**entropy),
    (16, language, "perplexity", lambda entropy: 2**entropy),
    (17, optimizers, "rate_of_momentum", lambda rate, share: rate),
    (18, optimizers, "held", lambda share, steps: 1 - share),
    (19, optimizers, "decay_of_penalty", lambda rate, penalty: -2 * rate * penalty),
    (19, optimizers, "decay_of_penalty", lambda rate, penalty: rate * penalty),
    (20, optimizers, "decoupled_share", lambda rate, steps: rate * steps),
    (21, networks, "convolution", lambda inward, outward, side=3: side**2 * inward * outward),
    (21, images.nn, "MaxPool2d", LearnedPool),
    (22, networks, "largest_eigenvalue_of_fixed", lambda: 2.0),
    (22, networks, "largest_eigenvalue_without_fix", lambda: 1.0),
    (22, networks, "matrix", lambda loops, how, matrix=networks.matrix: matrix(loops, "none")),
    (23, scaled_features, "best_scale", lambda width, square: -square / (2 * width)),
    (23, scaled_features, "scaled_variance", lambda width, square, scale: math.expm1(square / (1 - 8 * scale))),
    (23, scaled_features, "mistaken_constant", lambda width, scale: 1.0),
    (23, scaled_features, "mistaken_scale", lambda width, square: -0.01),
    (23, scaled_features, "kernel", lambda q, k: float((-q[0] @ k[0]).exp())),
]  # fmt: skip


def test_every_claim_is_broken_once():
    assert {number for number, *_ in BROKEN} == set(NUMBERS)


@pytest.mark.parametrize(("number", "module", "name", "wrong"), BROKEN, ids=[f"{n}-{name}" for n, _, name, _ in BROKEN])
def test_a_claim_that_is_broken_fails(number, module, name, wrong, monkeypatch):
    monkeypatch.setattr(module, name, wrong)
    assert CLAIMS[number].check(Setting()).verdict == "fails"


@pytest.mark.parametrize("number", [6, 7, 9])
def test_a_library_with_quadratic_cost_fails(number, monkeypatch):
    def quadratic(kernel, tokens, before, block):
        return forms.dense(kernel, tokens, False, block), None

    monkeypatch.setattr(forms, "linear", quadratic)
    assert CLAIMS[number].check(Setting()).verdict == "fails"


def test_orthogonal_draws_that_prefer_a_direction_fail(monkeypatch):
    """Householder's basis is uniform only with the signs of the triangle; the library's has them."""

    def without_signs(method: RandomFeatures, width: int) -> torch.Tensor:
        drawn = draw(method, width)
        if method.coupling != "orthogonal":
            return drawn
        blocks = drawn.view(-1, width, width)
        return torch.linalg.qr(blocks.mT)[0].mT.mul(blocks.norm(dim=-1, keepdim=True)).flatten(0, 1)

    draw = RandomFeatures.draw
    monkeypatch.setattr(RandomFeatures, "draw", without_signs)
    found = CLAIMS[8].check(Setting())
    assert [c.what for c in found.checks if not c.holds] == [c.what for c in found.checks if "bias of orth" in c.what]


# --- Checks and counts --------------------------------------------------------------------------------------------


def test_checks_hold_or_not():
    assert equal("", 1.0 + 1e-10, 1.0).holds
    assert not equal("", 1.0 + 1e-8, 1.0).holds
    assert equal("", 0.0, 0).holds
    assert not equal("", 1e-8, 0).holds
    assert not equal("", math.nan, 1.0).holds
    assert at_most("", 1.0, 1.0).holds
    assert not at_most("", math.nan, 1.0).holds
    assert not at_most("", -math.inf, 1.0).holds
    assert at_least("", 1.0, 1.0).holds
    assert not at_least("", math.nan, 1.0).holds


def test_a_mistake_that_holds_fails_the_claim():
    right, wrong = Check("", 1.0, "=", 1.0, True), Check("", 1.0, "=", 2.0, False, is_mistake=True)
    assert Finding([right], []).verdict == "holds"
    assert Finding([right, wrong], []).verdict == "holds, and the common mistake does not"
    assert Finding([right, wrong._replace(holds=True)], []).verdict == "fails"
    assert Finding([right._replace(holds=False), wrong], []).verdict == "fails"


def test_rounding_errors_are_shown_by_their_bound():
    assert shown(at_most("", 3e-16, 1e-12)) == "below 1e-12"
    assert shown(at_most("", 3e-7, 1e-6)) == "below 1e-06"
    assert shown(at_most("", 3e-16, 0.02)) == "below 1e-12"
    assert shown(at_most("", 3e-16, 1e-15)) == "below 1e-15"
    assert shown(at_most("", 0.015, 0.02)) == "0.015"
    assert shown(at_most("", 0.5, 1e-6)) == "0.5"
    assert shown(at_most("", 0, 1000)) == "below 1e-12"
    assert shown(at_most("", -5, 1.0)) == "-5"
    assert shown(at_least("", 3e-16, 0.0)) == "3e-16"
    assert small(3e-16) == "1e-12"
    assert small(0.0123) == "0.01"


def test_what_is_said_has_its_tolerance():
    assert at_most("", 1.0, 1000).claimed == "<= 1,000"
    assert at_least("", 1.0, 0.5).claimed == ">= 0.5"
    assert equal("", 1.0, 2145).claimed == "= 2,145"
    assert equal("", 1.0, 2145, within=0.1).claimed == "= 2,145 within 10%"


def test_counts_are_those_of_what_torch_did():
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    assert counted(lambda: a @ b).flops == 2 * 8 * 16 * 4
    assert counted(lambda: (a.softmax(-1), b.exp())).exponentials == 8 * 16 + 16 * 4

    def in_turn():
        first = torch.zeros(1000)
        second = first + 1
        del first
        return second + 1

    assert counted(in_turn).peak_bytes == 2 * 4000  # The first is gone when the third comes.
    assert counted(lambda: a.view(-1)[3:]).peak_bytes == 0  # a view holds nothing
    assert torch.equal(counted(in_turn).result, torch.full((1000,), 2.0))


def test_attention_is_counted_in_operations_that_torch_counts():
    q, k, v = torch.randn(3, 40, 8, dtype=torch.float64)
    wanted = (q @ k.mT).softmax(-1) @ v
    exact = counted(lambda: attention(q, k, v, method=costs.Exact()))
    assert torch.allclose(exact.result, wanted)
    assert (exact.flops, exact.exponentials) == (4 * 40**2 * 8, 40**2)
    works = [
        counted(lambda order=order: attention(q, k, v, method=Linear("identity"), order=order)).flops
        for order in ("linear", "quadratic")
    ]
    assert works == [4 * 40 * 8**2 + 4 * 40 * 8, 4 * 40**2 * 8 + 2 * 40**2]


def test_a_fit_finds_its_terms_and_no_others():
    sizes = [(i, j) for i in (1, 2, 4) for j in (1, 3, 9)]
    values = [3 * i * i + 2 * i * j for i, j in sizes]
    assert misfit([(2, 0), (1, 1)], sizes, values) == (pytest.approx(0, abs=1e-12), [3.0, 2.0])
    assert misfit([(2, 0)], sizes, values)[0] > 0.2


def test_numbers_of_claims_are_used_once():
    with pytest.raises(ValueError, match="22"):
        claim(22, "", "")(lambda setting: Finding([], []))


# --- The command --------------------------------------------------------------------------------------------------


def test_verify_prints_a_line_for_each_claim(capsys):
    assert main(["verify", "networks", "14", "21"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["21", "22", "14"]
    assert "[parameters, pool, 28 x 28, counted: 224,892 (= 224,892);" in lines[0]
    assert "mistake: parameters with pooling / with strides, 28 x 28: 1 (<= 0.999)" in lines[0]


def test_verify_as_json_with_pictures(capsys, tmp_path):
    assert main(["verify", "12", "16", "--json", "--plots", str(tmp_path / "plots"), "--seed", "3"]) == 0
    twelve, sixteen = json.loads(capsys.readouterr().out)
    assert twelve["number"] == 12
    assert twelve["holds"] is True
    assert twelve["checks"][1]["measured"] == 0
    assert sixteen["verdict"] == "holds"
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["claim-12.svg"]
    assert (tmp_path / "plots" / "claim-12.svg").read_bytes().startswith(b"<?xml")


def test_verify_explains(capsys):
    assert main(["verify", "10", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "Common mistake: |x1| = 2 B" in said
    assert "Verdict: holds, and the common mistake does not" in said
    assert main(["verify", "12", "--explain"]) == 0
    assert 10 <= len([line for line in capsys.readouterr().out.splitlines() if line]) <= 14


@pytest.mark.parametrize("number", NUMBERS)
def test_a_derivation_has_a_few_lines_with_numbers(number):
    steps = finding(number).derivation
    assert 3 <= len(steps) <= 14
    assert any(re.search(r"\d", step) for step in steps)
    assert all(step[-1] in ".)" for step in steps), "each is a sentence, for the page has them in a list"


def test_a_claim_that_fails_is_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(recurrence, "perplexity", lambda entropy: 2**entropy)
    assert main(["verify", "14", "16"]) == 1
    said = capsys.readouterr()
    assert "16 fails" in said.out
    assert "1 of 2 claims fail: 16" in said.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["24"], "CLAIMS: expected attention, recurrence, optimizers, networks, or a number from 1 to 23, got '24'"),
        (["--seed", "-1"], "--seed: expected an integer in [0, 2^32)"),
        (["14", "--plots", "/dev/null/x"], "--plots: cannot create /dev/null/x"),
    ],
)
def test_verify_says_what_is_wrong(options, message, capsys):
    assert main(["verify", *options]) == 2
    assert message in capsys.readouterr().err


# --- The page -----------------------------------------------------------------------------------------------------


def test_the_page_is_current():
    spec = importlib.util.spec_from_file_location("theory_page", ROOT / "tools" / "theory_page.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = (ROOT / "docs" / "theory.md").read_text()
    assert page == tool.page({number: finding(number) for number in NUMBERS}), "run: python tools/theory_page.py"
    assert "\n- The scores Q K^T are" in page, "lines of a quotation would run together"
    for picture in re.findall(r"\]\((theory/.*?\.svg)\)", page):
        assert (ROOT / "docs" / picture).read_bytes().startswith(b"<?xml")
    assert len(list((ROOT / "docs" / "theory").iterdir())) == page.count("](theory/")
