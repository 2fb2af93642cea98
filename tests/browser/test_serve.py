"""The served page in a browser: progress and curves grow while a run is written, and nothing is logged."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from small_runs import unfinish
from subquad_lab.report.live import watcher
from subquad_lab.report.live.server import Server

EVIL = "script><img src=x onerror=alert(1)>"  # in the folder "<"


@pytest.fixture
def growing(small_runs, tmp_path, monkeypatch) -> Iterator[tuple[Server, Path]]:
    """A server of a folder with an unfinished run, and the folder of the run."""
    monkeypatch.setattr(watcher, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "FIND_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "BUSY_SHARE", 0.5)
    run = tmp_path / "runs" / "<" / EVIL
    shutil.copytree(small_runs / "transformer", run)
    unfinish(run)
    with Server(tmp_path / "runs", 0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server, run
        server.shutdown()


def values(page, title: str) -> list[list[str]]:
    """Return the table of the values of a plot."""
    figure = page.locator(".live-runs figure", has=page.locator("figcaption", has_text=title))
    figure.locator("details.plot-table").evaluate("(details) => { details.open = true; }")
    figure.locator("tbody tr").first.wait_for()
    return figure.locator("tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((c) => c.textContent))"
    )


def append(run: Path, step: int, **figures: float) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "epoch": step / 10, **figures}) + "\n")


def test_curves_grow_and_runs_appear_without_reloading(open_page, growing, small_runs):
    server, run = growing
    opened = open_page(f"http://127.0.0.1:{server.port}/")
    page, row = opened.page, opened.page.locator(".live-runs article").first
    row.get_by_text("step 30 of 30").wait_for()
    assert row.locator("h3").text_content() == f"</{EVIL}"
    before = values(page, "training loss")
    assert len(before) == 30
    row.locator("figure button").first.focus()
    for step in range(31, 61):  # more than the number of points with dots
        append(run, step, loss=0.5)
    append(run, 60, **{"valid/perplexity": 1.25})
    row.get_by_text("step 60 of 30").wait_for()
    after = values(page, "training loss")
    assert after[:30] == before and after[30:] == [[str(step), "0.5"] for step in range(31, 61)]
    assert values(page, "validation perplexity")[-1] == ["60", "1.25"]
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"  # A curve that grows does not move the focus.
    shutil.copytree(small_runs / "transformer", server.watcher.root / "later")
    page.locator(".live-runs h3", has_text="later").first.wait_for()
    shutil.rmtree(server.watcher.root / "later")
    page.locator(".live-runs h3", has_text="later").first.wait_for(state="detached")
    assert page.locator("img[src=x]").count() == 0
    assert opened.messages == []
    assert set(opened.requests) == {f"http://127.0.0.1:{server.port}/{path}" for path in ("", "events")}


def test_damage_is_shown_and_the_page_fits_a_phone(open_page, growing):
    server, run = growing
    opened = open_page(f"http://127.0.0.1:{server.port}/", width=390, color_scheme="dark")
    page = opened.page
    page.get_by_text("step 30 of 30").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    with (run / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    page.get_by_text("is not a valid record").first.wait_for()
    assert opened.messages == []


def test_axe_finds_nothing_serious(open_page, growing):
    server, _ = growing
    opened = open_page(f"http://127.0.0.1:{server.port}/", bypass_csp=True)  # axe is added as a script
    opened.page.get_by_text("step 30 of 30").wait_for()
    opened.assert_accessible()
