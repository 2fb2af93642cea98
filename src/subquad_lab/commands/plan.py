"""`subquad plan`: the fastest method within an error budget, the other candidates, and the reason."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import subquad
from subquad import Candidate
from subquad.methods import Method, resolve
from subquad_lab import UsageError
from subquad_lab.figures.tables import Table
from subquad_lab.system.memory import room
from subquad_lab.system.regular_file import read_regular
from subquad_lab.system.text import say

PURPOSES = ("swap", "train")
DTYPES = ("float32", "float64", "bfloat16", "float16")
NAMES = (("query", "key", "value"), ("q", "k", "v"))
MAX_SHOWN_CANDIDATES = 12  # unless --all is given


@dataclass(frozen=True)
class Question:
    """The arguments of `subquad.plan`; `sizes` maps its size arguments to values."""

    sizes: Mapping[str, Any]
    max_error: float | None = None
    logit_range: float | None = None
    sample: str | None = None  # a file
    causal: bool = True
    training: bool = False
    purpose: str = "swap"
    dtype: str = "float32"


def run(question: Question, show_all: bool) -> None:
    """Plan, then print a table and the reason."""
    check(question)
    made = answer(question)
    shown = made if show_all or made.purpose == "train" else replace(made, candidates=tuple(competing(made)))
    left_out = len(made.candidates) - len(shown.candidates)
    chosen = shown.candidates.index(shown.choice)
    rows = [[with_options(cell) for cell in row] for row in shown.rows()]
    Table(shown.columns, rows, styles={chosen: "bold"}).print()
    for text in ("", *map(with_options, filter(None, [shown.legend, shown.reason]))):
        say(*text.split("\n"))
    if left_out:
        say(
            f"Not shown: {left_out} candidates that are slower, less accurate, or in a form that would not run; use "
            "--all to show them."
        )


def check(question: Question) -> None:
    """Validate the options before anything is measured."""
    if question.dtype not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, got {question.dtype!r}")
    if question.purpose not in PURPOSES:
        raise UsageError(f"--purpose: expected {' or '.join(PURPOSES)}, got {question.purpose!r}")
    logit_range = question.logit_range
    if logit_range is not None and question.sample is not None:
        raise UsageError("--sample: expected either --logit-range or --sample, got both")
    if logit_range is not None and not 0 <= logit_range < inf:
        raise UsageError(f"--logit-range: expected a number >= 0, got {logit_range:g}")


def answer(question: Question) -> subquad.Plan:
    """Call `subquad.plan`; its errors are rewritten in terms of options."""
    tensors = None if question.sample is None else load_sample(question.sample)
    purpose: Any = question.purpose
    try:
        with calibration_shown() as progress:
            return subquad.plan(
                **question.sizes, is_causal=question.causal, training=question.training or None, purpose=purpose,
                max_error=question.max_error, logit_range=question.logit_range, sample=tensors,
                dtype=getattr(torch, question.dtype), progress=progress,
            )  # fmt: skip
    except PermissionError as error:  # The cache folder is not writable.
        raise UsageError(error) from error
    except ValueError as error:
        raise UsageError(in_options(str(error))) from error


@contextmanager
def calibration_shown() -> Iterator[Callable[[int, int], None]]:
    """Yield a progress callback that writes to standard error: a bar on a terminal, otherwise one line."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True)
    task = bar.add_task("calibrating this machine (once)")
    with ExitStack() as stack:

        def show(done: int, total: int) -> None:
            if done == 0 and console.is_terminal:
                stack.enter_context(bar)
            elif done == 0:
                say("calibrating this machine (once), at most 30 s ...", to_error=True, flush=True)
            bar.update(task, completed=done, total=total)

        yield show


def load_sample(path: str) -> tuple[Tensor, Tensor, Tensor]:
    """Load query, key and value from a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(read_regular(path, room()))
    except FileNotFoundError:
        raise UsageError(f"--sample: no such file: {path}") from None
    except OSError as error:
        raise UsageError(f"--sample: cannot read {path}: {error.strerror}") from error
    except (SafetensorError, KeyError) as error:  # KeyError: of a type that torch does not have
        raise UsageError(f"--sample: {path} is not a valid safetensors file: {error}") from error
    for names in NAMES:
        if all(name in tensors for name in names):
            query, key, value = (tensors[name] for name in names)
            break
    else:
        found = ", ".join(sorted(tensors)) or "none"
        raise UsageError(f"--sample: expected tensors named query, key and value, or q, k and v; got {found}")
    for name, tensor in zip(names, (query, key, value), strict=True):
        if not tensor.isfinite().all():
            raise UsageError(f"--sample: expected finite values, got NaN or infinity in {name}")
    return query, key, value


def with_options(text: str) -> str:
    """Return a text of the library with its arguments as options: --sample instead of `sample=`."""
    return re.sub(r"`?\b(sample|logit_range)=`?", lambda found: f"--{found[1].replace('_', '-')}", text)


def in_options(message: str) -> str:
    """Replace the argument name at the start of a library message by the option."""
    name, _, rest = message.partition(":")
    if name in NAMES[0]:
        return f"--sample: {message}"
    option = {"query_length": "length"}.get(name, name.replace("_", "-"))
    return f"--{option}:{rest}"


def competing(made: subquad.Plan) -> list[Candidate]:
    """Return the candidates to show: the choice, exact attention, and those that are acceptable or faster than exact.

    Only the form that `attention` would run is shown. Candidates that another one beats in both time and error are left
    out, as are all but one candidate per class if the error is unknown. If there are too many, acceptable ones come
    first.
    """
    taken = [c for c in made.candidates if c.is_chosen_form]
    exact = next(c for c in taken if isinstance(c.method, subquad.Exact))
    named = [exact] if made.choice is exact else [made.choice, exact]
    others = [
        c
        for c in taken
        if c not in named and (c.is_acceptable or c.seconds < exact.seconds) and not any(beats(o, c) for o in taken)
    ]
    usual = {type(c.method): c for c in reversed(others) if c.error.relative is None}  # the fastest of its class,
    usual |= {type(c.method): c for c in others if is_default(c.method)}  # or the one with default settings
    others = [c for c in others if c.error.relative is not None or c is usual[type(c.method)]]
    others.sort(key=lambda c: not c.is_acceptable)
    kept = named + others[: MAX_SHOWN_CANDIDATES - len(named)]
    return [c for c in made.candidates if c in kept]


def is_default(method: Any) -> bool:
    """Return whether all settings of the method are defaults."""
    return isinstance(method, Method) and method == resolve(method.name)


def beats(one: Candidate, other: Candidate) -> bool:
    """Return whether `one` is at least as good as `other` in time and error, and better in one; both must be known."""
    if one.error.relative is None or other.error.relative is None:
        return False
    mine, theirs = (one.seconds, one.error.relative), (other.seconds, other.error.relative)
    return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]
