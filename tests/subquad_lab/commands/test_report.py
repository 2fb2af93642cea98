"""The report: every run, published figures apart, nothing executed, no request."""

import base64
import hashlib
import json
import math
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from small_runs import reseal, unfinish
from subquad_lab.cli import main
from subquad_lab.experiments.language import EXPERIMENT


class Page(HTMLParser):
    """Every element and attribute, the text that is seen, and the data of the scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.code: list[str] = []
        self.data: dict[str, Any] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        attributes = self.elements[-1][1] if self.elements else {}
        if self.cdata_elem is None:
            self.text += data
        elif attributes.get("type") == "application/json":
            self.data[attributes["id"]] = json.loads(data)
        else:
            self.code.append(data)

    def all_of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == tag]


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
    assert len(page.all_of("img")) == 1  # the curves of both, which are shown without scripts
    published = [row for row in page.all_of("tr") if row.get("class") == "published"]
    assert len(published) == len(EXPERIMENT.published)
    assert "sigmoid RNN" in page.text
    assert "results on different data cannot be compared" in " ".join(page.text.split())
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_one_seed_twice_is_not_two_seeds(trained, options, tmp_path, capfd):
    main(["train", "language", *options])
    main(["train", "language", *options, "--seed=1"])
    out = tmp_path / "report.html"
    assert main(["report", "--root", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "language-001, 2 seeds" in page_of(out).text
    assert "3 seeds" not in page_of(out).text
    main(["train", "language", *options, "--seed=5"])
    assert main(["report", "--root", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert re.search(r"--context 5  # and with --seed 1, 5\n", page_of(out).text)


def test_a_series_a_comparison_or_a_sweep_is_reported_by_its_folder(options, tmp_path, capfd):
    main(["train", "language", *options, "--seeds=2"])
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs" / "language-001"), "--out", str(out)]) == 0
    page = page_of(out)
    assert "language-001, 2 seeds" in page.text
    command = re.search(r"subquad train language .*", page.text)[0]
    assert "--seeds 2" in command and "--width 8" in command and "--seed " not in command
    (curve,) = page.data["data-experiments"]["language-measure"]["series"]
    finals = [float(json.loads(file.read_text().splitlines()[-1])["valid/perplexity"])
              for file in (tmp_path / "runs").rglob("metrics.jsonl")]  # fmt: skip
    assert (curve["low"][-1], curve["high"][-1]) == (min(finals), max(finals))
    assert curve["y"][-1] == pytest.approx(sum(finals) / 2)


def test_a_run_that_diverged_is_shown_with_gaps(trained, options, tmp_path, capfd):
    main(["train", "language", *options, "--seed=1"])
    log = trained / "metrics.jsonl"
    log.write_text(re.sub(r'("valid/perplexity": )[^,}]+', r"\1NaN", log.read_text()))
    result = json.loads((trained / "result.json").read_text())
    result["test"]["perplexity"] = math.nan
    (trained / "result.json").write_text(json.dumps(result))
    reseal(trained)
    out = tmp_path / "report.html"
    assert main(["report", "--root", str(tmp_path / "runs"), "--out", str(out)]) == 0
    (curve,) = page_of(out).data["data-experiments"]["language-measure"]["series"]
    assert set(curve["y"] + curve["low"] + curve["high"]) == {None}


def test_the_command_of_a_run_makes_the_same_config(options, tmp_path, capfd):
    main(["train", "language", *options, "--tied=false", "--clip=null", "--seed=7"])
    out = tmp_path / "report.html"
    assert main(["report", "--root", str(tmp_path / "runs"), "--out", str(out)]) == 0
    command = re.search(r"subquad (train language .*)", page_of(out).text)[1]
    assert main([*shlex.split(command), "--out", str(tmp_path / "again")]) == 0
    one, other = ((tmp_path / root / "language-001/config.yaml").read_text() for root in ("runs", "again"))
    assert one == other


def test_nothing_on_the_page_asks_another_machine(trained, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(trained), "--out", str(out)]) == 0
    page = page_of(out)
    assert_loads_nothing(page)
    assert "default-src 'none'" in policy_of(page)
    assert not re.search(r"url\((?!#|%23)|@import", out.read_text())


def assert_loads_nothing(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "svg")
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert value.startswith(("#", "data:image/svg+xml,") if tag == "img" else "#"), (tag, name, value)
            assert not name.startswith("on") and name != "style"


def policy_of(page: Page) -> str:
    (found,) = [meta["content"] for meta in page.all_of("meta") if "http-equiv" in meta]
    return found


def test_the_policy_allows_exactly_the_scripts_and_styles_of_the_page(trained, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(trained), "--out", str(out)]) == 0
    page = page_of(out)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'" for code in page.code]
    rules = dict(rule.split(" ", 1) for rule in policy_of(page).split("; "))
    assert sorted(f"{rules['script-src']} {rules['style-src']}".split()) == sorted(hashes)
    assert "unsafe" not in policy_of(page) and rules["connect-src"] == "'none'"


def test_text_of_records_is_escaped(trained, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(trained), "--out", str(out)]) == 0
    scripts = len(page_of(out).all_of("script"))
    attack = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    about = json.loads((trained / "run.json").read_text())
    about["data"]["name"] = attack
    about["versions"] = {attack: attack}
    (trained / "run.json").write_text(json.dumps(about))
    reseal(trained)
    evil = trained.with_name('"><script>x')
    trained.rename(evil)
    (evil / "curves.svg").write_text("<svg><script>alert(2)</script></svg>")  # Pictures are drawn anew.
    assert main(["report", str(evil), "--out", str(out)]) == 0
    page = page_of(out)
    assert "alert(2)" not in out.read_text()
    assert len(page.all_of("script")) == scripts
    assert_loads_nothing(page)
    assert attack in page.text
    assert page.data["data-experiments"]["language-measure"]["series"][0]["name"] == evil.name


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
    (curve,) = page.data["data-experiments"]["language-measure"]["series"]  # of the good one
    assert curve["name"] == "language-001"


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
