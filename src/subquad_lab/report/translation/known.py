"""The functions of Python and torch that `assets/python.js` or JavaScript itself has."""

import dataclasses
import math
import operator
from collections import Counter
from functools import cache
from itertools import pairwise
from numbers import Real
from typing import Any

import torch

SAME_IN_MATH = ("ceil", "exp", "expm1", "floor", "hypot", "log", "log10", "log1p", "sinh", "sqrt", "tanh")
KNOWN: dict[Any, str] = {
    **{getattr(math, name): f"Math.{name}" for name in SAME_IN_MATH},
    math.comb: "py.comb", math.fsum: "py.sum", math.isfinite: "Number.isFinite", math.isinf: "py.isInfinite",
    math.lgamma: "py.lgamma", math.prod: "py.product", operator.index: "Number", pairwise: "py.pairwise",
    Counter: "py.counter", cache: "py.memoized", dataclasses.fields: "py.fields", torch.device: "py.device",
    torch.promote_types: "py.promoteTypes", Real: "py.kinds.float",
}  # fmt: skip
BUILTINS = {
    "abs": "Math.abs", "any": "py.any", "all": "py.all", "bool": "py.truth", "callable": "py.callable",
    "dict": "py.dict", "dict.fromkeys": "py.fromKeys", "divmod": "py.divmod", "enumerate": "py.enumerate",
    "float": "Number", "getattr": "py.getAttribute", "hasattr": "py.hasAttribute", "int": "Math.trunc",
    "len": "py.length", "list": "py.list", "map": "py.map", "max": "py.max", "min": "py.min", "next": "py.next",
    "range": "py.range", "repr": "py.repr", "round": "py.round", "sorted": "py.sorted", "str": "py.str",
    "sum": "py.sum", "tuple": "py.list", "type": "py.type", "zip": "py.zip",
}  # fmt: skip
UNPASSED = "strict"  # of zip
