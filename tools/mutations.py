"""Mutations of a Python source, each in one place; `mutants.py` runs the tests on them.

    comparison   < to <=, == to !=, is to is not, in to not in, and back
    arithmetic   + and -, * and /, // and % swapped; ** to *, & to |, << to >>; a minus dropped
    number       one more or one less; 0 to 1
    truth        True and False, and and or swapped; a not dropped; a condition negated
    name         min and max, amax and amin, tril and triu, ones and zeros, cos and sin, ... swapped
    call         exp, sqrt, softmax, clamp, ... dropped
    argument     the value of a keyword argument to None
    slice        a bound that is not a number, moved by one

Never changed: strings, annotations, decorators, stubs, and code that does not affect results (`is_spared`).
"""

import ast
import random
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple

OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "%"), ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.BitAnd: ("&", "|"),  # Not | to &: it is mostly a type union.
}  # fmt: skip
TWINS = [
    ("min", "max"), ("any", "all"), ("amax", "amin"), ("maximum", "minimum"), ("cummax", "cummin"), ("tril", "triu"),
    ("cos", "sin"), ("ones", "zeros"), ("ones_like", "zeros_like"), ("new_ones", "new_zeros"),
]  # fmt: skip
NAMES = dict(TWINS) | {b: a for a, b in TWINS}
DROPPED = {"abs", "clamp", "exp", "exp_", "reciprocal", "softmax", "sqrt", "square"}

# Sizes of blocks: any value gives correct results.
TUNING = {"FEW_TOKENS", "BLOCK_ROWS", "TILE_ROWS", "SPARE_KEYS", "MAX_CANDIDATE_FEATURES", "CANDIDATE_COUNTS"}
# Used by the planner only, whose tests do not run here.
PLANNING = {"traits", "candidates", "label", "warning", "error", "relative_variance"}
WORDING = {"hint", "made"}  # parts of error messages
# `strict` guards against errors that callers cannot cause, and the tests run on one device only.
KEYWORDS = {"strict", "device"}


class Place(NamedTuple):
    """Bytes start..end of a source, and their possible replacements."""

    start: int
    end: int
    choices: tuple[str, ...]


class Mutant(NamedTuple):
    path: Path
    line: int
    before: str  # the line, or several lines joined
    after: str
    source: bytes  # of the whole module


def is_spared(node: ast.AST) -> bool:
    """Return whether nothing inside the node should be mutated: strings, and code that does not affect results."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Call(func=ast.Attribute(attr="warn")):
            return True
        case ast.Assert() | ast.Call(func=ast.Attribute(attr="empty")):  # type narrowing; uninitialized memory
            return True
        case ast.FunctionDef(body=[*_, ast.Expr(ast.Constant(EllipsisType()))]):  # an overload or a protocol method
            return True
        case ast.FunctionDef(name=name) if name in PLANNING:
            return True
        case ast.Assign(targets=[ast.Name(name)]):
            return name in TUNING | WORDING
        case ast.keyword(arg=name, value=value):
            return name in KEYWORDS or isinstance(value, ast.JoinedStr)
    return False


def is_number(node: ast.AST) -> bool:
    match node:
        case ast.Constant(int() | float()) | ast.UnaryOp(ast.USub(), ast.Constant()):
            return True
    return False


def has_opposite(test: ast.AST) -> bool:
    """Return whether mutating the operator of the node already negates it."""
    match test:
        case ast.UnaryOp(ast.Not()):
            return True
        case ast.Compare(ops=[operator]):
            return not isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return False


def find_places(source: bytes) -> list[Place]:
    """Collect every expression that can be mutated. Mutations edit the text, so that the rest is unchanged."""
    lines = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def span(node: ast.AST) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def swapped(operator: ast.AST, *operands: ast.AST) -> Iterator[Place]:
        """Locate an operator between its operands, outside of comments; the syntax tree does not store its position."""
        for left, right in pairwise(operands):
            if type(operator) in OPERATORS:
                old, new = OPERATORS[type(operator)]
                gap = source[span(left)[1] : span(right)[0]]
                gap = re.sub(rb"#.*", lambda comment: b" " * len(comment[0]), gap)
                start = span(left)[1] + gap.index(old.encode())
                yield Place(start, start + len(old), (new,))

    def places_at(node: ast.AST) -> Iterator[Place]:
        match node:
            case ast.Constant(bool(value)):
                yield Place(*span(node), (str(not value),))
            case ast.Constant(int(value) | float(value)):
                yield Place(*span(node), (str(value + 1), str(value - 1)) if value else (str(value + 1),))
            case ast.UnaryOp(ast.USub(), ast.Constant(value)):
                yield Place(*span(node), (str(1 - value), str(-1 - value)))
            case ast.UnaryOp(ast.USub() | ast.Not() as operator):
                start = span(node)[0]
                yield Place(start, start + len("not " if isinstance(operator, ast.Not) else "-"), ("",))
            case ast.BinOp(left, operator, right) | ast.AugAssign(left, operator, right):
                yield from swapped(operator, left, right)
            case ast.BoolOp(operator, operands):
                yield from swapped(operator, *operands)
            case ast.Compare(left, operators, operands):
                for operator, pair in zip(operators, pairwise([left, *operands]), strict=True):
                    yield from swapped(operator, *pair)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.comprehension(ifs=[test]):
                start, end = span(test)
                if not has_opposite(test):
                    yield Place(start, end, (f"not ({source[start:end].decode()})",))
            case ast.Slice(lower, upper):
                for bound in (lower, upper):
                    if bound is not None and not is_number(bound):
                        yield Place(span(bound)[1], span(bound)[1], (" + 1",))
            case ast.Call(ast.Attribute(attr=name) | ast.Name(id=name) as function):
                end = span(function)[1]
                if name in NAMES:
                    yield Place(end - len(name), end, (NAMES[name],))
                elif name in DROPPED and isinstance(function, ast.Attribute):
                    yield Place(end - len(f".{name}"), span(node)[1], ("",))
                elif name in DROPPED:
                    yield Place(*span(function), ("",))
            case ast.keyword(arg=str(), value=value) if not isinstance(value, ast.Constant) and not is_number(value):
                yield Place(*span(value), ("None",))

    def visit(node: ast.AST) -> Iterator[Place]:
        if is_spared(node):
            return
        yield from places_at(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or (name == "operand" and is_number(node)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    return sorted(visit(ast.parse(source)))


def make_mutants(paths: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """Draw mutants without replacement, from each file in proportion to its number of places."""
    generator = random.Random(seed)
    found = [find_places(path.read_bytes()) for path in paths]
    until = [*accumulate(map(len, found), initial=0)]
    shares = [round(min(count, until[-1]) * part / until[-1]) for part in until]
    return [
        mutate(path, place, generator.choice(place.choices))
        for path, places, (first, last) in zip(paths, found, pairwise(shares), strict=True)
        for place in sorted(generator.sample(places, last - first))
    ]


def mutate(path: Path, place: Place, new: str) -> Mutant:
    source = path.read_bytes()
    mutated = source[: place.start] + new.encode() + source[place.end :]
    first, last = source.rfind(b"\n", 0, place.start) + 1, source.find(b"\n", place.end)
    before, after = (text.decode().split() for text in (source[first:last], mutated[first : last - len(source)]))
    return Mutant(path, source.count(b"\n", 0, first) + 1, " ".join(before), " ".join(after), mutated)
