"""Fitted coordinates of queries and keys, as part of a method's value: each leaves softmax attention as it is.

    key_shift c     q.(k - c)                  every logit of a row moves by q.c, which cancels
    query_shift b   (q - b).k,  exp(b.k)       what the logit of a key loses is a positive weight of that key
    balance p       (p q).(k / p)              the logit itself does not change

An approximation of exp is better where logits, or |q + k|, are small. `subquad.fit` finds the vectors on a sample; they
are constants, so nothing of the future enters a causal call. Each is (width,), or (key heads, width).
"""

import reprlib
from math import isfinite
from typing import cast

from torch import Tensor

from subquad.methods.method import FeatureMethod, Vectors


def as_vectors(name: str, given: object, positive: bool = False) -> Vectors | None:
    """Return vectors as tuples of numbers, so that methods stay values: comparable, hashable, of no device."""
    if given is None:
        return None
    rows = given.tolist() if isinstance(given, Tensor) else given
    if isinstance(rows, list | tuple):
        nested = [row if isinstance(row, list | tuple) else [row] for row in rows]
        numbers = [number for row in nested for number in row]
        flat = all(not isinstance(row, list | tuple) for row in rows)
        regular = flat or len({len(row) for row in nested}) == 1
        if regular and all(isinstance(x, int | float) and isfinite(x) and (x > 0 or not positive) for x in numbers):
            return tuple(rows) if flat else cast(Vectors, tuple(map(tuple, rows)))
    kind = "finite positive numbers" if positive else "finite numbers"
    raise ValueError(f"{name}: expected {kind} of shape (width,) or (heads, width), got {_summary(given)}")


def _summary(given: object) -> str:
    """Return what a message says about vectors that are wrong: not all of their numbers."""
    if isinstance(given, Tensor):
        least, most = (f"{float(x):g}" for x in given.aminmax()) if given.numel() else ("none", "none")
        return f"a tensor of shape {tuple(given.shape)}, numbers from {least} to {most}"
    lengths = [len(row) for row in given if isinstance(row, list | tuple)] if isinstance(given, list | tuple) else []
    if len(set(lengths)) > 1:
        return f"rows of lengths {reprlib.repr(lengths)}"
    return reprlib.repr(given)


def alignment_suffix(method: FeatureMethod) -> str:
    """Return what a label says about the coordinates."""
    words = "" if method.key_shift is None else ", keys centered"
    if method.query_shift is not None:
        words = ", queries centered" if method.key_shift is None else ", both sides centered"
    return words if method.balance is None else f"{words}, balanced"
