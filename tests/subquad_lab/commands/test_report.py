"""The report: every run, published figures apart, nothing executed, no request."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from small_runs import reseal, unfinish
from subquad_lab.cli import main
from subquad_lab.experiments.language import EXPERIMENT


class Page(HTMLParser):
    """Every element and attribute, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(file: Path) -> Page:
    page = Page()
    page.feed(file.read_text())
    return page


def test_the_report_shows_every_run_and_tells_published_figures_apart(trained, options, tmp_path, capfd):
    main(["train", "language", *options, "--seed=1"])
    out = tmp_path / "report.html"
    assert main(["report", "--root", str(tmp_path / "runs"), "--out", str(out)]) == 0
    page = page_of(out)
    result = json.loads((trained / "result.json").read_text())
    assert f"{result['test']['perplexity']:,.2f}" in page.text
    assert "language-001" in page.text
    assert "language-002" in page.text
    assert sum(tag == "svg" for tag, _ in page.elements) == 3  # both curves, and one of both
    rows = [attributes for tag, attributes in page.elements if tag == "tr"]
    published = [row for row in rows if row.get("class") == "published"]
    assert len(published) == len(EXPERIMENT.published)
    assert "published: sigmoid RNN" in page.text
    assert "Results on different data cannot be compared" in page.text
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_one_seed_twice_is_not_two_seeds(trained, options, tmp_path, capfd):
    main(["train", "language", *options])
    main(["train", "language", *options, "--seed=1"])
    out = tmp_path / "report.html"
    assert main(["report", "--root", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "language-001, 2 seeds" in page_of(out).text
    assert "3 seeds" not in page_of(out).text


def test_a_series_a_comparison_or_a_sweep_is_reported_by_its_folder(options, tmp_path, capfd):
    main(["train", "language", *options, "--seeds=2"])
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs" / "language-001"), "--out", str(out)]) == 0
    assert "language-001, 2 seeds" in page_of(out).text


def test_nothing_on_the_page_asks_another_machine(trained, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(trained), "--out", str(out)]) == 0
    for tag, attributes in page_of(out).elements:
        assert tag not in ("script", "link", "iframe", "object", "embed", "img")
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert value.startswith("#"), (tag, name, value)
            assert not name.startswith("on")
    assert "default-src 'none'" in out.read_text()
    assert not re.search(r"url\((?!#)|@import", out.read_text())


def test_text_of_records_is_escaped(trained, tmp_path):
    attack = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    about = json.loads((trained / "run.json").read_text())
    about["data"]["name"] = attack
    about["versions"] = {attack: attack}
    (trained / "run.json").write_text(json.dumps(about))
    reseal(trained)
    evil = trained.with_name('"><script>x')
    trained.rename(evil)
    (evil / "curves.svg").write_text("<svg><script>alert(2)</script></svg>")  # Pictures are drawn anew.
    out = tmp_path / "report.html"
    assert main(["report", str(evil), "--out", str(out)]) == 0
    assert "alert(2)" not in out.read_text()
    assert {"script", "img"}.isdisjoint({tag for tag, _ in page_of(out).elements})
    assert attack in page_of(out).text


def test_runs_of_one_name_in_two_folders_are_told_apart(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "more" / trained.name)
    strange = tmp_path / "more" / "a$\\frac$"
    shutil.copytree(trained, strange)
    out = tmp_path / "report.html"
    assert main(["report", str(trained), str(tmp_path / "more" / trained.name), str(strange), "--out", str(out)]) == 0
    page = page_of(out)
    assert {"runs/language-001", "more/language-001"} <= set(re.findall(r"\w+/language-001", page.text))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{}", "for 'experiment', got"),
        ("run.json", '{"experiment": "chess", "data": {}, "parameters": {"total": 1}, "versions": {}}', "'chess'"),
        ("run.json", '{"experiment": "language", "data": [], "parameters": {}, "versions": {}}', "for 'data', got"),
        ("run.json", '{"experiment": "language", "data": {}, "parameters": {}, "versions": {}}', "the total"),
        ("result.json", '{"test": [1], "valid": {}}', "expected metrics under 'test'"),
        ("metrics.jsonl", "[1]\n{}\n", "line 1 is not a valid record"),
        ("metrics.jsonl", '{"step": 1, "loss": "<b>"}\n{}\n', "line 1 is not a valid record"),
        ("metrics.jsonl", "\udcff\n{}\n", "line 1 is not a valid record"),
    ],
)
def test_records_of_the_wrong_kind_are_told(file, content, message, trained, complaint, tmp_path):
    (trained / file).write_bytes(content.encode(errors="surrogateescape"))
    reseal(trained)
    line = complaint(["report", str(trained), "--out", str(tmp_path / "r.html")])
    assert message in line


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "[", "run.json: not a valid JSON file"),
        ("result.json", '{"test": [1], "valid": {}}', "expected metrics under 'test'"),
        ("metrics.jsonl", "[1]\n{}\n", "line 1 is not a valid record"),
        ("config.yaml", "experiment: chess\n", "'chess'"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(file, content, message, trained, tmp_path, capfd):
    bad = trained.with_name("language-002")
    shutil.copytree(trained, bad)
    (bad / file).write_text(content)
    reseal(bad)
    out = tmp_path / "report.html"
    assert main(["report", "--root", str(trained.parent), "--out", str(out)]) == 0
    warning = capfd.readouterr().err
    assert warning.startswith(f"subquad: warning: {bad} is damaged and left out: ")
    assert message in warning
    page = page_of(out)
    result = json.loads((trained / "result.json").read_text())
    assert f"{result['test']['perplexity']:,.2f}" in page.text
    assert "Damaged runs" in page.text
    assert re.search(rf"language-002: .*{re.escape(message)}", page.text)
    assert sum(tag == "svg" for tag, _ in page.elements) == 1  # the curves of the good one


def test_a_report_of_an_unfinished_run_says_so(trained, tmp_path):
    unfinish(trained)
    out = tmp_path / "report.html"
    assert main(["report", str(trained), "--out", str(out)]) == 0
    assert "not finished" in page_of(out).text


def test_damaged_records_are_told(trained, complaint, tmp_path):
    (trained / "run.json").write_text("[")
    reseal(trained)
    line = complaint(["report", str(trained), "--out", str(tmp_path / "r.html")])
    assert f"{trained / 'run.json'}: not a valid JSON file" in line
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("folder", [".", "/"])
def test_a_folder_as_the_file_is_refused_in_one_line(trained, tmp_path, capfd, folder):
    assert main(["report", "--root", str(tmp_path / "runs"), "--out", folder]) == 2
    assert capfd.readouterr().err == f"subquad: error: --out: expected a file, got the folder {folder}\n"
