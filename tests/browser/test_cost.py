"""The cost explorer in a browser: its numbers are Python's, and it is moved by keys and links."""

import math
import random
import re
import shlex
from dataclasses import astuple, fields, replace

import pytest

import subquad
from subquad.methods import label_of
from subquad_lab.cli import main
from subquad_lab.report import cost_explorer as explorer
from subquad_lab.report.cost_data import SLIDERS, START, machine
from subquad_lab.report.cost_explorer import Settings

COUNT, EXPLAINED = 200, 20  # random settings, and how many of them are planned with a reason

COMPUTE = """([settings, explained]) => {
  const { Settings, machine, ...model } = Subquad.costModel;
  const plain = (x) => (x === Infinity ? "inf" : x);
  return settings.map((values, i) => {
    const at = Settings.$new(...values);
    return {
      rows: model.measures_at(at, machine).map((row) =>
        [row.name, row.form, row.seconds, row.peak_bytes, plain(row.error.relative), row.error.__str__(), row.verdict]),
      choice: model.choice_at(at, machine).name,
      reason: i < explained ? model.plan_at(at, machine).reason : null,
    };
  });
}"""
FORMATS = """(cases) => cases.map(([value, spec]) => Subquad.python.format(value, spec))"""


@pytest.fixture(scope="module")
def opened(open_page, report):
    found = open_page(report)
    explained(found.page)
    return found


def explained(page) -> None:
    """Wait until everything is shown for the settings, also what waits for the reader to pause."""
    page.wait_for_selector("#cost[data-explained]", state="attached")


def random_settings(seed: int) -> list[Settings]:
    draw = random.Random(seed)
    found = []
    for _ in range(COUNT):
        values = {name: draw.choice(values) for name, (_, values) in SLIDERS.items()}
        if draw.random() < 0.5:  # as most models have it, and as torch has a kernel for
            values["value_width"] = values["width"]
        found.append(Settings(**values, is_causal=draw.random() < 0.5, training=draw.random() < 0.5))
    return found


def relative_difference(found, expected) -> float:
    if expected is None or math.isinf(expected):
        return 0.0 if found == (None if expected is None else "inf") else math.inf
    return abs(found - expected) / abs(expected) if expected else abs(found)


def test_numbers_and_choices_are_those_of_python(opened) -> None:
    settings, calibration, worst = random_settings(0), machine(), 0.0
    computed = opened.page.evaluate(COMPUTE, [[list(astuple(each)) for each in settings], EXPLAINED])
    for each, found in zip(settings, computed, strict=True):
        sizes = dict(query_length=each.length, head_dim=each.width, value_dim=each.value_width, heads=each.heads,
                     is_causal=each.is_causal, training=each.training)  # fmt: skip
        for method, row in zip(explorer.methods_at(each), found["rows"], strict=True):
            price = subquad.cost(method, **sizes)
            error = subquad.error(method, logit_range=each.logit_range, head_dim=each.width)
            verdict = "measure" if error.relative is None else "within" if error.is_within(each.max_error) else "above"
            assert (row[0], row[1], row[5], row[6]) == (label_of(method), price.form, str(error), verdict)
            expected = calibration.seconds(method, explorer.shape_at(each)), price.peak_bytes, error.relative
            worst = max(worst, *map(relative_difference, row[2:5], expected))
        if found["reason"] is None:
            assert found["choice"] == explorer.choice_at(each, calibration).name
        else:
            plan = subquad.plan(**sizes, max_error=each.max_error, logit_range=each.logit_range)
            assert (found["choice"], found["reason"]) == (plan.choice.name, plan.reason)
    assert worst < 1e-9  # asked for: 1e-6
    assert len({found["choice"] for found in computed}) > 10  # They differ, so that agreeing means something.


def test_numbers_are_written_as_python_writes_them(opened) -> None:
    draw, specs = random.Random(0), (",", "g", ".2g", ".1g", ".3g", ",.0f", ",.1f", ".1e")
    values = [0, 1, 0.125, 0.25, 2.5, 3.5, 12.5, 9.5, 0.00012345, 1e-5, 999.5, 99.95, 1e6, 123456.5, 1234567]
    values += [i / 16 for i in range(400)]  # Many of them lie in the middle of two numbers that can be written.
    values += [draw.choice([1, -1]) * 10 ** draw.uniform(-8, 12) for _ in range(300)]
    cases = [[value, spec] for value in values for spec in specs if spec != "," or isinstance(value, int)]
    expected = [format(value, spec) for value, spec in cases]
    assert opened.page.evaluate(FORMATS, cases) == expected


def test_it_says_what_the_table_and_the_plan_say(opened) -> None:
    page, plan = opened.page, explorer.plan_at(START, machine())
    assert page.text_content("#cost .choice") == plan.choice.name == "Taylor(2)"
    assert f"Taylor(2): {page.text_content('#cost .reason')}" == plan.reason
    names = page.locator("#cost tbody td:first-child").all_text_contents()
    assert names == [row.name for row in explorer.measures_at(START, machine())]
    lengths = page.locator("#cost tbody td:nth-child(4)").all_text_contents()
    taylor = subquad.crossover("exact", "taylor:2", by="time", head_dim=16, heads=8, is_causal=True)
    assert lengths[:2] == ["", f"{float(f'{taylor:.1e}'):,.0f} tokens"]
    assert lengths == [explorer.length_text(n) for n in explorer.faster_from(START, machine())]


def test_keys_move_the_sliders_and_the_address_keeps_them(open_page, report) -> None:
    opened = open_page(report)
    page = opened.page
    page.focus("#cost-length")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")  # heads
    page.keyboard.press("End")
    page.focus("#cost-logit_range")
    page.keyboard.press("End")
    page.focus("#cost-is_causal")
    page.keyboard.press("Space")
    explained(page)
    moved = replace(START, length=24_576, heads=64, logit_range=20, is_causal=False)
    assert page.get_attribute("#cost-length", "aria-valuetext") == "24,576"
    assert page.text_content("output[for=cost-heads]") == "64"
    assert page.text_content("#cost .choice") == "Exact()"
    plan = explorer.plan_at(moved, machine())
    assert f"Exact(): {page.text_content('#cost .reason')}" == plan.reason
    other = open_page(report, fragment=page.evaluate("location.hash.slice(1)")).page  # the link, in another window
    explained(other)
    for field in fields(Settings):
        if field.name in SLIDERS:
            shown = SLIDERS[field.name][1][int(other.input_value(f"#cost-{field.name}"))]
        else:
            shown = other.is_checked(f"#cost-{field.name}")
        assert (field.name, shown) == (field.name, getattr(moved, field.name))
    assert other.text_content("#cost .reason") == page.text_content("#cost .reason")
    other.click("#cost button:has-text('Reset')")
    explained(other)
    assert other.text_content("#cost .choice") == "Taylor(2)"
    assert opened.messages == []


@pytest.mark.parametrize("fragment", ["cost?length=abc&heads=&degree=9999&is_causal=maybe", "cost?", "cost"])
def test_an_address_that_makes_no_sense_is_brought_into_range(open_page, report, fragment) -> None:
    opened = open_page(report, fragment=fragment)
    explained(opened.page)
    assert opened.page.text_content("output[for=cost-length]") == "16,384"
    assert opened.page.text_content("output[for=cost-degree]") == ("8" if "9999" in fragment else "2")
    assert opened.messages == []


def test_the_page_says_the_same_with_and_without_scripts(opened, open_page, report) -> None:
    still = open_page(report, java_script_enabled=False).page
    for place in (".choice", ".reason", ".command", "caption"):
        assert opened.page.text_content(f"#cost {place}") == still.text_content(f"#cost {place}"), place
    shown, fixed = (page.locator("#cost tbody tr").all_inner_texts() for page in (opened.page, still))
    assert all(row.startswith(own) for row, own in zip(shown, fixed, strict=True))


def test_the_command_makes_the_plan(opened, capfd) -> None:
    command = shlex.split(opened.page.text_content("#cost .command"))
    assert command[0] == "subquad" and main(command[1:]) == 0
    sentence = re.match(rf".* within {START.max_error}", opened.page.text_content("#cost .reason"))[0]
    assert f"Taylor(2): {sentence}" in " ".join(capfd.readouterr().out.split())


def test_without_scripts_there_is_a_table(open_page, report) -> None:
    page = open_page(report, java_script_enabled=False).page
    assert page.locator("#cost tbody tr").count() == len(explorer.methods_at(START))
    assert not page.is_visible("#cost form")
    assert page.text_content("#cost .choice") == "Taylor(2)"
