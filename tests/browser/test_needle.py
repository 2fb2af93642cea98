"""The needle in the page: what it shows at each place is what was measured there."""

import pytest

from subquad_lab.report.needle_data import needle_data


@pytest.fixture(scope="module")
def data():
    return needle_data()


def answers(page):
    """Return for each method what is said about the needle, the answer, and the weight."""
    table = page.locator("#needle [data-place=needle] tbody").first
    return table.evaluate("body => [...body.rows].map(row => [...row.cells].slice(1).map(cell => cell.innerText))")


def test_keys_move_the_needle_through_texts_of_all_lengths(open_page, report, data):
    opened = open_page(report)
    page = opened.page
    assert len(data["lengths"]) == 3
    for number, length in enumerate(data["lengths"]):
        page.get_by_role("radio", name=f"{length['tokens']:,} tokens").check()
        page.get_by_role("slider", name="depth").focus()
        page.keyboard.press("Home")
        for place in length["places"]:
            shown = answers(page)
            assert [row[0] for row in shown] == ["✓ found" if own["is_found"] else "✗ lost" for own in place["methods"]]
            assert [row[1] for row in shown if row[0] == "✓ found"] == [data["answer"]] * sum(
                own["is_found"] for own in place["methods"]
            )
            text = page.locator(".needle-text").inner_text()
            before = "".join(data["sentences"][: place["sentence"]]).strip()
            assert text.startswith(f"{before} {data['needle']}".strip())
            page.keyboard.press("ArrowRight")
        grid = page.locator(".needle-grid tbody tr").all()
        assert [row.locator(".found").count() for row in grid] == [count[number] for count in data["counts"]]
    opened.assert_silent(report)


def test_the_needle_is_in_view(open_page, report):
    page = open_page(report).page
    for place in ("Home", "End"):
        page.get_by_role("slider", name="depth").focus()
        page.keyboard.press(place)
        inside = page.evaluate("""() => {
          const box = document.querySelector(".needle-text").getBoundingClientRect();
          const mark = document.querySelector(".needle-text mark").getBoundingClientRect();
          return mark.top >= box.top && mark.bottom <= box.bottom;
        }""")
        assert inside, place


def test_the_needle_fits_a_phone_and_needs_no_scripts(open_page, report, data):
    assert open_page(report, width=390).page.evaluate("document.documentElement.scrollWidth") <= 390
    page = open_page(report, java_script_enabled=False).page
    assert page.locator("#needle [data-place=needle]").is_hidden()
    rows = page.locator("#needle tbody tr").all()
    assert [list(map(int, row.locator("td").all_inner_texts())) for row in rows] == data["counts"]
