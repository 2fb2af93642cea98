"""`subquad plan`: the quickest method that keeps an error, the candidates beside it, and the reason."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import subquad
from subquad.methods import resolve
from subquad.planning.plan_result import RIGHT_ALIGNED, Candidate
from subquad_lab import UsageError

DTYPES = ("float32", "float64", "bfloat16", "float16")
NAMES = (("query", "key", "value"), ("q", "k", "v"))
MOST = 12  # candidates that are shown unless all are asked for


def run(
    sizes: dict[str, int | None], max_error: float, logit_range: float | None, sample: str | None, causal: bool,
    training: bool, purpose: str, dtype: str, show_all: bool,
) -> None:  # fmt: skip
    """Plan and print; a table with lines on a terminal, plain text in a pipe. `sizes` as for `subquad.plan`."""
    if dtype not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    if purpose not in ("swap", "train"):
        raise UsageError(f"--purpose: expected swap or train, found {purpose!r}")
    if logit_range is not None and sample is not None:
        raise UsageError("--sample: give either --logit-range or --sample, not both")
    if logit_range is not None and not 0 <= logit_range < inf:
        raise UsageError(f"--logit-range: expected a number >= 0, found {logit_range:g}")
    tensors = None if sample is None else load_sample(sample)
    try:
        with calibration_shown() as progress:
            made = subquad.plan(
                **sizes, is_causal=causal, training=training or None, purpose=purpose, max_error=max_error,
                logit_range=logit_range, sample=tensors, dtype=getattr(torch, dtype), progress=progress,
            )  # fmt: skip
    except PermissionError as error:  # of the cache folder
        raise UsageError(error) from error
    except ValueError as error:
        raise UsageError(in_options(str(error))) from error
    shown = made if show_all or purpose == "train" else replace(made, candidates=tuple(competing(made)))
    left_out = len(made.candidates) - len(shown.candidates)

    console = Console()
    if console.is_terminal:
        table = Table()
        for column in shown.columns:
            table.add_column(column, justify="right" if column in RIGHT_ALIGNED else "left")
        for candidate, cells in zip(shown.candidates, shown.rows(), strict=True):
            table.add_row(*cells, style="bold" if candidate is shown.choice else None)
        console.print(table)
        console.print(shown.reason, highlight=False)
    else:
        print(shown)
    if left_out:
        print(
            f"Not shown: {left_out} candidates that are slower, less exact, or in a form not taken; --all shows them."
        )


@contextmanager
def calibration_shown() -> Iterator[Callable[[int, int], None]]:
    """A callback for progress, on the standard error: a bar on a terminal, else a line. Nothing until it is called."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True)
    task = bar.add_task("calibrating this machine (once)")
    with ExitStack() as stack:

        def show(done: int, total: int) -> None:
            if done == 0 and console.is_terminal:
                stack.enter_context(bar)
            elif done == 0:
                print("calibrating this machine (once), at most 30 s ...", file=sys.stderr, flush=True)
            bar.update(task, completed=done, total=total)

        yield show


def load_sample(path: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value from a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise UsageError(f"--sample: there is no file {path!r}") from None
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--sample: {path} cannot be read as safetensors: {error}") from error
    for names in NAMES:
        if all(name in tensors for name in names):
            query, key, value = (tensors[name] for name in names)
            break
    else:
        found = ", ".join(sorted(tensors)) or "none"
        raise UsageError(f"--sample: expected tensors named query, key and value, or q, k and v; found {found}")
    for name, tensor in zip(names, (query, key, value), strict=True):
        if not tensor.isfinite().all():
            raise UsageError(f"--sample: {name} has numbers that are not finite")
    return query, key, value


def in_options(message: str) -> str:
    """The library's messages begin with the name of an argument; put that of the option in its place."""
    name, _, rest = message.partition(":")
    if name in NAMES[0]:
        return f"--sample: {message}"
    option = {"query_length": "length"}.get(name, name.replace("_", "-"))
    return f"--{option}:{rest}"


def competing(made: subquad.Plan) -> list[Candidate]:
    """The choice, exact attention, and what is acceptable or quicker than it, in the form that `attention` takes.

    A candidate that another one beats in time and in error is left out, and of those with an unknown error all but one
    of each kind. Acceptable ones come first where there are too many.
    """
    taken = [c for c in made.candidates if c.is_chosen_form]
    exact = next(c for c in taken if isinstance(c.method, subquad.Exact))
    named = [exact] if made.choice is exact else [made.choice, exact]
    others = [
        c
        for c in taken
        if c not in named and (c.is_acceptable or c.seconds < exact.seconds) and not any(beats(o, c) for o in taken)
    ]
    usual = {type(c.method): c for c in reversed(others) if c.error.relative is None}  # the fastest of its kind,
    usual |= {type(c.method): c for c in others if c.method == resolve(c.method.name)}  # or the one with usual settings
    others = [c for c in others if c.error.relative is not None or c is usual[type(c.method)]]
    others.sort(key=lambda c: not c.is_acceptable)
    kept = named + others[: MOST - len(named)]
    return [c for c in made.candidates if c in kept]


def beats(one: Candidate, other: Candidate) -> bool:
    """Whether it is as good in time and error, and better in one of them; of an unknown error nothing is said."""
    if one.error.relative is None or other.error.relative is None:
        return False
    mine, theirs = (one.seconds, one.error.relative), (other.seconds, other.error.relative)
    return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]
