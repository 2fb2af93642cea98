"""The body of a Python function as JavaScript."""

import ast
from collections.abc import Iterable

from subquad_lab.report.translation.expressions import Expressions, Names, spelled


class Body:
    """The statements of one function.

    Args:
        node: The function.
        names: What the names of its module mean.
        where: The module, for messages.
        outer: The expressions of the function around it, if it is nested.
    """

    def __init__(self, node: ast.FunctionDef, names: Names, where: str, outer: Expressions | None = None) -> None:
        self._node, self._names, self._where = node, names, where
        self._of = Expressions(node, names, where, outer)
        self.is_generator = self._of.is_generator

    def javascript(self) -> str:
        """Return the statements, after a declaration of all variables."""
        declared = f"let {', '.join(map(spelled, self._of.stored))};\n" if self._of.stored else ""
        return declared + self._block(self._node.body)

    def _arrow(self) -> str:
        """Return a nested function."""
        if self.is_generator:
            raise self._of.fail(self._node, "a nested generator")
        return f"({', '.join(map(spelled, self._of.parameters))}) => {{\n{self.javascript()}\n}}"

    def _block(self, statements: Iterable[ast.stmt]) -> str:
        return "\n".join(filter(None, map(self._statement, statements)))

    def _statement(self, node: ast.stmt) -> str:
        """Return one statement; docstrings, assertions and annotations are left out."""
        match node:
            case ast.Expr(ast.Constant()) | ast.Assert() | ast.Pass() | ast.AnnAssign(value=None):
                return ""
            case ast.Expr(ast.Yield(value)):
                return f"yield {self._of.value(value)};"
            case ast.Expr(value):
                return f"{self._of.value(value)};"
            case ast.Return(value):
                return f"return {'null' if value is None else self._of.value(value)};"
            case ast.Assign(targets, value):
                return self._assigned(targets, self._of.value(value))
            case ast.AnnAssign(target, _, value):
                return self._assigned([target], self._of.value(value))
            case ast.AugAssign(target, operator, value):
                loaded = ast.copy_location(ast.BinOp(_loaded(target), operator, value), node)
                return self._assigned([target], self._of.value(loaded))
            case ast.If(test, body, orelse):
                other = f" else {{\n{self._block(orelse)}\n}}" if orelse else ""
                return f"if ({self._of.test(test)}) {{\n{self._block(body)}\n}}{other}"
            case ast.For(target, iterable, body, []):
                return f"for ({self._of.target(target)} of {self._of.value(iterable)}) {{\n{self._block(body)}\n}}"
            case ast.While(test, body, orelse):
                return self._loop(test, body, orelse)
            case ast.FunctionDef():
                return f"{spelled(node.name)} = {Body(node, self._names, self._where, self._of)._arrow()};"
            case ast.Raise(ast.Call(_, [message])):
                return f"throw new Error({self._of.value(message)});"
            case ast.Try(body, [handler], [], []):
                return self._tried(body, handler)
            case ast.Break():
                return "break;"
            case ast.Continue():
                return "continue;"
        raise self._of.fail(node, type(node).__name__)

    def _assigned(self, targets: list[ast.expr], value: str) -> str:
        if len(targets) == 1 and isinstance(targets[0], ast.Subscript):
            place = targets[0]
            return f"py.setItem({self._of.value(place.value)}, {self._of.value(place.slice)}, {value});"
        return "".join(f"{self._of.target(target)} = " for target in targets) + f"{value};"

    def _loop(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> str:
        """Return a loop; what follows `else` runs when the test fails, so it becomes the way out of an endless loop."""
        if not orelse:
            return f"while ({self._of.test(test)}) {{\n{self._block(body)}\n}}"
        out = f"if (!({self._of.test(test)})) {{\n{self._block(orelse)}\nbreak;\n}}"
        return f"while (true) {{\n{out}\n{self._block(body)}\n}}"

    def _tried(self, body: list[ast.stmt], handler: ast.ExceptHandler) -> str:
        caught = [] if handler.name is None else [handler.name]
        with self._of.bound(caught):
            handled = self._block(handler.body)
        shown = f" ({spelled(caught[0])})" if caught else ""
        return f"try {{\n{self._block(body)}\n}} catch{shown} {{\n{handled}\n}}"


def _loaded(target: ast.expr) -> ast.expr:
    """Return the place that is assigned to, as it is read."""
    return ast.parse(ast.unparse(target), mode="eval").body
