"""The served page: rendered again only if a file of a run has changed, and seldom enough not to slow training.

first request                            render, and wait for it
nothing has changed, or it is too early  the page as it is; its curves grow by events
otherwise                                one request renders; the others get the page as it is

The parts that are the same whatever was run are made once, and a run is read again only if its files have changed.
"""

import re
import threading
import time
import warnings
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

from subquad_lab import UsageError
from subquad_lab.report.live.watcher import pause_after, served_runs
from subquad_lab.report.page import PARTS, page
from subquad_lab.report.part import Part
from subquad_lab.report.reading import Reader, files_of
from subquad_lab.system.text import warn
from subquad_lab.training.run import Run

RENDER_SECONDS = 5.0  # between renderings, at least
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"')


class Rendered(NamedTuple):
    """A page and its content security policy."""

    html: bytes
    policy: str


class Renderer:
    """The page about the runs of a folder, from one thread at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._rendered: Rendered | None = None
        self._files: Any = None
        self._parts: list[Part] = []
        self._reader = Reader()
        self._render_at = 0.0

    def rendered(self) -> Rendered:
        """Return the page, rendered again if it is due."""
        now = self._rendered
        if not self._lock.acquire(blocking=now is None):
            assert now is not None
            return now
        try:
            if self._rendered is None or time.monotonic() >= self._render_at:
                self._render()
            assert self._rendered is not None
            return self._rendered
        finally:
            self._lock.release()

    def _render(self) -> None:
        begin = time.thread_time()
        try:
            runs, refused = served_runs(self.root)
            files = [files_of(run) for run in runs.values()], refused
            if files != self._files or self._rendered is None:
                self._rendered, self._files = _rendered(self._page(runs, refused)), files
        except Exception as error:
            if self._rendered is None:
                raise
            # For example, a run was deleted while it was read. The last page is still right about the other runs.
            warn(f"the page was not renewed: {type(error).__name__}: {error}")
        finally:
            self._render_at = time.monotonic() + pause_after(time.thread_time() - begin, RENDER_SECONDS)

    def _page(self, runs: dict[str, Run], refused: dict[str, str]) -> str:
        """Return the page; it need not have any run."""
        self._parts = self._parts or [part.made() if part.is_fixed else part for part in PARTS]
        states = {place: _state(run) for place, run in runs.items()} | dict.fromkeys(refused, "damaged")
        live = Part("live", "Live", lambda _: {"states": states, "refused": refused}, scripts=("live.js",))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The page lists the damaged runs.
            return page(list(runs.values()), live=live, parts=self._parts, reader=self._reader)


def _rendered(html: str) -> Rendered:
    found = POLICY.search(html)
    assert found is not None
    return Rendered(html.encode(errors="backslashreplace"), f"{unescape(found[1])}; frame-ancestors 'none'")


def _state(run: Run) -> str:
    try:
        return "unfinished" if run.result() is None else "finished"
    except (UsageError, OSError):
        return "damaged"
