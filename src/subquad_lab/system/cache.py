"""The files in the cache folder: what they are, and how they are removed.

calibration-*.json    how fast this machine is, measured by the library
speech/               features of clips; those that were not used for the longest time are removed above a limit
graphs/               graphs that were read from pickles

All of them can be made again. Only files with these names are ever removed, because SUBQUAD_CACHE may name a folder
that holds other things too.
"""

from contextlib import ExitStack, suppress
from pathlib import Path

from subquad.planning import cache_folder
from subquad_lab.system.files import locked

SPEECH, GRAPHS = "speech", "graphs"  # folders
# The names that begin with a dot are of files that a killed process has left half-written.
PATTERNS = {
    "calibration": ("calibration-*.json", ".calibration-*"),
    "speech features": (f"{SPEECH}/*.safetensors", f"{SPEECH}/*.sha256", f"{SPEECH}/.*.safetensors.*",
                        f"{SPEECH}/.*.sha256.*"),
    "graph": (f"{GRAPHS}/*.npz", f"{GRAPHS}/.*.npz.*"),
}  # fmt: skip


def cached_files() -> dict[str, list[Path]]:
    """Return the files of each kind."""
    folder = cache_folder()
    return {
        kind: sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        for kind, patterns in PATTERNS.items()
    }


def clear() -> tuple[int, int]:
    """Remove all of them, and return how many there were and their bytes; waits for a process that writes one."""
    count = size = 0
    with ExitStack() as locks:
        for folder in (cache_folder(), cache_folder() / SPEECH, cache_folder() / GRAPHS):
            if folder.is_dir():
                locks.enter_context(locked(folder, wait=True))
        for path in (path for paths in cached_files().values() for path in paths):
            with suppress(FileNotFoundError):  # where the file system has no locks
                size, count = size + path.stat().st_size, count + 1
                path.unlink()
    return count, size


def trim_speech(folder: Path, limit: int, kept: Path) -> None:
    """Remove features until `limit` bytes are left, the longest unused first; `kept` stays, however large it is."""
    with suppress(OSError):  # A run does not stop because its cache cannot be trimmed.
        found = {path: path.stat() for path in folder.glob("*.safetensors")}
        total = sum(stat.st_size for stat in found.values())
        for path in sorted(found.keys() - {kept}, key=lambda path: found[path].st_mtime_ns):
            if total <= limit:
                break
            path.unlink()
            path.with_suffix(".sha256").unlink(missing_ok=True)
            total -= found[path].st_size
