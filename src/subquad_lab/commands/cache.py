"""`subquad cache`: what the cache folder holds, and how to empty it."""

import time

from subquad.planning import cache_folder
from subquad_lab import RunError, UsageError
from subquad_lab.figures.tables import Table
from subquad_lab.system.cache import cached_files, clear
from subquad_lab.system.text import say

COLUMNS = ("kind", "file", "size", "days")
UNITS = ("B", "KiB", "MiB", "GiB")


def run(empty: bool) -> None:
    """Print the folder and a row for each file, or remove the files."""
    try:
        folder = cache_folder()
    except RuntimeError as error:
        raise UsageError(f"cache: {error}; set SUBQUAD_CACHE to a folder") from error
    if empty:
        try:
            count, size = clear()
        except OSError as error:
            raise RunError(f"cannot empty {folder}: {error.strerror}") from error
        say(f"{folder}: removed {files(count)}, {in_units(size)}")
        return
    now, total, rows = time.time(), 0, []
    for kind, paths in cached_files().items():
        for path in paths:
            try:
                stat = path.stat()
            except FileNotFoundError:  # Another process has just removed it.
                continue
            total += stat.st_size
            days = f"{max(0.0, now - stat.st_mtime) / 86400:.0f}"
            rows.append((kind, str(path.relative_to(folder)), in_units(stat.st_size), days))
    if rows:
        Table(COLUMNS, rows).print()
    say(f"{folder}: {files(len(rows))}, {in_units(total)}")


def files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def in_units(size: int) -> str:
    """Return a number of bytes in its largest unit.

    >>> in_units(0), in_units(2047), in_units(5 << 20)
    ('0 B', '2.0 KiB', '5.0 MiB')
    """
    power = min((max(size, 1).bit_length() - 1) // 10, len(UNITS) - 1)
    return f"{size / 1024**power:,.1f} {UNITS[power]}" if power else f"{size} B"
