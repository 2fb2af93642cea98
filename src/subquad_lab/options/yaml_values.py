"""A small, strict part of YAML, for configs and for values on the command line.

    null, true/false/yes/no/on/off, decimal and 0x integers, decimal numbers, text, lists, mappings

What can surprise is left out. Anchors, aliases and merge keys can make a short file very large; the second of two
equal keys would silently win; 1:30 would be 90, 010 would be 8, and 2001-01-01 a date; tags could name Python objects.
Nesting is limited.

1e-3 and 010 are numbers where an option needs one. In a file they are text first, because the field may be a name.
"""

import re
from typing import Any

import yaml
from jsonargparse import _loaders_dumpers

MAX_DEPTH = 16
CORE = "tag:yaml.org,2002:"
# What is a number wherever it stands, and what is one where a number is needed.
PLAIN_INTEGER, INTEGER = (
    re.compile(rf"[-+]?(?:{digits}|0x[0-9a-fA-F_]+)$") for digits in ("0|[1-9][0-9_]*", "[0-9][0-9_]*")
)
SPECIAL = r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
PLAIN_NUMBER = re.compile(rf"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?${SPECIAL}")
NUMBER = re.compile(rf"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?${SPECIAL}")
WORDS = {"yes": True, "no": False, "true": True, "false": False, "on": True, "off": False}
TRUTH = re.compile(rf"(?:{'|'.join(form for word in WORDS for form in (word, word.title(), word.upper()))})$")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader without the parts above."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 as its parent has it
    yaml_constructors: Any = {}  # noqa: RUF012
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.constructor.ConstructorError(
                None, None, "anchors (&) and aliases (*) are not supported", event.start_mark
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.constructor.ConstructorError(
                None, None, f"expected at most {MAX_DEPTH} levels", event.start_mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        if isinstance(node, yaml.MappingNode):
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, "expected a name as a key", key.start_mark)
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {key.value[:80]!r}", key.start_mark
                    )
                seen.add(key.value)
        return yaml.constructor.BaseConstructor.construct_mapping(self, node, deep)  # type: ignore[no-any-return]  # no merge keys

    def undefined(self, node: Any) -> None:
        raise yaml.constructor.ConstructorError(
            None, None, f"could not determine a constructor for the tag {node.tag[:80]!r}", node.start_mark
        )

    def integer(self, node: Any) -> int:
        return self._scalar(node, INTEGER, lambda text: int(text, 16 if "x" in text else 10))  # type: ignore[no-any-return]

    def number(self, node: Any) -> float:
        return self._scalar(node, NUMBER, lambda text: float(re.sub(r"\.(?=[iInN])", "", text)))  # type: ignore[no-any-return]

    def truth(self, node: Any) -> bool:
        return self._scalar(node, TRUTH, lambda text: WORDS[text.lower()])  # type: ignore[no-any-return]

    def _scalar(self, node: Any, pattern: re.Pattern[str], convert: Any) -> Any:
        text = str(self.construct_scalar(node))
        try:
            if pattern.match(text):
                return convert(text.replace("_", ""))
        except ValueError:  # An integer of thousands of digits is not converted.
            pass
        raise yaml.constructor.ConstructorError(None, None, f"invalid value {text[:80]!r}", node.start_mark)


class _OptionLoader(_Loader):
    """The same, for a place where a number is likely."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012


def _resolve(loader: type[_Loader], integer: re.Pattern[str], number: re.Pattern[str]) -> None:
    """Set what values without a tag are."""
    loader.add_implicit_resolver(f"{CORE}bool", TRUTH, list("yYnNtTfFoO"))
    loader.add_implicit_resolver(f"{CORE}int", integer, list("-+0123456789"))
    loader.add_implicit_resolver(f"{CORE}float", number, list("-+0123456789."))
    loader.add_implicit_resolver(f"{CORE}null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


_resolve(_Loader, PLAIN_INTEGER, PLAIN_NUMBER)
_resolve(_OptionLoader, INTEGER, NUMBER)
for _tag, _construct in (
    ("null", _Loader.construct_yaml_null), ("bool", _Loader.truth), ("int", _Loader.integer), ("float", _Loader.number),
    ("str", _Loader.construct_yaml_str), ("seq", _Loader.construct_yaml_seq), ("map", _Loader.construct_yaml_map),
):  # fmt: skip
    _Loader.add_constructor(CORE + _tag, _construct)
_Loader.add_constructor(None, _Loader.undefined)


def yaml_value(text: str | bytes) -> Any:
    """Return the value of one YAML document.

    Raises:
        yaml.YAMLError: If it is not valid, or uses what is left out here.

    Example:
        >>> yaml_value("{lr: 0.001, note: 1:30}")
        {'lr': 0.001, 'note': '1:30'}
    """
    return yaml.load(text, _Loader)


def option_value(text: str) -> Any:
    """Return the value of an option; raises as `yaml_value` does.

    Example:
        >>> option_value("1e-3"), option_value("rnn")
        (0.001, 'rnn')
    """
    return yaml.load(text, _OptionLoader)


# jsonargparse reads numbers with a loader of its own, for which --steps 1:30 means 90. It has no setting for it; a test
# notices when a version ignores this one.
_loaders_dumpers.yaml_default_loader = _OptionLoader  # type: ignore[assignment]
