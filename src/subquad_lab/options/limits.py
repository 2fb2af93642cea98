"""Sizes from the command line: whole numbers above 0, and not more than the memory holds."""

import os
from dataclasses import dataclass
from typing import Any

import subquad
from subquad_lab import UsageError

HEAP = 2  # The C library's heap can take so many times what a call holds.


@dataclass(frozen=True)
class Case:
    """What all measurements of a run share."""

    heads: int
    head_dim: int
    causal: bool
    backward: bool


def positive(option: str, value: str | int) -> int:
    """Read a whole number above zero, or say which option was wrong."""
    if str(value).strip().isdecimal() and int(value) > 0:
        return int(value)
    raise UsageError(f"--{option}: expected whole numbers above 0, found {str(value)!r}")


def predicted(method: Any, length: int, case: Case) -> Any:
    return subquad.cost(method, query_length=length, head_dim=case.head_dim, heads=case.heads, is_causal=case.causal,
                        training=case.backward)  # fmt: skip


def refuse_more_than_fits(named: dict[str, Any], sizes: list[int], case: Case) -> None:
    """Before the system ends this process, or another one."""
    length = sizes[-1]
    inputs = 3 * 4 * case.heads * length * case.head_dim
    for name, method in {"exact": subquad.Exact(), **named}.items():
        needed = inputs
        if needed <= memory():  # Else the prediction itself could take long.
            needed += HEAP * predicted(method, length, case).peak_bytes
        if needed > memory():
            raise UsageError(
                f"--lengths: {name} at length {length:,} can take {needed / 2**30:,.1f} GiB; this machine has "
                f"{memory() / 2**30:,.1f} GiB"
            )


def memory() -> int:
    """Of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def room() -> int:
    """For data of one kind, in bytes: a quarter of the memory, as they are copied on their way."""
    return memory() // 4
