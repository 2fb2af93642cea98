"""One thread that follows all runs of a folder, for all readers.

    look:    find runs  ->  read what was added to their logs  ->  a message for each run that changed
    notify:  each reader  ->  the messages after the last version that it has seen

A message holds the whole progress of its run, with curves of limited size. A reader who is slow, or who comes late,
needs only the newest message of each run: nothing is queued, and memory does not grow with the number of readers.
Files are read only while somebody reads the page.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from subquad_lab import UsageError
from subquad_lab.experiments.stored import experiment_of
from subquad_lab.report.live.listener import Listener
from subquad_lab.report.live.progress import Progress
from subquad_lab.system.text import one_line, printable, warn
from subquad_lab.training.run import Run, all_runs

LOOK_SECONDS = 1.0  # between looks at the logs
FIND_SECONDS = 2.0  # between searches for runs
READ_SECONDS = 0.2  # of one look, after which the other logs wait for the next one
BUSY_SHARE = 0.05  # of the time, at most, so that training is not slowed


def pause_after(seconds: float, least: float) -> float:
    """Return how long to wait after work, to be busy for at most BUSY_SHARE of the time.

    Args:
        seconds: Processor time of the work, by `time.thread_time`: waiting for a processor slows nothing else.
        least: Seconds to wait at least.
    """
    return max(least, seconds / BUSY_SHARE)


def served_runs(root: Path) -> tuple[dict[str, Run], dict[str, str]]:
    """Return the runs in a folder by their places in it, and those that are not served with the reason.

    A symbolic link could show a file from outside of the folder; the lab itself makes none.
    """
    runs, refused = {}, {}
    for run in all_runs(root):
        place = str(run.folder.relative_to(root))
        link = next((path for path in _entries(run.folder) if path.is_symlink()), None)
        if link is None:
            runs[place] = run
        else:
            refused[place] = f"{link.relative_to(run.folder)} is a symbolic link, which is not followed"
    return runs, refused


def _entries(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        yield from (Path(here, name) for name in (*folders, *files))


class Watcher:
    """Messages about the runs of a folder, for any number of readers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._followed: dict[str, Progress] = {}
        self._finished: set[str] = set()
        self._find_at = 0.0
        self._condition = threading.Condition()  # guards what follows
        self._messages: dict[str, tuple[int, bytes]] = {}  # by place, each with its version
        self._contents: dict[str, dict[str, Any]] = {}
        self._listeners: list[Listener] = []
        self._version = 0

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watcher", daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._listeners)
            begin = time.thread_time()
            for work in (self.look, self.notify):  # Readers get heartbeats even if no file can be read.
                try:
                    work()
                except Exception as error:  # The readers would wait forever for a thread that has ended.
                    warn(f"{type(error).__name__}: {error}")
            time.sleep(pause_after(time.thread_time() - begin, LOOK_SECONDS))

    # --- What is on disk ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what has changed since the last look, and publish it."""
        if time.monotonic() >= self._find_at:
            begin = time.thread_time()
            self._find()
            self._find_at = time.monotonic() + pause_after(time.thread_time() - begin, FIND_SECONDS)
        end = time.thread_time() + READ_SECONDS
        for place in list(self._followed):
            progress = self._followed[place] = self._followed.pop(place)  # last in the next look
            if self._has_news(place, progress):
                self._publish(place, {"state": "unfinished", **progress.as_json()})
            if time.thread_time() >= end:
                break

    def _has_news(self, place: str, progress: Progress) -> bool:
        """Read what was added to a log; a fault in one run must not hide the others."""
        try:
            return progress.read()
        except Exception as error:
            warn(f"{printable(place)}: {type(error).__name__}: {error}")
            return False

    def _find(self) -> None:
        runs, refused = served_runs(self.root)
        for place in self._contents.keys() - runs.keys():
            self._followed.pop(place, None)
            self._finished.discard(place)
            if place not in refused:
                self._publish(place, {"state": "removed"})
        for place, reason in refused.items():
            self._publish(place, {"state": "damaged", "damage": one_line(reason)})
        for place, run in runs.items():
            if place not in self._finished:
                self._check(place, run)

    def _check(self, place: str, run: Run) -> None:
        """Follow a run unless it is finished or damaged; what is half-written now may be intact at the next look."""
        try:
            followed = self._followed.get(place)
            if run.result() is not None:
                if followed is not None:
                    while self._has_news(place, followed):
                        pass
                self._finished.add(place)
                self._followed.pop(place, None)
                self._publish(place, {"state": "finished", **(followed.as_json() if followed else {})})
            elif followed is None:
                experiment, config = experiment_of(run)
                self._followed[place] = Progress(run.folder, experiment.measure, config)
                self._publish(place, {"state": "unfinished", **self._followed[place].as_json()})
        except (UsageError, OSError) as error:
            self._followed.pop(place, None)
            self._publish(place, {"state": "damaged", "damage": one_line(error)})

    # --- Readers --------------------------------------------------------------------------------------------------

    def _publish(self, place: str, content: dict[str, Any]) -> None:
        if self._contents.get(place) == content:
            return
        self._contents[place] = content
        text = json.dumps({"run": place, "name": printable(place), **content}, allow_nan=False)
        with self._condition:
            self._version += 1
            self._messages[place] = self._version, f"data: {text}\n\n".encode()

    def since(self, seen: int) -> tuple[int, bytes]:
        """Return the newest version, and the newest message of each run that changed after version `seen`."""
        with self._condition:
            new = sorted(entry for entry in self._messages.values() if entry[0] > seen)
            return self._version, b"".join(message for _, message in new)

    def add(self, connection: socket.socket, seen: int, leave: Callable[[socket.socket], None]) -> None:
        """Send a reader all messages after version `seen` until it has gone; then call `leave` with its connection."""
        with self._condition:
            self._listeners.append(Listener(connection, seen, leave))
            self._condition.notify_all()

    def notify(self) -> None:
        """Send each reader what is new to it."""
        with self._condition:
            listeners = list(self._listeners)
        since = cache(self.since)  # Most readers have seen the same.
        for listener in listeners:
            if not listener.send(*since(listener.seen)):
                with self._condition:
                    self._listeners.remove(listener)
