"""The whole page in a browser: silent, self-contained, usable with a keyboard, on a phone, in the dark and on paper."""

import json
import re

import pytest
from axe_playwright_python.sync_playwright import Axe

from small_runs import reseal, small, start, write_text
from subquad_lab.report.page import page as page_of
from subquad_lab.training.run import all_runs

PHONE_WIDTH = 390
UNFOLD = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
FOCUSED = """(() => {
    const focused = document.activeElement;
    return focused.closest(".predict") ? "answer" : focused.className || focused.id || focused.tagName;
})()"""
# A lazy image that is not seen is never decoded.
DECODED = """Promise.all([...document.images].map((image) => { image.loading = "eager"; return image.decode(); }))
    .then((all) => all.length)"""
ATTACK = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def opened(open_page, report):
    """The page in a wide window, for tests that leave it as it was."""
    return open_page(report)


def test_nothing_is_logged_and_nothing_is_requested(opened, report):
    for summary in opened.page.locator("details.run > summary").all():
        summary.click()
    assert opened.page.evaluate(DECODED) == 2  # a confusion matrix and the plot of a claim
    opened.assert_silent(report)


def test_the_page_is_small_and_ready_at_once(open_page, report):
    assert report.stat().st_size < 4_000_000
    ready = [int(open_page(report).page.evaluate("document.documentElement.dataset.ready")) for _ in range(3)]
    assert min(ready) < 1000


def test_a_script_that_the_page_did_not_bring_does_not_run(open_page, report, tmp_path):
    text = report.read_text()
    for planted in (
        "<script>document.title = 'planted'</script>",
        "<img src=x onerror=\"document.title = 'planted'\">",
    ):
        path = tmp_path / "planted.html"
        path.write_text(text.replace("</main>", f"{planted}</main>"))
        found = open_page(path)
        found.page.wait_for_timeout(100)
        assert found.page.title() == "Subquad: report"
        assert any("Content Security Policy" in message for message in found.messages)


def test_text_from_records_is_shown_as_text(open_page, checked, tmp_path):
    """In the name of a run, in its config, in the name of its data and in a claim."""
    experiment, config = small("rnn", write_text(tmp_path / "text"))
    run, _ = start(config, tmp_path / "runs", "rnn", experiment)
    about = json.loads((run.folder / "run.json").read_text())
    about["data"]["name"] = about["versions"]["torch"] = ATTACK
    (run.folder / "run.json").write_text(json.dumps(about))
    settings = (run.folder / "config.yaml").read_text()
    (run.folder / "config.yaml").write_text(re.sub("(?m)^data: .*", f"data: {json.dumps(ATTACK)}", settings))
    reseal(run.folder)
    named = run.folder.with_name(ATTACK.replace("/", "") + 200 * "x")  # a folder cannot have a slash in its name
    run.folder.rename(named)
    claim = {**checked[0], "statement": ATTACK, "mistake": ATTACK}
    path = tmp_path / "report.html"
    path.write_text(page_of(all_runs(tmp_path / "runs"), [claim]))
    found = open_page(path)
    found.page.on("dialog", lambda dialog: found.messages.append("a script of a record ran"))
    found.page.locator("details.run > summary").click()
    found.page.locator(".predict button").first.click()
    assert found.page.locator("img[src=x]").count() == 0
    for place in (".made-by code", ".measured td:nth-child(5)", ".config code", ".statement", ".predict button"):
        assert ATTACK in " ".join(found.page.locator(place).all_inner_texts()), place
    for place in (".measured td:first-child", ".plot-legend button", "details.run > summary"):
        assert named.name in " ".join(found.page.locator(place).all_inner_texts()), place
    for width in (1280, PHONE_WIDTH):  # The name is long.
        found.page.set_viewport_size({"width": width, "height": 900})
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    found.assert_silent(path)


def test_all_controls_can_be_used_with_the_keyboard_alone(open_page, report):
    page = open_page(report).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    visited: set[str] = set()
    while (kind := page.evaluate(FOCUSED)) != "BODY":  # to which the focus returns after the last element
        page.keyboard.press("Tab")
        visited.add(kind)
        kind = page.evaluate(FOCUSED)
        if kind == "theme":
            page.keyboard.press("Enter")
            assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        if kind == "plot-area":
            page.keyboard.press("End")
            assert page.evaluate("document.activeElement.parentElement.querySelector('.value').textContent") != ""
        if kind == "answer" and kind not in visited:
            page.keyboard.press("Space")
            assert page.locator(".card.answered .evidence").first.is_visible()
            assert page.evaluate(FOCUSED) == "answer"  # The focus stays where it was.
    assert {"theme", "plot-area", "scroll", "SUMMARY", "answer"} <= visited
    summary = page.locator("#experiments > details > summary")
    summary.focus()
    page.keyboard.press("Enter")
    assert not page.locator("#experiment-language").is_visible()
    for place in ("experiments", "experiment-language", "experiment-language"):  # The address is the same twice.
        page.locator("#experiments > details, #experiment-language > details").evaluate_all(
            "all => all.forEach((each) => { each.open = false; })"
        )
        page.locator(f".contents a[href='#{place}']").focus()
        page.keyboard.press("Enter")
        page.locator("#experiment-language").wait_for()
    page.locator("#experiment-language .question").wait_for()


def test_a_plot_shows_values_and_toggles_its_lines_and_scales(opened, report):
    plot = opened.page.locator("[data-plot='language-measure'] figure")
    shown = json.loads(opened.page.locator("#data-experiments").text_content())
    series = shown["language-measure"]["series"]
    assert {len(line["x"]) for line in series} == {5} and "low" in series[0]
    plot.locator(".plot-area").hover()
    plot.locator(".plot-area").press("End")
    value = plot.locator(".value").first.inner_text()
    mean, low, high = map(float, re.findall(r"[\d.]+", value))
    for found, expected in ((mean, series[0]["y"]), (low, series[0]["low"]), (high, series[0]["high"])):
        assert found == pytest.approx(expected[-1], rel=1e-3)
    before = plot.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    plot.locator(".plot-legend button").first.click()
    assert plot.locator(".plot-legend button").first.get_attribute("aria-pressed") == "false"
    hidden = plot.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    assert hidden != before
    plot.locator(".plot-legend button").first.click()
    assert plot.locator("canvas").evaluate("canvas => canvas.toDataURL()") == before
    plot.get_by_role("button", name="log y").click()
    assert plot.locator("canvas").evaluate("canvas => canvas.toDataURL()") != before
    plot.get_by_role("button", name="log y").click()
    plot.locator(".plot-table > summary").click()
    plot.locator(".plot-table tbody tr").first.wait_for()  # It is filled when it opens.
    assert plot.locator(".plot-table tbody tr").count() == 5
    assert opened.messages == []


def test_a_value_that_is_missing_leaves_a_gap(opened):
    """Not so where only another line has a value: of these lines, one has none at x = 2, the other a gap at 4 and 5."""
    found = opened.page.evaluate("""async () => {
        const place = document.querySelector("main").appendChild(document.createElement("div"));
        const a = { name: "a", x: [1, 3, 4], y: [1, 3, 4] };
        const series = [a, { name: "b", x: [1, 2, 4, 5, 6], y: [1, 2, null, null, 6] }];
        const plot = Subquad.plot(place, { title: "gaps", x: { label: "x" }, y: { label: "y" }, series });
        await new Promise(requestAnimationFrame); // Now it is drawn.
        const at = [1, 2, 3, 4, 5, 6].map((x) => {
            plot.drawn.setCursor({ left: plot.drawn.valToPos(x, "x"), top: 0 });
            return [...place.querySelectorAll(".value")].map((each) => each.textContent);
        });
        const gaps = plot.drawn.series.slice(1).map((line) => line._paths.gaps.length);
        place.remove();
        return [at, gaps];
    }""")
    values, gaps = found
    assert values == [["1", "1"], ["1", "2"], ["3", "2"], ["4", ""], ["", ""], ["", "6"]]
    assert gaps == [0, 1]


def test_a_phone_never_scrolls_sideways(open_page, report):
    opened = open_page(report, width=PHONE_WIDTH, has_touch=True, device_scale_factor=2)
    opened.page.locator("button.reveal").click()
    opened.page.evaluate(UNFOLD)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == PHONE_WIDTH
    wide = opened.page.evaluate(
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, .plot-table') && "
        f"e.getBoundingClientRect().right > {PHONE_WIDTH}).map((e) => e.className || e.tagName)"
    )
    assert wide == []


def background(page) -> float:
    """Return the brightness of the page, from 0 to 255."""
    return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")))) / 3


def test_the_page_is_dark_where_the_reader_wants_it(open_page, report):
    page = open_page(report, color_scheme="dark").page
    assert background(page) < 50
    dark = page.locator("canvas").first.evaluate("canvas => canvas.toDataURL()")
    page.locator("#theme").click()
    assert background(page) > 200
    assert page.locator("canvas").first.evaluate("canvas => canvas.toDataURL()") != dark


def test_paper_is_light_and_shows_every_answer(open_page, report):
    page = open_page(report, color_scheme="dark").page
    page.locator("#claims > details > summary").click()  # It is closed now.
    assert page.pdf().startswith(b"%PDF")  # sends beforeprint and afterprint
    assert not page.locator("#claims > details").evaluate("details => details.open")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert background(page) > 200
    assert page.locator(".evidence").first.is_visible() and page.locator(".statement").first.is_visible()
    assert not page.locator("#theme").is_visible() and not page.locator(".predict").first.is_visible()
    numbers = page.locator(".head-methods td.number").all_inner_texts()
    assert len(numbers) > 5 and all(re.fullmatch(r"\d+(\.\d{3})?", number) for number in numbers)


def test_without_scripts_everything_is_visible(open_page, report, checked):
    page = open_page(report, java_script_enabled=False).page
    assert page.locator("noscript img").count() == 2 and page.locator("noscript img").first.is_visible()
    assert page.locator("noscript img").first.evaluate("image => image.naturalWidth") > 0
    for claim in checked:
        card = page.locator(f"[data-claim='{claim['number']}']")
        assert card.locator(".statement").is_visible() and card.locator(".evidence").is_visible()
    assert not page.locator("button").first.is_visible()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", PHONE_WIDTH)])
def test_axe_finds_nothing_serious(open_page, report, scheme, width):
    opened = open_page(report, width, color_scheme=scheme, bypass_csp=True)  # axe is added as a script
    page = opened.page
    page.locator("#head [data-place=explorer]").scroll_into_view_if_needed()
    page.wait_for_selector("#head [data-milliseconds]")  # It is drawn when it is seen.
    page.locator(".predict button").first.click()
    page.evaluate(UNFOLD)
    opened.assert_accessible()
    page.locator("button.reveal").click()
    opened.assert_accessible()


def test_axe_finds_a_planted_fault(open_page, report, tmp_path):
    path = tmp_path / "planted.html"
    path.write_text(report.read_text().replace("</main>", "<button></button></main>"))
    found = Axe().run(open_page(path, bypass_csp=True).page).response["violations"]
    assert "button-name" in [each["id"] for each in found]
