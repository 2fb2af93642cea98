"""The folder of a run.

SHA256SUMS       checksums of the files below, except those of a log that still grows; see `checksums`
config.yaml      the resolved config, in the format of `subquad train EXPERIMENT --config`
run.json         experiment, versions, data set with its checksum, number of parameters by module
metrics.jsonl    a line per step and per evaluation; depends on the seed only, not on timing
timing.jsonl     seconds and speed
events/          both for TensorBoard
result.json      the final result, which the report reads
curves.svg       learning curves
checkpoints/     see `checkpoint`

Every file is verified before it is used. The logs of an unfinished run are verified by its last checkpoint; see `logs`.
"""

import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import yaml

import subquad
from subquad_lab import RunError, UsageError
from subquad_lab.system.checksums import (
    MAX_SUMS_BYTES,
    SUMS,
    Damaged,
    is_listed,
    read_listed,
    read_listed_json,
    unlist,
    write_listed,
)
from subquad_lab.system.regular_file import read_regular
from subquad_lab.training import checkpoint, logs
from subquad_lab.training.logs import Log, Mark

CONFIG, ABOUT, RESULT, CURVES = "config.yaml", "run.json", "result.json", "curves.svg"
METRICS, TIMING, EVENTS = "metrics.jsonl", "timing.jsonl", "events"


class Run:
    """The folder of a run. One process writes; others may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._logs = {name: Log(folder / name) for name in (METRICS, TIMING)}
        self._writer: Any = None

    @classmethod
    def create(
        cls, root: Path, config: dict[str, Any], name: str | None = None, about: dict[str, Any] | None = None
    ) -> "Run":
        """Create a folder in `root` with the given name, or with the experiment's name and the next number.

        Args:
            root: Folder of the new folder.
            config: Content of config.yaml, which includes the experiment's name.
            name: Name of the folder.
            about: Content of run.json; None for a series.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = root / name if name else None
            if folder is not None:
                folder.mkdir(exist_ok=True)
            while folder is None:
                try:
                    folder = _next(root, config["experiment"])
                    folder.mkdir()
                except FileExistsError:  # Another process created it first.
                    folder = None
        except OSError as error:
            raise UsageError(f"--out: cannot create a folder in {root}: {error.strerror}") from error
        run = cls(folder)
        files = {CONFIG: yaml.safe_dump(config, sort_keys=False).encode()}
        run.write(files if about is None else files | {ABOUT: as_json(about)})
        return run

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """Open an existing run."""
        path = Path(folder)
        if not path.is_dir():
            raise UsageError(f"RUN: no such folder: {path} (`subquad runs` lists all runs)")
        missing = [name for name in (CONFIG, ABOUT) if not (path / name).is_file()]
        if missing and not (path / SUMS).is_file():
            raise UsageError(f"RUN: expected a run folder, got {path}, which has no {missing[0]}")
        run = cls(path)
        for name in (CONFIG, ABOUT):
            run.verify(name)
        return run

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def write(self, contents: dict[str, bytes]) -> None:
        """Write files and list their checksums."""
        write_listed(self.folder, contents)

    def write_last(self, contents: dict[str, bytes]) -> None:
        """Write the last files of a run, and list them together with the logs, which no longer grow."""
        sums = {name: log.mark()["sha256"] for name, log in self._logs.items() if log.size}
        write_listed(self.folder, contents, sums)

    def has(self, name: str) -> bool:
        """Return whether a file was written completely."""
        return is_listed(self.folder, name)

    def is_begun(self) -> bool:
        """Return whether the run was created completely; a folder without run.json must not have later files."""
        if self.has(ABOUT):
            return True
        if self.checkpoints.exists() or (self.folder / METRICS).exists():
            raise Damaged(f"{self.folder / SUMS}: expected a line for {ABOUT}, got none")
        return False

    def verify(self, name: str) -> None:
        """Raise Damaged unless a file is intact."""
        read_listed(self.folder, name)

    def read_json(self, name: str) -> dict[str, Any]:
        return read_listed_json(self.folder, name)

    def about(self) -> dict[str, Any]:
        """Return the validated content of run.json."""
        found = self.read_json(ABOUT)
        for name, kind in {"experiment": str, "data": dict, "parameters": dict, "versions": dict}.items():
            if not isinstance(found.get(name), kind):
                got = type(found.get(name)).__name__
                raise UsageError(f"{self.folder / ABOUT}: expected {kind.__name__} for {name!r}, got {got}")
        if not isinstance(found["parameters"].get("total"), int):
            raise UsageError(f"{self.folder / ABOUT}: expected an integer for the total of the parameters")
        return found

    def result(self) -> dict[str, Any] | None:
        """Return the result, or None if the run is not finished."""
        if not self.has(RESULT):
            return None
        found = self.read_json(RESULT)
        for part in ("valid", "test"):
            figures = found.get(part)
            if not isinstance(figures, dict) or not all(isinstance(v, int | float) for v in figures.values()):
                raise UsageError(f"{self.folder / RESULT}: expected metrics under {part!r}")
        return found

    # --- Metrics over time ----------------------------------------------------------------------------------------

    def log(self, step: int, figures: dict[str, float], timing: dict[str, float] | None = None) -> None:
        """Log the metrics of a step to the files and to TensorBoard."""
        for name, values in ((METRICS, figures), (TIMING, timing)):
            if values:
                self._logs[name].append((json.dumps({"step": step, **values}) + "\n").encode())
        with self._writing_events():
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self.folder / EVENTS), purge_step=step, flush_secs=30)
            for name, value in {**figures, **(timing or {})}.items():
                self._writer.add_scalar(name, value, step)

    @contextmanager
    def _writing_events(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            raise RunError(f"cannot write {self.folder / EVENTS}: {error.strerror}") from error

    def marks(self) -> dict[str, Mark]:
        """Sync the logs to disk and return their marks, to store in a checkpoint."""
        return {name: log.mark() for name, log in self._logs.items()}

    def rewind(self, marks: dict[str, Mark] | None) -> None:
        """Verify the logs and truncate them to their marks in a checkpoint; without marks, they must be empty."""
        unlist(self.folder, self._logs)
        for name, log in self._logs.items():
            log.rewind(None if marks is None else marks[name])

    def metrics(self) -> Iterator[dict[str, float]]:
        """Yield the lines of the log, except a last line that was truncated by a crash."""
        path = self.folder / METRICS
        lines = self._metrics().splitlines()
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                if not isinstance(line["step"], int) or not all(isinstance(v, int | float) for v in line.values()):
                    raise TypeError("expected numbers only")
                yield line
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                if number < len(lines):
                    raise UsageError(f"{path}: line {number} is not a valid record: {error}") from error

    def _metrics(self) -> bytes:
        """Return the verified content of the log."""
        if self.has(METRICS):
            return read_listed(self.folder, METRICS)
        # The checkpoint first: the log only grows while another process trains.
        state = checkpoint.newest_state(self.checkpoints)
        content = logs.content_of(self.folder / METRICS)
        if state is not None:
            marks = state.get("logs")
            logs.check(self.folder / METRICS, content, marks.get(METRICS) if isinstance(marks, dict) else None)
        elif content:
            raise Damaged(f"{self.folder / METRICS}: expected no lines without a checkpoint, got {len(content)} bytes")
        return content

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Close the TensorBoard writer; its failure does not hide another exception."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError) if error else self._writing_events():
                writer.close()


def _next(root: Path, experiment: str) -> Path:
    pattern = re.compile(rf"{re.escape(experiment)}-(\d+)")
    taken = [int(found[1]) for path in root.iterdir() if (found := pattern.fullmatch(path.name))]
    return root / f"{experiment}-{max(taken, default=0) + 1:03d}"


def as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


def all_runs(root: Path) -> list[Run]:
    """Return all runs in a folder and its subfolders, including those that have lost a file."""
    found = set()
    for here, _, files in os.walk(root):  # Unlike glob, it ignores folders that another process removes meanwhile.
        folder = Path(here)
        is_whole = ABOUT in files and (folder / CONFIG).is_file()
        if is_whole or (SUMS in files and _lists_a_run(folder / SUMS)):
            found.add(folder)
    return [Run(folder) for folder in sorted(found) if _is_run(folder)]


def _lists_a_run(sums: Path) -> bool:
    """Return whether a SHA256SUMS, which may be damaged, is that of a run: other folders have no run.json."""
    try:
        return f"  {ABOUT}\n".encode() in read_regular(sums, MAX_SUMS_BYTES)
    except OSError:
        return False


def _is_run(folder: Path) -> bool:
    """Return whether a run was created completely, damaged or not."""
    try:
        return Run(folder).is_begun()
    except Damaged:
        return True


def versions() -> dict[str, str]:
    """Return the versions and settings that can change a result."""
    return {
        "subquad": subquad.__version__, "torch": torch.__version__, "numpy": version("numpy"),
        "python": platform.python_version(), "machine": f"{platform.machine()} {platform.system()}",
        "threads": str(torch.get_num_threads()),
    }  # fmt: skip
