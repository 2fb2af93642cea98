"""Python's expressions as JavaScript.

Where an operator of JavaScript differs from Python's (`//`, `%`, the truth of an empty list, the equality of values), a
function of `assets/python.js` is called, which is `py` in the translated text. Integers become JavaScript's numbers,
exact up to 2^53 and to 16 digits above.
"""

import ast
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["Expressions", "Untranslatable", "literal", "spelled"]

RESERVED = {
    "arguments", "case", "catch", "const", "default", "delete", "do", "enum", "eval", "export", "extends", "function",
    "instanceof", "interface", "let", "new", "null", "package", "py", "static", "super", "switch", "this", "throw",
    "typeof", "undefined", "var", "void",
}  # fmt: skip
ARITHMETIC = {ast.Sub: "-", ast.Div: "/", ast.Pow: "**"}
CALLED = {ast.FloorDiv: "floorDiv", ast.Mod: "mod", ast.LShift: "shift", ast.BitOr: "union"}
COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
# Methods of Python's own types, which the runtime has as functions of the object.
OWN_METHODS = {"append": "append", "bit_length": "bitLength", "format": "formatted", "join": "join"}


class Untranslatable(ValueError):
    """Python that the page cannot run."""


def literal(value: object) -> str:
    """Return a constant of the source."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    return json.dumps(value).replace("<", "\\u003c")  # No text can end the element that contains the script.


def spelled(name: str) -> str:
    """Return a name that JavaScript accepts."""
    return f"{name}_" if name in RESERVED else name


class Names(Protocol):
    """What is asked about names outside a function."""

    def value(self, name: str) -> str:
        """Return the expression for a name of the module."""

    def kind(self, name: str) -> str:
        """Return the expression for a class that `isinstance` is asked about."""

    def call(self, name: str, arguments: list[str], keywords: dict[str, str]) -> str:
        """Return the call of a name of the module."""

    def method_arguments(self, name: str, arguments: list[str], keywords: dict[str, str]) -> list[str]:
        """Return the positional arguments of a call of a method."""

    def note(self, name: str) -> None:
        """Note that an attribute is read."""


class Expressions:
    """The expressions of one function, which knows its variables.

    Args:
        node: The function.
        names: What the names of its module mean.
        where: The module, for messages.
        outer: The expressions of the function around it, if it is nested.
    """

    def __init__(
        self, node: ast.FunctionDef | ast.Lambda, names: Names, where: str, outer: "Expressions | None" = None
    ) -> None:
        self.node, self.where, self.outer, self._names = node, where, outer, names
        self._bound: list[list[str]] = []  # by comprehensions around an expression
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self.parameters = [a.arg for a in every] + ([arguments.vararg.arg] if arguments.vararg else [])
        body = node.body if isinstance(node.body, list) else [node.body]
        inside = [n for statement in body for n in _own_nodes(statement)]
        stored = [n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        stored += [n.name for n in inside if isinstance(n, ast.FunctionDef)]
        self.stored = [name for name in dict.fromkeys(stored) if name not in self.parameters]
        self.is_generator = any(isinstance(n, ast.Yield | ast.YieldFrom) for n in inside)

    def fail(self, node: Any, what: str) -> Untranslatable:
        return Untranslatable(f"{self.where}, line {node.lineno}: {what} is not in the Python that the page can run")

    def is_local(self, name: str) -> bool:
        is_own = name in self.parameters or name in self.stored or any(name in names for names in self._bound)
        return is_own or (self.outer is not None and self.outer.is_local(name))

    @contextmanager
    def bound(self, names: list[str]) -> Iterator[None]:
        """Take names for variables inside a comprehension, or of a caught error."""
        self._bound.append(names)
        yield
        self._bound.pop()

    def target(self, node: ast.expr) -> str:
        match node:
            case ast.Name(name):
                return spelled(name)
            case ast.Attribute(value, name):
                return f"{self.value(value)}.{name}"
            case ast.Tuple(parts) | ast.List(parts):
                return f"[{', '.join(map(self.target, parts))}]"
            case ast.Starred(part):
                return f"...{self.target(part)}"
        raise self.fail(node, f"assignment to {type(node).__name__}")

    # --- Conditions ---------------------------------------------------------------------------------------------------

    def is_boolean(self, node: ast.expr) -> bool:
        """Return whether an expression is certainly true or false, not another value with a truth."""
        match node:
            case ast.Compare() | ast.UnaryOp(ast.Not()):
                return True
            case ast.BoolOp(_, parts):
                return all(map(self.is_boolean, parts))
            case ast.Call(ast.Name("isinstance" | "hasattr" | "any" | "all" | "bool")):
                return True
        return isinstance(node, ast.Constant) and isinstance(node.value, bool)

    def test(self, node: ast.expr) -> str:
        """Return an expression of which only the truth matters."""
        match node:
            case ast.BoolOp(operator, parts):
                return f"({(' && ' if isinstance(operator, ast.And) else ' || ').join(map(self.test, parts))})"
            case ast.UnaryOp(ast.Not(), operand):
                return f"!{self.test(operand)}"
        return self.value(node) if self.is_boolean(node) else f"py.truth({self.value(node)})"

    def compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> str:
        a, b = self.value(left), self.value(right)
        if isinstance(operator, ast.Is | ast.IsNot):  # `== null` also holds for undefined
            is_none = isinstance(right, ast.Constant) and right.value is None
            equals = "==" if is_none else "==="
            return f"({a} {equals if isinstance(operator, ast.Is) else '!' + equals[1:]} {b})"
        if isinstance(operator, ast.In | ast.NotIn):
            return f"{'!' if isinstance(operator, ast.NotIn) else ''}py.has({b}, {a})"
        if isinstance(operator, ast.Eq | ast.NotEq):
            return f"{'!' if isinstance(operator, ast.NotEq) else ''}py.equal({a}, {b})"
        return f"({a} {COMPARED[type(operator)]} {b})"

    # --- Expressions --------------------------------------------------------------------------------------------------

    def value(self, node: Any) -> str:
        """Return an expression."""
        found = getattr(self, f"_{type(node).__name__}", None)
        if found is None:
            raise self.fail(node, type(node).__name__)
        return str(found(node))

    def _Constant(self, node: ast.Constant) -> str:
        return literal(node.value)

    def _Name(self, node: ast.Name) -> str:
        return spelled(node.id) if self.is_local(node.id) else self._names.value(node.id)

    def _global_name(self, node: ast.expr) -> str | None:
        """Return a name of the module, dotted if it is an attribute; None if this is anything else."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        return ast.unparse(node) if isinstance(root, ast.Name) and not self.is_local(root.id) else None

    def _NamedExpr(self, node: ast.NamedExpr) -> str:
        return f"({spelled(node.target.id)} = {self.value(node.value)})"

    def _Attribute(self, node: ast.Attribute) -> str:
        if dotted := self._global_name(node):
            return self._names.value(dotted)
        self._names.note(node.attr)
        return f"{self.value(node.value)}.{node.attr}"

    def _BinOp(self, node: ast.BinOp) -> str:
        a, b, operator = self.value(node.left), self.value(node.right), type(node.op)
        if operator in ARITHMETIC:
            return f"({a} {ARITHMETIC[operator]} {b})" if operator is not ast.Pow else f"(({a}) ** {b})"
        if operator in CALLED:
            return f"py.{CALLED[operator]}({a}, {b})"
        if operator is ast.Mult:
            return f"py.repeat({a}, {b})" if isinstance(node.left, ast.List) else f"({a} * {b})"
        if operator is ast.Add:
            return f"({a} + {b})" if _is_plain(node.left) or _is_plain(node.right) else f"py.add({a}, {b})"
        raise self.fail(node, operator.__name__)

    def _UnaryOp(self, node: ast.UnaryOp) -> str:
        if isinstance(node.op, ast.Not):
            return self.test(node)
        if isinstance(node.op, ast.USub):
            return f"(-{self.value(node.operand)})"
        raise self.fail(node, type(node.op).__name__)

    def _BoolOp(self, node: ast.BoolOp) -> str:
        if self.is_boolean(node):
            return self.test(node)
        name = "and" if isinstance(node.op, ast.And) else "or"
        return f"py.{name}({', '.join(f'() => {self.value(part)}' for part in node.values)})"

    def _IfExp(self, node: ast.IfExp) -> str:
        return f"({self.test(node.test)} ? {self.value(node.body)} : {self.value(node.orelse)})"

    def _Compare(self, node: ast.Compare) -> str:
        sides = [node.left, *node.comparators]
        if not all(isinstance(side, ast.Name | ast.Constant) for side in sides[1:-1]):
            raise self.fail(node, "a chain of comparisons of more than names")
        pairs = zip(sides, node.ops, sides[1:], strict=False)
        found = [self.compared(*pair) for pair in pairs]
        return found[0] if len(found) == 1 else f"({' && '.join(found)})"

    def _Subscript(self, node: ast.Subscript) -> str:
        if isinstance(node.slice, ast.Slice):
            if node.slice.step is not None:
                raise self.fail(node, "a slice with a step")
            ends = ("undefined" if end is None else self.value(end) for end in (node.slice.lower, node.slice.upper))
            return f"py.slice({self.value(node.value)}, {', '.join(ends)})"
        return f"py.item({self.value(node.value)}, {self.value(node.slice)})"

    def _Starred(self, node: ast.Starred) -> str:
        return f"...{self.value(node.value)}"

    def _Tuple(self, node: ast.Tuple | ast.List) -> str:
        return f"[{', '.join(map(self.value, node.elts))}]"

    _List = _Tuple

    def _Set(self, node: ast.Set) -> str:
        return f"new Set([{', '.join(map(self.value, node.elts))}])"

    def _Dict(self, node: ast.Dict) -> str:
        pairs = zip(node.keys, node.values, strict=True)
        items = (
            f"...{self.value(v)}.items()" if k is None else f"[{self.value(k)}, {self.value(v)}]" for k, v in pairs
        )
        return f"new py.Dict([{', '.join(items)}])"

    def _JoinedStr(self, node: ast.JoinedStr) -> str:
        return f"({' + '.join(map(self.value, node.values))})" if node.values else '""'

    def _FormattedValue(self, node: ast.FormattedValue) -> str:
        if node.conversion == ord("r"):
            return f"py.repr({self.value(node.value)})"
        spec = '""' if node.format_spec is None else self.value(node.format_spec)
        return f"py.format({self.value(node.value)}, {spec})"

    def _Lambda(self, node: ast.Lambda) -> str:
        inner = Expressions(node, self._names, self.where, self)
        return f"(({', '.join(map(spelled, inner.parameters))}) => {inner.value(node.body)})"

    # --- Comprehensions -----------------------------------------------------------------------------------------------

    def _looped(self, node: Any, innermost: str, *elements: ast.expr) -> str:
        """Return the loops of a comprehension around a statement on its elements."""
        with self.bound([n.id for part in node.generators for n in ast.walk(part.target) if isinstance(n, ast.Name)]):
            text = innermost.format(*map(self.value, elements))
            for part in reversed(node.generators):
                for condition in reversed(part.ifs):
                    text = f"if ({self.test(condition)}) {text}"
                text = f"for (const {self.target(part.target)} of {self.value(part.iter)}) {text}"
            return text

    def _collected(self, node: Any, innermost: str, *elements: ast.expr) -> str:
        return f"(() => {{ const out = []; {self._looped(node, innermost, *elements)} return out; }})()"

    def _ListComp(self, node: ast.ListComp) -> str:
        return self._collected(node, "out.push({});", node.elt)

    def _SetComp(self, node: ast.SetComp) -> str:
        return f"new Set({self._collected(node, 'out.push({});', node.elt)})"

    def _DictComp(self, node: ast.DictComp) -> str:
        return f"new py.Dict({self._collected(node, 'out.push([{}, {}]);', node.key, node.value)})"

    def _GeneratorExp(self, node: ast.GeneratorExp) -> str:
        return f"(function* () {{ {self._looped(node, 'yield {};', node.elt)} }})()"

    # --- Calls --------------------------------------------------------------------------------------------------------

    def _Call(self, node: ast.Call) -> str:
        if isinstance(node.func, ast.Name) and node.func.id == "cast":  # for type checkers alone
            return self.value(node.args[1])
        function, arguments = node.func, [self.value(a) for a in node.args]
        keywords = {k.arg: self.value(k.value) for k in node.keywords if k.arg is not None}
        if len(keywords) < len(node.keywords):
            raise self.fail(node, "** in a call")
        special = self._special_call(node, arguments, keywords)
        if special is not None:
            return special
        if name := self._global_name(function):
            return self._names.call(name, arguments, keywords)
        if isinstance(function, ast.Attribute):
            self._names.note(function.attr)
            own = self._names.method_arguments(function.attr, arguments, keywords)
            return f"{self.value(function.value)}.{function.attr}({', '.join(own)})"
        if keywords:
            raise self.fail(node, "a keyword in a call of a variable")
        made = ".$new" if isinstance(function, ast.Name) and function.id == "cls" else ""
        return f"{self.value(function)}{made}({', '.join(arguments)})"

    def _special_call(self, node: ast.Call, arguments: list[str], keywords: dict[str, str]) -> str | None:
        """Return a call that has a shorter form in JavaScript, or None."""
        match node.func:
            case ast.Name("isinstance"):
                kinds = (self._names.kind(ast.unparse(kind)) for kind in _alternatives(node.args[1]))
                return f"py.isInstance({arguments[0]}, {', '.join(kinds)})"
            case ast.Name("min" | "max" as name) if len(arguments) > 1 and not keywords:
                return f"Math.{name}({', '.join(arguments)})"
            case ast.Name("replace") if keywords:  # of dataclasses
                return f"py.replace({arguments[0]}, {_object(keywords)})"
            case ast.Attribute(ast.Call(ast.Name("super")), name):
                return f"super.{name}({', '.join(arguments)})"
            case ast.Attribute(ast.Name("object"), "__setattr__"):
                return f"({arguments[0]}[{arguments[1]}] = {arguments[2]})"
            case ast.Attribute(owner, "_replace"):  # of a NamedTuple
                return f"py.replace({self.value(owner)}, {_object(keywords)})"
            case ast.Attribute(owner, name) if name in OWN_METHODS:
                return f"py.{OWN_METHODS[name]}({', '.join([self.value(owner), *arguments])})"
        return None


def _object(fields: dict[str, str]) -> str:
    return f"{{{', '.join(f'{name}: {value}' for name, value in fields.items())}}}"


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """Return the classes of `int | float` or `(int, float)`."""
    if isinstance(node, ast.BinOp):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _is_plain(node: ast.expr) -> bool:
    """Return whether JavaScript's + is right for an operand: a number, or a string, but no list."""
    match node:
        case ast.Constant() | ast.JoinedStr() | ast.UnaryOp():
            return True
        case ast.BinOp(left, ast.Mult()):
            return not isinstance(left, ast.List)
        case ast.BinOp(left, ast.Add(), right):
            return _is_plain(left) or _is_plain(right)
        case ast.BinOp():
            return True
    return False


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and comprehensions inside it, but with their names."""
    yield node
    nested = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    if not isinstance(node, nested):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)
