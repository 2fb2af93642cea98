"""The calibration of this machine, kept in the user's cache folder.

A file that belongs to another machine, version or number of threads is made again; so is a damaged one, with a warning.
It is damaged unless it is a regular file of limited size with the right checksum, and predicts plausible times.
One that was made on a busy machine has a note; it is used, and made again once the machine is quiet, a few times.

One process at a time measures; others wait for it and read its result. The lock is held by the system, which releases
it when a process ends, however it ends. The file appears whole or not at all.
"""

import hashlib
import json
import logging
import math
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows has no fcntl: two processes may then measure at once.
    fcntl = None  # type: ignore[assignment]

from subquad import native
from subquad.planning.busyness import is_loaded, load
from subquad.planning.calibration import MAX_RETRIES, calibrate, grid_once
from subquad.planning.progress import Progress
from subquad.planning.reference import reference_seconds
from subquad.planning.seconds import Calibration, name_of, work
from subquad.planning.shape import Shape

__all__ = ["cache_folder", "cached", "calibration", "file_of", "machine", "predicted_seconds"]

VERSION = 9  # of the file, and of the work that the coefficients are for
RETRY_SECONDS = 600.0  # age from which on a calibration of a busy machine is made again, if it is quiet now
MAX_WAIT_SECONDS = 60.0  # for another process that measures, which cannot take longer
POLL_SECONDS = 0.1
QUIET_WAIT_SECONDS = 1.0  # before it is said that another process is waited for
MAX_FILE_BYTES = 1 << 16
PLAUSIBLE_FACTOR = 1e5  # by which a machine may be slower or faster than the reference
NOTE_ON_RETRIES = " A later run on a quiet machine measures again."
RESERVED_BYTES = MAX_FILE_BYTES  # A full disk is found before the work.

log = logging.getLogger("subquad")


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, str | int]:
    """Return everything that a calibration depends on."""
    if device.type == "cpu":
        name = _cpu()
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "version": VERSION, "device": f"{device.type}: {name}", "dtype": str(dtype), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "native": str(native.status().instructions if native.available() else None),
    }  # fmt: skip


@lru_cache(maxsize=1)
def _cpu() -> str:
    """Return the processor's model and number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model or platform.processor()} x{os.cpu_count()}"


def cache_folder() -> Path:
    """Return $SUBQUAD_CACHE, or `subquad` in the user's cache folder."""
    if own := os.environ.get("SUBQUAD_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "subquad"


def file_of(of: dict[str, str | int]) -> Path:
    """Return the file for a machine; two versions of the library do not replace each other's."""
    words = "-".join(str(of[part]) for part in ("device", "dtype", "threads", "torch", "native", "version"))
    return cache_folder() / f"calibration-{''.join(c if c.isalnum() or c in '.-' else '_' for c in words)}.json"


class _Damaged(ValueError):
    """A file in the place of a calibration that is not one."""


def cached(device: torch.device, dtype: torch.dtype = torch.float32) -> Calibration | None:
    """Return the calibration that an earlier run left, if it is valid for this machine."""
    try:
        return _found(device, dtype)
    except _Damaged:
        return None


def _found(device: torch.device, dtype: torch.dtype) -> Calibration | None:
    """Return the calibration in the file, or None if there is none for this machine; raise if it is damaged."""
    of = machine(device, dtype)
    try:
        path = file_of(of)
        changed = path.stat().st_mtime_ns
    except (OSError, RuntimeError):  # no such file, or no home folder
        return None
    return _read(path, changed, json.dumps(of), device.type)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int, of: str, device: str) -> Calibration | None:
    try:
        content = json.loads(_content(path))
        checksum = content.pop("sha256", None)
        if content["machine"] != json.loads(of):
            return None
        if checksum != _checksum(content):
            raise _Damaged("its checksum is wrong")
        return _checked(content, device)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _Damaged(error.strerror) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise error if isinstance(error, _Damaged) else _Damaged("it is not a calibration") from None


def _content(path: Path) -> bytes:
    """Read a regular file of limited size. A named pipe is opened without waiting for a writer, and refused."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise _Damaged("it is not a regular file")
        if about.st_size > MAX_FILE_BYTES:
            raise _Damaged(f"it has {about.st_size:,} bytes, more than the {MAX_FILE_BYTES:,} of any calibration")
        return os.read(handle, MAX_FILE_BYTES)
    finally:
        os.close(handle)


def _checked(content: dict[str, Any], device: str) -> Calibration:
    """Return a calibration whose coefficients are numbers that predict plausible times for all calls of the grid."""
    found = Calibration(content["coefficients"], device, content["note"], content["retries"])
    is_whole = type(found.note) is str and type(found.retries) is int and 0 <= found.retries <= MAX_RETRIES
    if not is_whole or found.coefficients.keys() != {name_of(*call) for call in grid_once()}:
        raise _Damaged("it is not a calibration of this version")
    for call in grid_once():
        row, units = found.coefficients[name_of(*call)], work(*call)
        if len(row) != len(units) or not all(type(c) is float and 0 <= c < math.inf for c in row):
            raise _Damaged(f"{name_of(*call)}: expected {len(units)} numbers >= 0")
        pace = math.fsum(c * w for c, w in zip(row, units, strict=True)) / reference_seconds(*call)
        if not 1 / PLAUSIBLE_FACTOR < pace < PLAUSIBLE_FACTOR:
            raise _Damaged(f"{name_of(*call)}: its times are {pace:.2g} times those of a usual machine")
    return found


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def calibration(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, progress: Progress | None = None
) -> Calibration:
    """Return the calibration from the cache, or measure the machine and store it."""
    device = usable(device)
    found = _settled(device, dtype)
    if found is not None:
        return found
    of = machine(device, dtype)
    with _writing():
        path = file_of(of)
        path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        found = _settled(device, dtype)
        if found is not None:
            return found
        try:
            rough = _found(device, dtype)
        except _Damaged as error:
            log.warning("%s: %s; this machine is calibrated again", path, error)
            rough = None
        return calibrate_into(path, of, partial(calibrate, device, dtype, progress), rough)


def _settled(device: torch.device, dtype: torch.dtype) -> Calibration | None:
    """Return the cached calibration, unless it is a rough one that can be improved now."""
    found = cached(device, dtype)
    if found is None or not found.retries or is_loaded(load()):
        return found
    return found if _age(file_of(machine(device, dtype))) < RETRY_SECONDS else None


def _age(path: Path) -> float:
    """Return how many seconds ago a file was written; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def calibrate_into(
    path: Path, of: dict[str, str | int], measure: Callable[[], Calibration], rough: Calibration | None
) -> Calibration:
    """Measure, and write the result atomically; `rough` is the calibration that it replaces, if there is one."""
    with _writing():
        for left in path.parent.glob(".calibration-*"):
            if _age(left) > MAX_WAIT_SECONDS:  # by a process that was killed
                left.unlink(missing_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".calibration-", dir=path.parent)  # before the work
    try:
        with _writing(), os.fdopen(handle, "wb") as reserved:
            reserved.write(bytes(RESERVED_BYTES))
        made = measure()
        if rough is not None:
            made = replace(made, retries=min(made.retries, max(0, rough.retries - 1)))
        made = replace(made, note=made.note + (NOTE_ON_RETRIES if made.retries else ""))
        content = {"machine": of, "note": made.note, "retries": made.retries, "coefficients": made.coefficients}
        with _writing():
            with open(temporary, "w") as file:
                json.dump({**content, "sha256": _checksum(content)}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    if made.note:
        log.info(made.note.strip())  # A plan says it in its reason.
    return made


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Admit one process at a time: two that measure at once would measure each other."""
    if fcntl is None:
        yield
        return
    with _writing():
        handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)  # also released when the process is killed
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    """Wait for the lock, but not for a process that was stopped, nor where the file system has no locks."""
    begin, is_told = time.monotonic(), False
    while (waited := time.monotonic() - begin) < MAX_WAIT_SECONDS:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waited >= QUIET_WAIT_SECONDS and not is_told:
                log.warning("waiting for another process that calibrates this machine (at most %.0f s); it holds the "
                            "lock of %s", MAX_WAIT_SECONDS, cache_folder())  # fmt: skip
                is_told = True
            time.sleep(POLL_SECONDS)
        except OSError:
            return None
    log.warning("the other process still holds the lock of %s; continuing without it", cache_folder())
    return None


def usable(device: torch.device | str) -> torch.device:
    """Return the device, or raise ValueError if torch cannot compute on it here."""
    try:
        found = torch.zeros(1, device=device)
        found.tolist()  # fails on "meta", where nothing is computed
        return found.device
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"device: expected one that torch can use here, got {device!r}: {why}") from None


def predicted_seconds(
    method: Any, shape: Shape, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> float:  # fmt: skip
    """Return how long a call takes on this machine, which is calibrated on first use."""
    return calibration(device, dtype, progress).seconds(method, shape)


@contextmanager
def _writing() -> Iterator[None]:
    """Explain what a missing or unwritable folder is for. Errors of the measurement itself pass through."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        raise PermissionError(
            f"cache: cannot write the calibration of this machine ({error}); set SUBQUAD_CACHE to a folder for it"
        ) from None
