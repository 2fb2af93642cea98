"""Tables: with borders on a terminal, as plain text in a pipe or a file.

Columns of numbers are right-aligned, columns of text left-aligned. Control characters in cells are escaped.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import rich.table
from rich.console import Console
from rich.markup import escape

from subquad_lab.system.text import printable, say


@dataclass(frozen=True)
class Table:
    """The cells of a table and their style.

    Args:
        columns: Column headers.
        rows: Cells; each row has one per column.
        title: Title above the table.
        styles: Styles of rows on a terminal by row number, such as "bold".
        section: Number of rows between two horizontal lines on a terminal. Default: no lines.

    >>> print(Table(["method", "time"], [["exact", "12 ms"], ["taylor:2", "3 ms"]], "Causal").text())
    Causal
    method     time
    exact     12 ms
    taylor:2   3 ms
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    styles: Mapping[int, str] = field(default_factory=dict)
    section: int | None = None

    def print(self) -> None:
        """Print the table to standard output."""
        console = Console()
        if console.is_terminal:
            console.print(self.with_lines())
        else:
            say(*self.text().split("\n"))

    def text(self) -> str:
        """Return the table as plain text, with columns two spaces apart."""
        lines = [[printable(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = [str.rjust if number else str.ljust for number in self._numbers()]
        shown = ("  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)).rstrip()
                 for line in lines)  # fmt: skip
        return "\n".join([printable(self.title), *shown] if self.title else shown)

    def with_lines(self) -> rich.table.Table:
        """Return the table with borders, for a terminal."""
        table = rich.table.Table(title=escape(printable(self.title)) or None)
        for name, number in zip(self.columns, self._numbers(), strict=True):
            table.add_column(name, justify="right" if number else "left")
        for i, row in enumerate(self.rows):
            ends = self.section is not None and (i + 1) % self.section == 0
            table.add_row(*(escape(printable(cell)) for cell in row), style=self.styles.get(i), end_section=ends)
        return table

    def _numbers(self) -> list[bool]:
        """Return for each column whether all its non-empty cells start with a number."""
        columns = [[row[i] for row in self.rows if row[i]] for i in range(len(self.columns))]
        return [bool(cells) and all(re.match(r"[+-]?\d", cell) for cell in cells) for cells in columns]


def figures(found: dict[str, float]) -> str:
    """Format metrics on one line.

    >>> figures({"cross_entropy": 1.23456, "perplexity": 3.437})
    'cross-entropy 1.235, perplexity 3.437'
    """
    return ", ".join(f"{name.replace('_', '-')} {value:.4g}" for name, value in found.items())
