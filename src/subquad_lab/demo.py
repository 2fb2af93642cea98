"""`subquad demo`: every method at growing lengths, beside exact attention."""

from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from subquad_lab.measure import MeasureError, Measurement, Request, measure
from subquad_lab.methods import parse_method
from subquad_lab.sizes import Case, positive, refuse_more_than_fits

COLUMNS = ("length", "method", "time", "speed", "peak memory", "relative error")
NOTE = """\
speed: against exact attention at the same length. peak memory: what one call needs beyond its inputs.
relative error: |out - exact| / |exact|. Above 1, marked !, the answer is worse than returning zeros."""


def run(methods: str, lengths: str, heads: int, width: int) -> None:
    """Measure and print; a table on a terminal, a line per measurement in a pipe or a log."""
    names = ["exact", *(name for name in methods.split(",") if name != "exact")]
    named = {name: parse_method(name, "--methods") for name in names}
    sizes = [positive("lengths", text) for text in lengths.split(",")]
    case = Case(positive("heads", heads), positive("width", width), causal=True, backward=False)
    refuse_more_than_fits(named, sorted(sizes), case)
    title = (
        f"Causal attention, forward, float32, {heads} heads of width {width}; "
        "normal inputs, queries and keys of standard deviation 0.5"
    )

    console = Console()
    requests = [Request(name, size, heads, width) for size in sizes for name in names]
    if console.is_terminal:
        table = Table(*COLUMNS[:2], title=title)
        for column in COLUMNS[2:]:
            table.add_column(column, justify="right")
        with Progress(console=console, transient=True) as progress:
            for cells in progress.track(rows(requests), len(requests), description="measuring"):
                table.add_row(*cells, end_section=len(table.rows) % len(names) == len(names) - 1)
        console.print(table)
        console.print(NOTE, highlight=False)
    else:
        print(title, plain(COLUMNS), sep="\n", flush=True)
        for cells in rows(requests):
            print(plain(cells), flush=True)
        print(NOTE)


def rows(requests: list[Request]) -> Iterator[tuple[str, ...]]:
    """The cells of each measurement as soon as it is made; exact comes first at each length."""
    exact_seconds: dict[int, float] = {}
    for request in requests:
        start = (f"{request.length:,}", request.method)
        try:
            found = measure(request)
        except MeasureError as error:
            yield (*start, str(error), "", "", "")
            continue
        if request.method == "exact":
            exact_seconds[request.length] = found.seconds
        yield (*start, *figures(found, exact_seconds.get(request.length)))


def figures(found: Measurement, exact_seconds: float | None) -> tuple[str, ...]:
    """Time, speed, memory and error as text."""
    mark = " !" if found.relative_error > 1 else ""
    return (
        f"{found.seconds * 1000:,.1f} ms",
        f"{exact_seconds / found.seconds:.2f}x" if exact_seconds else "-",
        f"{found.peak_bytes / 2**20:,.1f} MiB",
        f"{found.relative_error:.2g}{mark}",
    )


def plain(cells: tuple[str, ...]) -> str:
    """One line with columns under each other."""
    return f"{cells[0]:>7}  {cells[1]:12}" + "".join(f"  {cell:>14}" for cell in cells[2:])
