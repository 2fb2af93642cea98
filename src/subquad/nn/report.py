"""Replacements: the report of `replace_attention`, which can also undo it.

`subquad.replace_attention` and `subquad.integrations.transformers.replace_attention` both return it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

from subquad.methods import AnyMethod, Method, label_of
from subquad.planning.auto import Auto


@dataclass(frozen=True)
class Replacement:
    """One attention layer in the report.

    Attributes:
        number: Position in the report, which `layers=[...]` refers to.
        name: Name of the layer inside the model.
        before: Attention that the layer had.
        method: Method that the layer has now; None if it is unchanged.
        note: Why the layer was skipped, or what else was changed.
    """

    number: int
    name: str
    before: str
    method: AnyMethod | Auto | None
    note: str = ""


@dataclass
class Replacements:
    """Report of `replace_attention`: prints as a table, and undoes the replacement.

    As a context manager it undoes the replacement on exit.

    Attributes:
        layers: All attention layers of the model, also those that were left unchanged.

    Example:
        >>> from subquad import Taylor
        >>> report = Replacements((
        ...     Replacement(0, "layers.0.attn", "sdpa", Taylor(2)),
        ...     Replacement(1, "layers.1.attn", "sdpa", None, "it has hooks"),
        ... ))
        >>> print(report)
        layer  name           before  now        note
        0      layers.0.attn  sdpa    Taylor(2)
        1      layers.1.attn  sdpa    unchanged  it has hooks
        >>> report.replaced, report.skipped
        (('layers.0.attn',), {'layers.1.attn': 'it has hooks'})
    """

    layers: tuple[Replacement, ...]
    _undo_steps: list[Callable[[], object]] = field(default_factory=list, repr=False, compare=False)
    # Whether the layer with this name still has the attention that this replacement gave it.
    _is_in_place: Callable[[str], bool] = field(default=lambda name: True, repr=False, compare=False)

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the layers that have a new method."""
        return tuple(layer.name for layer in self.layers if layer.method is not None)

    @property
    def skipped(self) -> dict[str, str]:
        """Why layers that were selected could not be replaced, by name."""
        return {layer.name: layer.note for layer in self.layers if layer.method is None and layer.note}

    def undo(self) -> None:
        """Restore the attention that the layers had; parameters keep their current values.

        A second call does nothing.

        Raises:
            RuntimeError: A layer was replaced again since. Undone first, this replacement would come back with the
                `undo` of the later one.
        """
        if self._undo_steps:
            for name in self.replaced:
                if not self._is_in_place(name):
                    raise RuntimeError(f"undo: {name} was replaced again since; undo the later replacement first")
        while self._undo_steps:
            self._undo_steps.pop()()

    def __enter__(self) -> "Replacements":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        rows = [["layer", "name", "before", "now", "note"]]
        for layer in self.layers:
            now = "unchanged" if layer.method is None else describe(layer.method)
            rows.append([str(layer.number), layer.name, layer.before, now, layer.note])
        return table(rows)


def table(rows: list[list[str]]) -> str:
    """Return rows, the first of which is the head, as aligned text; without a last column that is empty."""
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def describe(method: AnyMethod | Auto) -> str:
    """Return a name for a method that fits into one cell of the table."""
    if isinstance(method, nn.Module) and not isinstance(method, Method):
        return type(method).__name__
    return str(method) if isinstance(method, Auto) else label_of(method)


def check_layers(layers: Iterable[int] | None, count: int) -> set[int]:
    """Return the numbers of the selected layers; all `count` of them for None.

    Raises:
        ValueError: `layers` is not a list of numbers from 0 to count - 1.
    """
    if layers is None:
        return set(range(count))
    expected = f"layers: expected a list of numbers from 0 to {count - 1}"
    if not isinstance(layers, Iterable):
        raise ValueError(f"{expected}, got {layers!r}")
    numbers = list(layers)
    invalid = [x for x in numbers if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < count]
    if invalid:
        raise ValueError(f"{expected}, got {invalid}")
    return set(numbers)
