"""Which lines of a package run: `mutants.py` records them per test file, to run only tests that reach a mutation.

A line counts as executed if the interpreter runs it, in any thread, or if `torch.compile` translates it: Dynamo reads
the bytecode of a function in place of running it.
"""

import ast
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

Lines = dict[str, set[int]]  # by file name


def record_lines(paths: Sequence[Path]) -> Lines:
    """Return the executed lines of these files: empty now, and filled from now on until the process ends.

    Torch, if it is needed, must be loaded before.
    """
    lines: Lines = {str(path): set() for path in paths}

    def enter(frame: FrameType, *_: object) -> Callable[..., Any] | None:
        """Follow a call into one of the files; return None, at little cost, for any other."""
        seen = lines.get(frame.f_code.co_filename)
        if seen is None:
            return None

        def step(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            seen.add(frame.f_lineno)
            return step

        return step

    def translate(filename: str, line: int, name: str) -> None:
        if filename in lines:
            lines[filename].add(line)
        inner(filename, line, name)

    if guards := sys.modules.get("torch._guards"):
        inner = guards.TracingContext.set_current_loc
        guards.TracingContext.set_current_loc = staticmethod(translate)
    threading.settrace(enter)
    sys.settrace(enter)
    return lines


def statement_lines(source: bytes, line: int) -> set[int]:
    """Return the lines of the innermost statement at a line, without statements inside it.

    The interpreter reports only some lines of a statement that spans several.
    """

    def own(statement: ast.stmt) -> set[int]:
        inside = (node for node in ast.walk(statement) if isinstance(node, ast.stmt) and node is not statement)
        return span(statement).difference(*map(span, inside))

    def span(statement: ast.stmt) -> set[int]:
        return set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))

    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return next(lines for statement in statements if line in (lines := own(statement)))
