"""A program: a few functions, and everything that they use, found by the names in their modules.

    function     translated
    class        its fields, and those of its methods and properties whose names are used anywhere
    constant     its value
    fact         a function that asks this machine, such as its number of threads: its answer
    known        a function of Python or torch that `assets/python.js` has too

A function that takes tensors, or anything else that is left out, becomes one that throws.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Hashable, Iterable, Iterator
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from subquad_lab.report.translation.expressions import Untranslatable, literal, spelled
from subquad_lab.report.translation.inspection import bound, full_name, is_ours, is_value, parameters_of, short_name
from subquad_lab.report.translation.known import BUILTINS, KNOWN, UNPASSED
from subquad_lab.report.translation.statements import Body

__all__ = ["Program", "Untranslatable"]


class Program:
    """Functions and everything that they use.

    Args:
        facts: Full names of the functions whose answers on this machine are part of the program.
        left_out: Full names of classes and functions that the program never needs.
    """

    def __init__(self, facts: Iterable[str] = (), left_out: Iterable[str] = ()) -> None:
        self.facts, self.left_out = frozenset(facts), frozenset(left_out)
        self.used = {"__post_init__", "__str__"}  # names of attributes
        self._functions: dict[str, str] = {}
        self._classes: dict[type, dict[str, str]] = {}  # the members of each, base classes first
        self._constants: dict[str, str] = {}

    def javascript(self, roots: dict[str, Any]) -> str:
        """Return the body of a function that returns the roots: functions, classes or constants."""
        found = ", ".join(f"{name}: {self.value_of(root, f'${name}')}" for name, root in roots.items())
        while missing := list(self._missing()):
            for kind, name, member in missing:
                self._classes[kind][name] = self._member(kind, name, member)
        classes = [self._class_text(kind, members) for kind, members in self._classes.items()]
        constants = [f"const {name} = {text};" for name, text in self._constants.items()]
        return "\n".join([*classes, *self._functions.values(), *constants, f"return {{{found}}};"])

    def value_of(self, value: Any, name: str) -> str:
        """Return the expression for a Python object; `name` is what it is called if it becomes a constant."""
        if value is None or isinstance(value, bool | int | float | str):
            return literal(value)
        if isinstance(value, torch.dtype):
            return f"py.dtype({literal(str(value))}, {value.itemsize})"
        if callable(value) and isinstance(value, Hashable) and value in KNOWN:
            return KNOWN[value]
        if isinstance(value, type):
            return self._class(value)
        if inspect.isroutine(value) or hasattr(value, "__wrapped__"):
            return self._function(inspect.unwrap(value))
        if name not in self._constants:
            self._constants[name] = self._constant(value, name)
        return name

    def _constant(self, value: Any, name: str) -> str:
        if isinstance(value, tuple | list | range):
            return f"[{', '.join(self.value_of(x, f'{name}${i}') for i, x in enumerate(value))}]"
        if isinstance(value, dict):
            items = enumerate(value.items())
            pairs = (f"[{self.value_of(k, f'{name}$k{i}')}, {self.value_of(v, f'{name}${i}')}]" for i, (k, v) in items)
            return f"new py.Dict([{', '.join(pairs)}])"
        if dataclasses.is_dataclass(value):
            kind = type(value)
            fields = (self.value_of(getattr(value, field), f"{name}${field}") for field in parameters_of(kind))
            return f"{self._class(kind)}.$new({', '.join(fields)})"
        raise Untranslatable(
            f"{name}: expected a number, a text, a function, a class, or a container of these, got {value!r}"
        )

    # --- Functions ----------------------------------------------------------------------------------------------------

    def _function(self, function: Any) -> str:
        full, name = full_name(function), short_name(function)
        if full in self.facts:
            return f"(() => {literal(function())})"
        if name not in self._functions:
            self._functions[name] = ""  # It may call itself.
            self._functions[name] = f"function{self.function_text(function, f' {name}')}"
        return name

    def function_text(self, function: Any, name: str, owner: str = "") -> str:
        """Return a function without its keyword: its star if it is a generator, name, parameters and body.

        Args:
            function: The function.
            name: Its name here, with a leading space where a keyword comes before it.
            owner: What JavaScript's `this` is called: "self", "cls", or nothing.
        """
        if full_name(function) in self.left_out or self._takes_what_is_left_out(function):
            return f'{name}() {{ throw new Error("{full_name(function)} is not part of the page"); }}'
        if not isinstance(getattr(function, "__module__", None), str) or not is_ours(function):
            raise Untranslatable(f"{full_name(function)}: expected a function of subquad, or one in KNOWN")
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(node, ast.FunctionDef)
        ast.increment_lineno(node, function.__code__.co_firstlineno - 1)
        body = Body(node, ModuleNames(self, function), function.__module__)
        parameters = ", ".join(self._parameter(p, name.strip()) for p in parameters_of(function).values())
        this = f"const {owner} = this;\n" if owner else ""
        return f"{'*' if body.is_generator else ''}{name}({parameters}) {{\n{this}{body.javascript()}\n}}"

    def _takes_what_is_left_out(self, function: Any) -> bool:
        return any(isinstance(x, type) and full_name(x) in self.left_out for x in function.__annotations__.values())

    def _parameter(self, parameter: inspect.Parameter, owner: str) -> str:
        name = spelled(parameter.name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"...{name}"
        if parameter.default is parameter.empty:
            return name
        return f"{name} = {self.value_of(parameter.default, f'{owner}${name}')}"

    # --- Classes ------------------------------------------------------------------------------------------------------

    @property
    def classes(self) -> list[type]:
        return list(self._classes)

    def _is_empty(self, kind: type) -> bool:
        """Return whether a class is only a name here, of which nothing is an instance."""
        return not is_ours(kind) or full_name(kind) in self.left_out

    def _class(self, kind: type) -> str:
        if kind not in self._classes:
            if not self._is_empty(kind) and is_ours(kind.__bases__[0]):
                self._class(kind.__bases__[0])
            self._classes[kind] = {}
        return short_name(kind)

    def _missing(self) -> Iterator[tuple[type, str, Any]]:
        """Yield members whose names are used and that are not translated yet."""
        for kind, members in list(self._classes.items()):
            if self._is_empty(kind):
                continue
            fields = parameters_of(kind) if is_value(kind) else {}
            for name, member in vars(kind).items():
                if name in self.used and name not in members and name not in fields:
                    yield kind, name, member

    def _member(self, kind: type, name: str, member: Any) -> str:
        if isinstance(member, property):
            return f"get {self.function_text(member.fget, name, 'self')}"
        if isinstance(member, cached_property):
            own = self.function_text(member.func, f"${name}", "self")
            return f"{own}\nget {name}() {{ return py.cached(this, '${name}'); }}"
        if isinstance(member, classmethod):
            return f"static {self.function_text(member.__func__, name, 'cls')}"
        if inspect.isfunction(member):
            return self.function_text(member, name, "self")
        constant = f"{short_name(kind)}${name}"
        is_container = isinstance(member, tuple | list | dict)
        value = self._constant(member, constant) if is_container else self.value_of(member, constant)
        return f"static {{ py.attribute(this, {literal(name)}, {value}); }}"

    def _class_text(self, kind: type, members: dict[str, str]) -> str:
        if self._is_empty(kind):
            return f"class {short_name(kind)} {{}}"
        base = kind.__bases__[0]
        parent = short_name(base) if base in self._classes else "py.Tuple" if issubclass(kind, tuple) else "py.Value"
        lines = [f"static $name = {literal(kind.__qualname__)};"]
        if is_value(kind):
            parameters = parameters_of(kind)
            taken = ", ".join(self._parameter(p, f"{short_name(kind)}$") for p in parameters.values())
            put = " ".join(f"self.{name} = {spelled(name)};" for name in parameters)
            after = " self.__post_init__();" if hasattr(kind, "__post_init__") else ""
            lines.append(f"static $new({taken}) {{ const self = new this(); {put}{after} return self; }}")
        return "\n".join([f"class {short_name(kind)} extends {parent} {{", *lines, *members.values(), "}"])


class ModuleNames:
    """What names mean in the module of a function."""

    def __init__(self, program: Program, function: Any) -> None:
        self._program, self._module, self._where = program, function.__globals__, function.__module__

    def _found(self, name: str) -> tuple[Any, list[str], str]:
        """Return the object of a dotted name, the attributes that follow it, and its name as a constant."""
        first, *rest = name.split(".")
        if first not in self._module:
            raise Untranslatable(f"{self._where}: the page does not have {name}")
        value, owner = self._module[first], self._where
        while isinstance(value, ModuleType):
            owner, first = value.__name__, rest.pop(0)
            value = getattr(value, first)
        return value, rest, f"{owner.replace('.', '_')}${first}"

    def value(self, name: str) -> str:
        if name in BUILTINS and name.partition(".")[0] not in self._module:
            return BUILTINS[name]
        value, rest, constant = self._found(name)
        for attribute in rest:
            self.note(attribute)
        return ".".join([self._program.value_of(value, constant), *rest])

    def kind(self, name: str) -> str:
        return f"py.kinds.{name}" if name in BUILTINS else self.value(name)

    def call(self, name: str, arguments: list[str], keywords: dict[str, str]) -> str:
        function = self.value(name)
        if name in BUILTINS:
            given = [value for keyword, value in keywords.items() if keyword != UNPASSED]
            return f"{function}({', '.join([*arguments, *given])})"
        value, rest, _ = self._found(name)
        for attribute in rest:
            value = getattr(value, attribute)
        if keywords:
            arguments = bound(name, parameters_of(value), arguments, keywords)
        made = ".$new" if isinstance(value, type) and value not in KNOWN else ""
        return f"{function}{made}({', '.join(arguments)})"

    def method_arguments(self, name: str, arguments: list[str], keywords: dict[str, str]) -> list[str]:
        if not keywords:
            return arguments
        owners = [kind for kind in self._program.classes if inspect.isfunction(vars(kind).get(name))]
        if not owners:
            raise Untranslatable(f"{self._where}: keywords of {name}, which is not a method of a translated class")
        return bound(name, parameters_of(vars(owners[0])[name]), arguments, keywords)

    def note(self, name: str) -> None:
        self._program.used.add(name)
