"""Tables: with lines on a terminal, plain text in a pipe or a file.

Columns of figures are aligned on the right, columns of words on the left.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import rich.table
from rich.console import Console
from rich.markup import escape


@dataclass(frozen=True)
class Table:
    """Cells, and how they are shown.

    Args:
        columns: The heads of the columns.
        rows: As many cells in each.
        title: Above the table.
        styles: Of rows by their numbers, on a terminal, such as "bold".
        section: Rows between two lines on a terminal; no lines if not given.

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
        """On the standard output."""
        console = Console()
        if console.is_terminal:
            console.print(self.with_lines())
        else:
            print(self.text())

    def text(self) -> str:
        """Columns two spaces apart."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = [str.rjust if number else str.ljust for number in self._numbers()]
        shown = ("  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)).rstrip()
                 for line in lines)  # fmt: skip
        return "\n".join([self.title, *shown] if self.title else shown)

    def with_lines(self) -> rich.table.Table:
        """For a terminal."""
        table = rich.table.Table(title=self.title or None)
        for name, number in zip(self.columns, self._numbers(), strict=True):
            table.add_column(name, justify="right" if number else "left")
        for i, row in enumerate(self.rows):
            ends = self.section is not None and (i + 1) % self.section == 0
            table.add_row(*map(escape, row), style=self.styles.get(i), end_section=ends)
        return table

    def _numbers(self) -> list[bool]:
        """Of each column, whether it holds figures: every cell that is not empty begins with one."""
        columns = [[row[i] for row in self.rows if row[i]] for i in range(len(self.columns))]
        return [bool(cells) and all(re.match(r"[+-]?\d", cell) for cell in cells) for cells in columns]


def figures(found: dict[str, float]) -> str:
    """In one line.

    >>> figures({"cross_entropy": 1.23456, "perplexity": 3.437})
    'cross-entropy 1.235, perplexity 3.437'
    """
    return ", ".join(f"{name.replace('_', '-')} {value:.4g}" for name, value in found.items())
