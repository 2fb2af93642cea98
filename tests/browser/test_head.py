"""The head explorer: its methods equal the library on the same tensors, and its controls show them."""

import warnings

import pytest
import torch

import subquad
from subquad.methods import label_of
from subquad_lab.report.head_data import MAKERS, SETTINGS, heads

CASES = [
    *SETTINGS.items(),
    ("window", {"size": 16, "sinks": 0}),
    ("taylor", {"degree": 1}),
    ("taylor", {"degree": 4}),
    ("random", {"features": 80}),
    ("multipole", {"window": 64, "sinks": 4, "block": 16, "top": 1}),
    ("multipole", {"window": 16, "sinks": 0, "block": 8, "top": 2}),
    ("multipole", {"window": 32, "sinks": 1, "block": 4, "top": 3}),
]
ROWS = [0, 1, 63, 64, 324, 477, 579, 580, 711]
COMPUTE = """([cases, rows]) => {
  const data = JSON.parse(document.getElementById("data-head").textContent), own = Subquad.headMethods;
  const buffer = own.bytes(data.tensors), projections = own.floats(data.projections), found = [];
  data.heads.forEach((_, number) => {
    const head = own.head(buffer, number, data.tokens.length, data.width);
    const exact = own.outputs(head, own.methods.exact(head));
    for (const [name, settings] of cases) {
      const method = own.methods[name](head, {...settings, projections}), outputs = own.outputs(head, method);
      found.push({
        weights: rows.map((i) => Array.from(method(i).weights)), error: own.error(outputs, exact),
        outputs: rows.map((i) => Array.from(outputs.subarray(i * head.d, (i + 1) * head.d))),
      });
    }
  });
  return found;
}"""


def computed(head, name, settings, dtype):
    """Return the library's outputs (n, d) and weights (n, n): attention with the identity as values."""
    q, k, v = (x[None, None].to(dtype) for x in head[-3:])
    values = torch.cat([v, torch.eye(len(v[0, 0]), dtype=dtype)[None, None]], -1)
    with warnings.catch_warnings(action="ignore"):  # Some are far outside their range, which the page shows.
        found = subquad.attention(q, k, values, is_causal=True, method=MAKERS[name](**settings))[0, 0]
    return found.double().split([v.shape[-1], len(values[0, 0])], -1)


def test_weights_outputs_and_errors_equal_the_library(open_page, report):
    found = iter(open_page(report).page.evaluate(COMPUTE, [CASES, ROWS]))
    for head in heads()[1]:
        exact, _ = computed(head, "exact", {}, torch.float64)
        for name, settings in CASES:
            outputs, weights = computed(head, name, settings, torch.float64)
            own, where = next(found), (head.kind, name, settings)
            shown = torch.tensor(own["outputs"], dtype=torch.float64)
            assert (shown - outputs[ROWS]).abs().max() < 1e-4, where
            for i, row in zip(ROWS, own["weights"], strict=True):
                assert (torch.tensor(row, dtype=torch.float64) - weights[i, : i + 1]).abs().max() < 1e-4, (where, i)
            assert own["error"] == pytest.approx(float((outputs - exact).norm() / exact.norm()), abs=1e-4), where
    assert next(found, None) is None


def cells(page, name):
    """Return the numbers in the line of a method; its head error is there after a moment."""
    line = page.locator(".head-methods tr", has_text=name)
    page.wait_for_function("line => !line.textContent.includes('…')", arg=line.element_handle())
    return line.locator("td.number").all_inner_texts()


def test_keys_change_the_query_the_method_and_its_settings(open_page, report):
    opened = open_page(report)
    page, (_, own) = opened.page, heads()
    page.locator("#head [data-place=explorer]").scroll_into_view_if_needed()
    page.get_by_role("radio", name="diffuse").focus()
    page.keyboard.press("ArrowLeft")  # induction
    page.get_by_role("slider", name="query").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.get_by_role("radio", name="Multipole()").focus()
    page.keyboard.press("ArrowDown")
    page.get_by_role("slider", name="window", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".head-texts h4").all_inner_texts() == ["Exact attention", "Window(65, sinks=4)"]
    head = next(head for head in own if head.kind == "induction")
    exact, _ = computed(head, "exact", {}, torch.float64)
    window, weights = computed(head, "window", {"size": 65, "sinks": 4}, torch.float64)
    row = float((window[-2] - exact[-2]).norm() / exact[-2].norm())
    whole = float((window - exact).norm() / exact.norm())
    assert cells(page, "Window(65, sinks=4)") == [f"{row:.3f}", f"{whole:.3f}", "69", "0", str(711 - 69)]
    shades = page.evaluate("[...document.querySelectorAll('.head-text')].map(box => [...box.children].map(span => "
                           "Number(span.style.getPropertyValue('--strength'))))")  # fmt: skip
    expected = (weights[-2] / weights[-2].max()).sqrt()
    assert torch.tensor(shades[1]).sub(expected).abs().max() < 1e-3
    opened.assert_silent(report)


def test_a_click_on_a_token_makes_it_the_query(open_page, report):
    page = open_page(report).page
    page.locator("#head [data-place=explorer]").scroll_into_view_if_needed()
    page.locator(".head-exact [data-token='150']").click()
    assert page.get_by_role("slider", name="query").input_value() == "150"
    assert page.locator(".head-exact .query").get_attribute("data-token") == "150"
    assert page.locator(".head-exact .later").count() == 711 - 150


def test_a_sentence_says_why_a_series_fails(open_page, report):
    page = open_page(report).page
    page.locator("#head [data-place=explorer]").scroll_into_view_if_needed()
    page.get_by_role("radio", name="Taylor(2)").check()
    said = page.locator(".head-reason").inner_text()
    head = next(head for head in heads()[1] if head.kind == "induction")
    low, high = subquad.logit_range(*(x[None, None] for x in head[-3:-1]), is_causal=True, rows=712)
    assert said.startswith("Why is Taylor(2) wrong in this row")
    assert f"this head run from {low:.4g} to {high:.4g}" in said


def test_labels_are_those_of_the_library(open_page, report):
    page = open_page(report).page
    page.locator("#head [data-place=explorer]").scroll_into_view_if_needed()
    shown = page.locator(".head-methods label").all_inner_texts()
    assert [text.strip() for text in shown] == [label_of(MAKERS[name](**own)) for name, own in SETTINGS.items()]


def test_the_explorer_fits_a_phone(open_page, report):
    page = open_page(report, width=390).page
    page.locator("#head [data-place=explorer]").scroll_into_view_if_needed()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_without_scripts_a_table_has_the_errors(open_page, report):
    page = open_page(report, java_script_enabled=False).page
    assert page.locator("#head [data-place=explorer]").is_hidden()
    assert page.locator("#head tbody tr").count() == len(SETTINGS)
