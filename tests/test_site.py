"""The documentation site: it builds strictly and offline, and documents every public name, command and option."""

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from filelock import FileLock

import subquad
from subquad import native
from subquad_lab import cli
from subquad_lab.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[1]
PUBLIC = [
    "subquad", "subquad.testing", "subquad.planning", "subquad.native", "subquad.integrations.transformers",
    "subquad.integrations.flash", "subquad.distributed",
]  # fmt: skip
# A name that is also that of its module, which the documentation would take for the module.
SHADOWED = {
    "subquad.attention": "subquad.attention.attention",
    "subquad.normalizer": "subquad.attention.normalizer",
    "subquad.distributed.attention": "subquad.distributed.attention.attention",
    "subquad.integrations.transformers.attend": "subquad.integrations.transformers.attend.attend",
}

pytest.importorskip("mkdocs", reason="mkdocs is not installed: the extra `docs` brings it")


def built(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a project; a request to another host would fail."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once, also if several processes run the tests."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not (folder / "built").exists():
            done = built(ROOT, folder)
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "built").touch()
    return folder


def text_of(page: Path) -> str:
    return unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_a_broken_link_and_a_broken_anchor_stop_the_build(tmp_path) -> None:
    """A small project with the same settings, without the parts that take time."""
    settings = (ROOT / "mkdocs.yml").read_text()
    settings = re.sub(r"^(hooks|extra_css):.*\n", "", settings, flags=re.MULTILINE)
    settings = re.sub(r"^  - mkdocstrings:\n(    .*\n)+", "", settings, flags=re.MULTILINE).partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings)
    (tmp_path / "docs").mkdir()
    for text, is_right in {"[here](#a)\n# A": True, "[there](absent.md)": False, "[here](#absent)": False}.items():
        (tmp_path / "docs" / "index.md").write_text(text)
        done = built(tmp_path, tmp_path / "site")
        assert (done.returncode == 0) == is_right, text + done.stdout + done.stderr


def test_pages_load_nothing_from_another_host(site) -> None:
    loads = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*""")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert {found for page in pages for found in loads.findall(page.read_text())} == set()
    assert loads.findall('<script src="https://example.org/x.js">') and loads.findall("<link href=//example.org/x>")
    styles = [path for path in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", path.read_text())]
    assert styles == []


def test_every_marker_was_replaced(site) -> None:
    left = {
        page.name
        for page in site.rglob("*.html")
        if re.search(r"<!-- (commands|presets|published|results)", page.read_text())
    }
    assert left == set()
    assert "<math" in (site / "theory.html").read_text() and "$$" not in text_of(site / "theory.html")


def public_names(module: str) -> list[str]:
    """Read `__all__` without importing the module, which may need another package."""
    path = ROOT / "src" / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    (names,) = (
        node.value for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )  # fmt: skip
    return list(ast.literal_eval(names))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(site, module) -> None:
    documented = set(re.findall(r'id="([\w.]+)"', (site / "api.html").read_text()))
    names = public_names(module)
    wanted = {SHADOWED.get(f"{module}.{name}", f"{module}.{name}") for name in names}
    assert len(wanted) == len(names) > 0
    assert wanted - documented == set()


def helps() -> Iterator[tuple[str, str]]:
    """Yield each command with what its --help prints."""
    for command in cli.COMMANDS:
        name = command.__name__
        experiments = list(EXPERIMENTS) if name in cli.OUTPUT_FOLDERS else []
        for words in [[name], *([name, experiment] for experiment in experiments)]:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                cli.main([*words, "--help"])
            yield " ".join(words), printed.getvalue()


def sections(page: Path) -> dict[str, str]:
    """Return the text under each heading of the second level."""
    parts = re.split(r"<h2\b", page.read_text())[1:]
    texts = [unescape(re.sub(r"<[^>]+>", "", f"<h2{part}")) for part in parts]
    return {text.splitlines()[0].removesuffix("¶").strip(): text for text in texts}


def test_every_command_and_option_is_documented(site) -> None:
    found, missing, count = sections(site / "commands.html"), [], 0
    for words, printed in helps():
        name, _, experiment = words.partition(" ")
        text = found[f"subquad {name}"]
        if experiment:
            text += found["Fields of all experiments"] + found[f"Fields of {experiment}"]
        options = set(re.findall(r"^  (--[a-z][\w-]*)", printed, flags=re.MULTILINE)) - {"--help"}
        count += len(options)
        missing += [f"{words} {option}" for option in options if not re.search(rf"{option}(?![\w-])", text)]
    assert missing == [] and count > 200


def test_results_that_are_quoted_say_so() -> None:
    """A link to a result whose text begins with a number is a quotation."""
    quoted = re.compile(r"\[([+-]?\d[^\]]*)\]\((?:\.\./)+benchmarks/results/([^)]+)\)")
    count = 0
    for page in sorted(ROOT.glob("docs/**/*.md")):
        for figure, name in quoted.findall(page.read_text()):
            count += 1
            text = (ROOT / "benchmarks" / "results" / name).read_text()
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", text), (
                f"{page.name}: {figure} is not in {name}"
            )
    assert count > 10


@pytest.mark.skipif(not native.available(), reason="the crossovers are those of the kernels")
def test_the_crossovers_that_are_quoted_are_those_of_the_library() -> None:
    _, _, table = (ROOT / "docs" / "choosing.md").read_text().rpartition("| width |")
    header, _, *rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.strip().splitlines()
    ]
    methods = [eval(f"subquad.{cell}", {"subquad": subquad}) for cell in header[-5:]]
    assert len(rows) == 4
    for width, *lengths in rows:
        expected = [subquad.crossover("exact", m, head_dim=int(width), heads=8, is_causal=True) for m in methods]
        assert lengths == [f"{length:,}" for length in expected]


def test_a_result_that_is_missing_is_reported() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import docs_hooks

    assert "| 8,192 |" in docs_hooks.expanded("<!-- results: multipole # Against SDPA | 8,192 -->")
    for marker in (
        "results: absent",
        "results: multipole # Absent",
        "results: multipole # Against SDPA | 7",
        "other: x",
    ):
        with pytest.raises(LookupError):
            docs_hooks.expanded(f"<!-- {marker} -->")


def test_the_figure_of_the_readme_shows_the_newest_results() -> None:
    import speed_figure

    assert (ROOT / "docs/speed.svg").read_bytes() == speed_figure.figure()
    _, lines = speed_figure.lines()
    assert len(lines) == 5 and all(len(line) >= 4 for line in lines.values())
