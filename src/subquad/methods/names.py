"""Methods by name: "taylor" is `Taylor()`, "taylor:3" is `Taylor(degree=3)`, "window:64:4" is `Window(64, sinks=4)`."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args

# Every name that `method=` accepts; some may be followed by a colon and a number or a word.
MethodName = Literal["exact", "taylor", "random", "linear", "separable", "window", "multipole", "hedgehog", "auto"]
NAMES: tuple[str, ...] = get_args(MethodName)


def method_named(spec: str, kinds: Mapping[str, Any], more_names: Sequence[str] = ()) -> Any:
    """Return the method that a name stands for, with its defaults unless a colon and an argument follow.

    Args:
        spec: A name, or a name, a colon and the method's `argument`; its `second_argument` may follow another colon.
        kinds: Methods by name.
        more_names: Further names for the error message.

    Raises:
        ValueError: The name is unknown, or what follows the colon is invalid.
    """
    name, colon, text = spec.partition(":")
    if name not in kinds:
        names = (*kinds, *more_names)
        close = get_close_matches(name.lower(), names, 1)
        hint = f"; did you mean {close[0] + colon + text!r}?" if close else ""
        raise ValueError(f"method: expected one of {', '.join(map(repr, names))} or a method, got {spec!r}{hint}")
    kind = kinds[name]
    if not colon:
        return kind()
    if kind.argument is None:
        raise ValueError(f"method: {name!r} takes nothing after its name, got {spec!r}")
    second = getattr(kind, "second_argument", None)
    given = {kind.argument: text}
    if second is not None and ":" in text:
        given = dict(zip((kind.argument, second), text.split(":", 1), strict=True))
    values = {}
    for argument, own in given.items():
        default = getattr(kind(), argument)
        try:
            values[argument] = int(own) if default is None else type(default)(own)
        except ValueError:
            raise ValueError(f"method: expected an integer for {argument} in {spec!r}, got {own!r}") from None
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"method: {spec!r}: {error}") from error
