"""The report in a real browser: Debian's chromium, driven by playwright.

`report` is a page over small runs; `open_page` opens any page and records what it says and asks for.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from small_runs import small, start, write_text
from subquad_lab.commands import verify
from subquad_lab.report.claims import claims
from subquad_lab.report.page import page
from subquad_lab.training.run import all_runs

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_MS = 10_000  # of each step
OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: the extra `dev` brings it"
    )
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no browser is installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        yield started
        started.close()


@dataclass
class Opened:
    """A page, and what it has said and asked for since it was opened."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def assert_silent(self, path: Path) -> None:
        assert self.messages == []
        assert self.requests == [path.as_uri()]

    def assert_accessible(self) -> None:
        """Raise unless axe finds no serious or critical violation; the page must allow added scripts."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert serious == [], json.dumps([(each["id"], [node["html"] for node in each["nodes"]]) for each in serious])


@pytest.fixture(scope="module")
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Open a page in a window of its own.

    Args:
        path: File or address to open.
        width: Width of the window in pixels.
        fragment: What follows # in the address.
        context: Further arguments of playwright's `new_context`: color_scheme="dark", java_script_enabled=False, ...
    """
    contexts = []

    def opened(path: Path | str, width: int = 1280, fragment: str = "", **context: Any) -> Opened:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **context))
        found = Opened(contexts[-1].new_page())
        found.page.set_default_timeout(TIMEOUT_MS)
        found.page.on("console", lambda message: found.messages.append(message.text))
        found.page.on("pageerror", lambda error: found.messages.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        address = path if isinstance(path, str) else path.as_uri()
        found.page.goto(address + (f"#{fragment}" if fragment else ""))
        if context.get("java_script_enabled", True):
            found.page.wait_for_selector("html[data-ready]")
        return found

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: a series of seeds of a language model, another model, and a classifier."""
    folder = tmp_path_factory.mktemp("page")
    text = write_text(folder / "text")
    for name, changes in (("rnn", {"seeds": 2}), ("transformer", {}), ("pool", {"seeds": 2})):
        experiment, config = small(name, text, **changes)
        start(config, folder / "runs", name, experiment)
    return folder / "runs"


@pytest.fixture(scope="session")
def checked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Claims as `subquad verify 14 17 21 --json` writes them: with and without a common mistake and a picture."""
    path = tmp_path_factory.mktemp("claims") / "verify.json"
    with redirect_stdout(StringIO()) as said:
        verify.run(["14", "17", "21"], as_json=True, plots=str(path.parent / "theory"), seed=0, explain=False)
    path.write_text(said.getvalue())
    assert json.loads(path.read_text())
    return claims(path)


@pytest.fixture(scope="session")
def report(small_runs: Path, checked: list[dict[str, Any]]) -> Path:
    """The page over these runs and claims."""
    path = small_runs.parent / "report.html"
    path.write_text(page(all_runs(small_runs), checked))
    return path
