"""The documentation's Python runs, and the tree on its pages is the tree on disk."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def tree_paths(text: str) -> list[str]:
    """Paths of an annotated tree: two spaces for each level, the name, then what it is."""
    parents: list[str] = []
    paths = []
    for line in text.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [name]
        paths.append("".join(parents))
    return paths


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what an example writes stays out of the project
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page.read_text(), "python"), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_no_code_is_overlooked():
    indented = [page.name for page in PAGES if re.search(r"^[ \t]+```python", page.read_text(), flags=re.MULTILINE)]
    assert indented == []


def test_readme_has_code_to_run():
    assert blocks((ROOT / "README.md").read_text(), "python")


def test_trees_on_the_pages_exist():
    trees = {page.name: blocks(page.read_text(), "tree") for page in PAGES}
    assert trees["architecture.md"]
    missing = [
        path for found in trees.values() for tree in found for path in tree_paths(tree) if not (ROOT / path).exists()
    ]
    assert missing == []


def test_tree_paths_follow_the_indentation():
    tree = "src/  code\n  a.py  first\n  b/  more\n    c.py  deep\ntests/  tests\n"
    assert tree_paths(tree) == ["src/", "src/a.py", "src/b/", "src/b/c.py", "tests/"]
