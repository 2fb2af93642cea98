"""The folder of a run.

config.yaml      the resolved config, in the format of `subquad train EXPERIMENT --config`
run.json         experiment, versions, data set with its checksum, number of parameters by module
metrics.jsonl    a line per step and per evaluation; depends on the seed only, not on timing
timing.jsonl     seconds and speed
events/          both for TensorBoard
result.json      the final result, which the report reads
curves.svg       learning curves
checkpoints/     see `checkpoint`
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
from subquad_lab.system.files import read_json, write_whole

CONFIG, ABOUT, RESULT, CURVES = "config.yaml", "run.json", "result.json", "curves.svg"
METRICS, TIMING, EVENTS = "metrics.jsonl", "timing.jsonl", "events"


class Run:
    """The folder of a run. One process writes; others may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    @classmethod
    def create(cls, root: Path, experiment: str, config: dict[str, Any], name: str | None = None) -> "Run":
        """Create a folder in `root` with the given name, or with the experiment's name and the next number."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = root / name if name else None
            if folder is not None:
                folder.mkdir(exist_ok=True)
            while folder is None:
                try:
                    folder = _next(root, experiment)
                    folder.mkdir()
                except FileExistsError:  # Another process created it first.
                    folder = None
        except OSError as error:
            raise UsageError(f"--out: cannot create a folder in {root}: {error.strerror}") from error
        run = cls(folder)
        run.write(CONFIG, yaml.safe_dump(config, sort_keys=False).encode())
        return run

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """Open an existing run."""
        path = Path(folder)
        if not path.is_dir():
            raise UsageError(f"RUN: no such folder: {path} (`subquad runs` lists all runs)")
        missing = [name for name in (CONFIG, ABOUT) if not (path / name).is_file()]
        if missing:
            raise UsageError(f"RUN: expected a run folder, got {path}, which has no {missing[0]}")
        return cls(path)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def write(self, name: str, content: bytes) -> None:
        try:
            write_whole(self.folder / name, content)
        except OSError as error:
            raise RunError(f"cannot write {self.folder / name}: {error.strerror}") from error

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, json.dumps(content, indent=1).encode())

    def read_json(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name)

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
        if not (self.folder / RESULT).is_file():
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
                try:
                    with (self.folder / name).open("a") as file:
                        file.write(json.dumps({"step": step, **values}) + "\n")
                except OSError as error:
                    raise RunError(f"cannot write {self.folder / name}: {error.strerror}") from error
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

    def size(self) -> dict[str, int]:
        """Sync the logs to disk and return their sizes in bytes, to store in a checkpoint."""
        for name in (METRICS, TIMING):
            if (self.folder / name).exists():
                with (self.folder / name).open("rb") as file:
                    os.fsync(file.fileno())
        return {name: _size(self.folder / name) for name in (METRICS, TIMING)}

    def rewind(self, sizes: dict[str, int]) -> None:
        """Truncate the logs to their sizes at a checkpoint; later steps will be logged again."""
        for name in (METRICS, TIMING):
            path = self.folder / name
            if _size(path) < sizes[name]:
                raise UsageError(
                    f"{path}: expected at least {sizes[name]} bytes, got {_size(path)}: the file was truncated"
                )
            if path.exists():
                with path.open("r+b") as file:
                    file.truncate(sizes[name])

    def metrics(self) -> Iterator[dict[str, float]]:
        """Yield the lines of the log, except a last line that was truncated by a crash."""
        path = self.folder / METRICS
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                if not isinstance(line["step"], int) or not all(isinstance(v, int | float) for v in line.values()):
                    raise TypeError("expected numbers only")
                yield line
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                if number < len(lines):
                    raise UsageError(f"{path}: line {number} is not a valid record: {error}") from error

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


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def all_runs(root: Path) -> list[Run]:
    """Return all runs in a folder and its subfolders."""
    if not root.is_dir():
        return []
    return [Run(path.parent) for path in sorted(root.glob(f"**/{ABOUT}")) if (path.parent / CONFIG).is_file()]


def versions() -> dict[str, str]:
    """Return the versions and settings that can change a result."""
    return {
        "subquad": subquad.__version__, "torch": torch.__version__, "numpy": version("numpy"),
        "python": platform.python_version(), "machine": f"{platform.machine()} {platform.system()}",
        "threads": str(torch.get_num_threads()),
    }  # fmt: skip
